"""The page of a decomposition: its stored record, and nothing else, as one HTML file that works offline."""

import json
import math
import os
import re
import secrets
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from downweight.errors import ForeignResult
from downweight.meta import read_meta
from downweight.report import charts
from downweight.report.charts import CONVERGED, LEFT, STATES, UNCONVERGED, UNRECORDED

LISTED = 1000  # removals listed in a table; all of them are in the record at the end of the page
NAMED = 12  # rows named of a group
WIDE, NARROW = 860, 350  # widths of a strip, on a desk and on a phone

STAGES = {
    "cold_start": "cold start",
    "warm_start": "warm start",
    "proximal": "proximal warm start",
    "proximal_bregman": "proximal Bregman response (PBRF)",
    "linearized": "linearised PBRF",
    "influence": "influence estimate",
    "two_stage": "two-stage retraining",
}
IN_ORDER = list(STAGES)[:6]  # those that the gaps lie between
PANELS = ["cold_start", "warm_start", "proximal_bregman"]
BY_RECIPE = ["cold_start", "warm_start", "proximal"]

# Each gap: its name, the two stages it lies between, and the question it is about.
GAPS = {
    "warm_start": (
        "Warm start",
        ("cold_start", "warm_start"),
        "How much does the optimum that training reaches depend on the start: the initialisation or the trained model?",
    ),
    "proximity": (
        "Proximity",
        ("warm_start", "proximal"),
        "How much does the damping change, which holds the parameters near the trained ones?",
    ),
    "non_convergence": (
        "Non-convergence",
        ("proximal", "proximal_bregman"),
        "How far would extra training alone have moved the model, whichever row is removed?",
    ),
    "linearization": (
        "Linearization",
        ("proximal_bregman", "linearized"),
        "How much is lost at first order, where outputs follow straight lines in the parameters?",
    ),
    "solver": (
        "Solver",
        ("linearized", "influence"),
        "How much is lost because the linear system is solved inexactly?",
    ),
}

MARKS = {CONVERGED: "", UNRECORDED: "?", UNCONVERGED: "°", LEFT: "×"}


@dataclass(frozen=True)
class Spread:
    """Mean and spread over removals of the values that are defined; the standard deviation divides by n − 1."""

    count: int
    mean: float | None
    std: float | None
    median: float | None
    least: float | None
    greatest: float | None

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        if not values:
            return cls(0, None, None, None, None, None)
        std = statistics.stdev(values) if len(values) > 1 else None
        return cls(len(values), statistics.fmean(values), std, statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Gap:
    """One gap as the page shows it; `missing` says why there is none."""

    title: str
    between: str
    question: str
    values: list[float | None]
    states: list[str]
    missing: str | None
    wide: Markup = Markup()
    narrow: Markup = Markup()

    @property
    def pairs(self) -> list[tuple[float, str]]:
        return [(value, state) for value, state in zip(self.values, self.states, strict=True) if value is not None]

    @property
    def spread(self) -> Spread:
        return Spread.of([value for value, _ in self.pairs])

    @property
    def stayed(self) -> Spread:
        """Without the removals of which a stage left the basin."""
        return Spread.of([value for value, state in self.pairs if state != LEFT])


def render(record: dict[str, Any]) -> str:
    """The record of a decomposition as one self-contained HTML page.

    The page computes nothing but means and spreads of what is stored. It asks no host for anything, needs no script to
    draw its charts, and carries the record itself as JSON. A number that is not finite is shown as undefined.
    """
    if record.get("kind") != "decomposition":
        raise ValueError(
            f"This page shows a decomposition, got a record of kind {record.get('kind')!r}. "
            'Give it the meta.json of a folder that `result.save("folder")` of a decomposition wrote.'
        )
    undefined = Counter[str]()
    record = finite(record, undefined)
    states = {stage: stage_states(record, stage) for stage in [*STAGES, *record["stage"], *measured(record)]}
    gaps = drawn(found_gaps(record, states), record["gap_unit"])
    template = (resources.files("downweight.report") / "page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "correlation": correlation, "duration": duration, "words": words}
    return environment.from_string(template).render(
        record=record,
        warnings=warnings(record, states, undefined["count"]),
        trained=[label(record, stage) for stage in BY_RECIPE if UNCONVERGED in states[stage]],
        gaps=gaps,
        logarithmic=any(gap.missing is None for gap in gaps) and shared_axis(gaps).logarithmic,
        below=below(gaps),
        total=Spread.of([value for value in record["total"] or [] if value is not None]),
        panels=scatter_panels(record, states),
        stages=stage_lines(record, states),
        removals=removal_lines(record, states, gaps),
        responses=measured(record),
        label=lambda stage: label(record, stage),
        doubt=lambda stage: doubt(states[stage]),
        legend=[(state, Markup(charts.swatch(state)), MARKS[state]) for state in STATES],
        shown={state for gap in gaps for _, state in gap.pairs},
        marked_gaps=[state for state in STATES[1:] if any(state in gap.states for gap in gaps)],
        marked_changes=[state for state in STATES[1:] if any(state in states[name] for name in measured(record))],
        settings=listed({name: each for name, each in record["settings"].items() if name != "recipe"}),
        recipe=listed(record["settings"]["recipe"] or {}),
        about=listed(record["task"]),
        fingerprint=shortened(record["fingerprint"]),
        drawn=charts.DRAWN,
        listed=LISTED,
        # No "<" is left, so nothing in the record can end the element.
        stored=Markup(json.dumps(record, allow_nan=False).replace("<", "\\u003c")),
    )


def write(record: dict[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page of `record` to `path`, whole or not at all."""
    return write_whole(render(record), path)


def write_whole(text: str, path: str | os.PathLike[str]) -> Path:
    """Write a text to `path`, whole or not at all; folders on the way are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def of_saved(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> Path:
    """Write the page of a decomposition that was saved, without torch and without its arrays."""
    folder = Path(folder)
    record = read_meta(folder)
    if record["kind"] != "decomposition":
        raise ForeignResult(f"{folder} holds {record['kind']!r}; expected 'decomposition'.")
    return write({name: value for name, value in record.items() if name != "arrays"}, path)


def finite(value: Any, undefined: Counter[str]) -> Any:
    """A copy with None for every number that is not finite (JSON has no other word for it), which are counted."""
    if isinstance(value, dict):
        return {key: finite(each, undefined) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, undefined) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        undefined["count"] += 1
        return None
    return value


def stage_states(record: dict[str, Any], stage: str) -> list[str]:
    """For every removal, how far this stage can be believed."""
    entry = record["stage"].get(stage)
    if entry is None:
        return [UNRECORDED] * len(record["removals"])
    pairs = zip(entry["converged"], entry["result"], strict=True)
    return [LEFT if LEFT in result.lower() else CONVERGED if done else UNCONVERGED for done, result in pairs]


def doubt(states: list[str]) -> str:
    """What to say beside a number that rests on responses in these states; empty where all converged."""
    failed = sum(state in (UNCONVERGED, LEFT) for state in states)
    if failed:
        return f"{failed} of {len(states)} not converged"
    return "convergence not recorded" if UNRECORDED in states else ""


def found_gaps(record: dict[str, Any], states: dict[str, list[str]]) -> list[Gap]:
    """All five, in order. A gap is as believable as the worse of its two stages."""
    gaps = []
    for name, (title, between, question) in GAPS.items():
        pair = " against ".join(label(record, stage) for stage in between)
        if name not in record["gaps"]:
            absent = [stage for stage in between if stage not in record["stages"]]
            reasons = [because(record, stage) for stage in absent] or ["it is not in the record."]
            gaps.append(Gap(title, pair, question, [], [], " ".join(dict.fromkeys(reasons))))
            continue
        # The estimate itself is a linear solve: where its convergence is not recorded, its residual is.
        known = [states[stage] for stage in between if stage in record["stage"] or stage != "influence"]
        worst = [max(each, key=STATES.index) for each in zip(*known, strict=True)]
        gaps.append(Gap(title, pair, question, record["gaps"][name], worst, None))
    return gaps


def drawn(gaps: list[Gap], unit: str) -> list[Gap]:
    """The same gaps with their strips, on one axis."""
    axis = shared_axis(gaps)
    present = [gap for gap in gaps if gap.pairs]

    def picture(gap: Gap, width: int) -> Markup:
        spread = gap.spread
        assert spread.mean is not None
        values, states = zip(*gap.pairs, strict=True)
        title = unit if gap is present[-1] else ""
        svg = charts.gap_strip(values, states, mean=spread.mean, spread=spread.std, axis=axis, title=title, width=width)
        said = (
            f"{gap.title} gap, {gap.between}: mean {number(spread.mean)}, standard deviation {number(spread.std)}, "
            f"from {number(spread.least)} to {number(spread.greatest)} over {spread.count} removals"
        )
        return labelled(svg, said)

    return [replace(gap, wide=picture(gap, WIDE), narrow=picture(gap, NARROW)) if gap.pairs else gap for gap in gaps]


def shared_axis(gaps: list[Gap]) -> charts.Axis:
    values = [value for gap in gaps for value, _ in gap.pairs]
    spreads = [gap.spread for gap in gaps]
    ends = [each.mean + (each.std or 0.0) for each in spreads if each.mean is not None]
    return charts.gap_axis(values, ends)


def below(gaps: list[Gap]) -> tuple[int, float]:
    """How many values a logarithmic axis cannot show (zero among them), and where it begins."""
    axis = shared_axis(gaps)
    outside = sum(value < axis.low for gap in gaps for value, _ in gap.pairs)
    return outside if axis.logarithmic else 0, axis.low


def scatter_panels(record: dict[str, Any], states: dict[str, list[str]]) -> list[dict[str, Any]]:
    """The three panels, each with its picture or the reason why there is none."""
    if not record["queries"]:
        return []
    pairs = {
        name: [
            (predicted, actual, state)
            for predicted, actual, state in zip(
                record["predicted_mean"], record["actual_mean"][name], states[name], strict=True
            )
            if predicted is not None and actual is not None
        ]
        for name in PANELS
        if name in record["actual_mean"]
    }
    # Pairs that are undefined in one panel are left out of that panel only, so each brings its own predictions.
    placed = charts.panels({name: each for name, each in pairs.items() if each})
    lines = {line["response"]: line for line in record["correlations"]}
    found = []
    for name in PANELS:
        panel, line = placed.get(name), lines.get(name, {})
        entry: dict[str, Any] = {
            "name": name,
            "title": label(record, name),
            "pearson": line.get("pearson_mean_loss"),
            "spearman": line.get("spearman_mean_loss"),
            "panel": panel,
            "states": Counter(state for _, _, state in panel.points) if panel else Counter(),
            "undefined": len(record["removals"]) - len(pairs.get(name, [])),
        }
        if panel is None:
            entry["missing"] = "every value is undefined." if name in pairs else because(record, name)
        else:
            said = (
                f"{entry['title']}: predicted against actual change of the mean {record['measurement']} for "
                f"{len(panel.points)} removals, Pearson correlation {correlation(entry['pearson'])}"
            )
            entry["picture"] = labelled(charts.scatter(panel, unit=record["unit"]), said)
        found.append(entry)
    return found


def stage_lines(record: dict[str, Any], states: dict[str, list[str]]) -> list[dict[str, Any]]:
    """One line a stage: those of the decomposition in order, missing ones too, then any other that was measured."""
    others = [name for name in [*record["stage"], *measured(record)] if name not in IN_ORDER]
    lines = []
    for name in [*IN_ORDER, *dict.fromkeys(others)]:
        entry = record["stage"].get(name)
        line: dict[str, Any] = {"label": label(record, name), "residual": record["residual"].get(name), "missing": None}
        if entry is None:
            absent = name not in record["stages"] and name not in measured(record)
            line["missing"] = f"Missing: {because(record, name)}" if absent else "Convergence not recorded."
        else:
            [(reason, times), *others_said] = Counter(entry["result"]).most_common()
            line |= {
                "converged": states[name].count(CONVERGED),
                "left": states[name].count(LEFT),
                "gradient": max((each for each in entry["relative_gradient"] if each is not None), default=None),
                "shift": max((each for each in entry["shift_norm"] if each is not None), default=None),
                "reason": reason,
                "times": times,
                "others": len(others_said),
                "seconds": entry["seconds"],
            }
        lines.append(line)
    return lines


def removal_lines(record: dict[str, Any], states: dict[str, list[str]], gaps: list[Gap]) -> list[dict[str, Any]]:
    """One line a removal, up to LISTED: its rows, its gaps, and predicted and actual changes, each with its mark."""
    lines = []
    for index, rows in enumerate(record["removals"][:LISTED]):
        named = ", ".join(str(row) for row in rows[:NAMED])
        lines.append(
            {
                "rows": named + (f" … ({len(rows):,} rows)" if len(rows) > NAMED else ""),
                "gaps": [(gap.values[index], gap.states[index]) for gap in gaps if gap.missing is None],
                "total": record["total"][index] if record["total"] else None,
                "predicted": record["predicted_mean"][index] if record["queries"] else None,
                "actual": {
                    name: (record["actual_mean"][name][index], states[name][index]) for name in measured(record)
                },
            }
        )
    return lines


def warnings(record: dict[str, Any], states: dict[str, list[str]], undefined: int) -> list[str]:
    """What a reader must see before the numbers: the notes, then every stage that did not converge, and why."""
    said = list(record["notes"])
    for name, entry in record["stage"].items():
        failed = [
            result for state, result in zip(states[name], entry["result"], strict=True) if state in (UNCONVERGED, LEFT)
        ]
        if failed:
            reasons = Counter(failed).most_common()
            listed = "; ".join(f"{count} × {reason}" if len(reasons) > 1 else reason for reason, count in reasons[:3])
            more = f"; and {len(reasons) - 3} other reasons" if len(reasons) > 3 else ""
            said.append(f"{label(record, name)}: not converged: {len(failed)} of {len(states[name])} ({listed}{more}).")
    if undefined:
        said.append(
            f"{undefined} numbers of this record are not finite. They are shown as undefined and left out of means."
        )
    return said


def because(record: dict[str, Any], stage: str) -> str:
    """Why a stage is missing, in the record's own words."""
    for name in (stage, label(record, stage)):
        named = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")  # "proximal" does not mean "proximal_bregman"
        if said := [each for each in record["left_out"] if named.search(each)]:
            return " ".join(said)
    return f"the {label(record, stage)} is not in this record, which does not say why."


def measured(record: dict[str, Any]) -> list[str]:
    """The responses whose actual change is known; none without queries."""
    return list(record["actual_mean"] or {}) if record["queries"] else []


def label(record: dict[str, Any], stage: str) -> str:
    return record["stage"].get(stage, {}).get("label") or STAGES.get(stage, words(stage))


def labelled(svg: str, said: str) -> Markup:
    """The picture as one image to a screen reader."""
    return Markup('<svg role="img" aria-label="{}" ').format(said) + Markup(svg.removeprefix("<svg "))


def listed(settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values, those of inner dictionaries with their path."""
    lines = []
    for name, value in settings.items():
        if isinstance(value, dict):
            lines += [(f"{name}: {inner}", each) for inner, each in listed(value)]
        else:
            lines.append((words(name), "none" if value is None else str(value)))
    return lines


def shortened(fingerprint: Any) -> list[tuple[str, str]]:
    named = fingerprint if isinstance(fingerprint, dict) else {"": fingerprint}
    return [(name, value if len(value) <= 16 else f"{value[:12]}…") for name, value in listed(named)]


def words(name: str) -> str:
    return name.replace("_", " ")


def number(value: float | None) -> str:
    """Three digits, with an exponent only far from 1."""
    if value is None:
        return "undefined"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    power = int(exponent)
    return f"{value:.{max(0, 2 - power)}f}" if -4 < power < 5 else f"{mantissa}e{power}"


def correlation(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "not recorded"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
