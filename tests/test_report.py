"""The page of a decomposition: it says what its record says, draws it without scripts, and needs no other file."""

import ast
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import downweight as dw
from downweight.meta import read_meta
from downweight.report import charts, page
from downweight.store import write_folder

STAGES = ["cold_start", "warm_start", "proximal", "proximal_bregman", "linearized", "influence"]
GAPS = {"warm_start": 0.8, "proximity": 0.05, "non_convergence": 0.3, "linearization": 0.004, "solver": 2e-9}
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}"


def made_up(removals: int = 20, seed: int = 0) -> dict[str, Any]:
    """A record of every stage, in which three responses of PBRF did not converge: one stopped, two left the basin."""
    draw = random.Random(seed)
    count = range(removals)
    stage = {}
    for name in STAGES:
        recipe = name in STAGES[:3]
        stage[name] = {
            "label": name.replace("_", " "),
            "converged": [not recipe for _ in count],
            "result": ["the recipe's 300 epochs are over" if recipe else "the gradient fell below rtol" for _ in count],
            "relative_gradient": [10 ** draw.uniform(-3, 0) for _ in count],
            "seconds": draw.uniform(1, 30),
            "shift_norm": [10 ** draw.uniform(-3, 0) for _ in count],
        }
    bregman = stage["proximal_bregman"]
    bregman["converged"][-3:] = [False] * 3
    bregman["result"][-3:] = ["max_steps was reached", "left the basin at 0.7 of epsilon", "left the basin"]
    gaps = {name: [size * 10 ** draw.uniform(-0.4, 0.4) for _ in count] for name, size in GAPS.items()}
    predicted = [draw.gauss(0, 2e-4) for _ in count]
    actual = {
        "cold_start": [draw.gauss(0, 8e-3) for _ in count],
        "warm_start": [value / 2 + draw.gauss(0, 6e-4) for value in predicted],
        "proximal": [value / 2 for value in predicted],
        "proximal_bregman": [*(1.02 * value for value in predicted[:-1]), 30.0],
        "two_stage": [0.9 * value for value in predicted],
        "linearized": predicted,
    }
    labels = {name: name.replace("_", " ") for name in actual}
    return {
        "format": "downweight",
        "format_version": 1,
        "package_version": "0.1.0",
        "kind": "decomposition",
        "task": {"model": "Sequential", "loss": "squared_error", "rows": 927, "parameters": 17793, "l2": 0.0,
                 "dtype": "float32", "device": "cpu", "coverage": "all 17,793 parameters", "outputs": [1]},
        "settings": {"damping": 0.001, "epsilon": 0.00107, "curvature": "gauss_newton", "solver": "Dual(pieces=None)",
                     "batch_order": "independent", "seed": 31, "proximal_bregman": "GaussNewton(rtol=0.001)",
                     "recipe": {"optimizer": "sgd", "lr": 0.03, "nesterov": False, "epochs": 200}},
        "removals": [[100 + index] for index in range(removals - 1)] + [list(range(30))],
        "chosen": f"{removals} at random, seed 31",
        "stages": list(STAGES),
        "left_out": [],
        "stage": stage,
        "gaps": gaps,
        "total": [sum(values) / 2 for values in zip(*gaps.values(), strict=True)],
        "gap_unit": "mean over the training rows of the distance between outputs",
        "queries": 103,
        "measurement": "loss",
        "unit": "half squared errors",
        "predicted_mean": predicted,
        "actual_mean": actual,
        "correlations": [
            {"response": name, "label": labels[name], "pearson": 0.1234, "pearson_std": 0.2, "spearman": 0.0456,
             "spearman_std": 0.21, "pearson_mean_loss": 0.7654, "spearman_mean_loss": 0.6543, "queries": 103,
             "removals": removals}
            for name in actual
        ],
        "verdict": ["Influence answers what PBRF asks.", "It does not answer retraining from scratch."],
        "notes": ["Two rows carry every correlation."],
        "residual": {"influence": 1.25e-12, "linearized": 2.25e-12},
        "versions": {"downweight": "0.1.0", "torch": "2.13.0", "numpy": "2.3.0", "python": "3.11.7"},
        "started": "2026-11-19T20:00:00+00:00",
        "seconds": 80.1,
        "fingerprint": {"parameters": "a1" * 32, "inputs": "b2" * 32},
    }  # fmt: skip


def without_recipe() -> dict[str, Any]:
    record = made_up()
    record["stages"] = STAGES[3:]
    for part in ("stage", "actual_mean"):
        record[part] = {name: each for name, each in record[part].items() if name not in STAGES[:3]}
    record["gaps"] = {name: record["gaps"][name] for name in ("linearization", "solver")}
    record["correlations"] = [line for line in record["correlations"] if line["response"] in record["actual_mean"]]
    record["settings"]["recipe"] = None
    record["left_out"] = [f"{name} needs a recipe: see dw.train." for name in STAGES[:3]]
    return record


def without_queries() -> dict[str, Any]:
    return made_up() | {"queries": 0, "predicted_mean": [], "actual_mean": {}, "correlations": []}


def with_undefined() -> dict[str, Any]:
    """Nulls where the schema allows them, and a NaN where the record was not yet stored."""
    record = made_up()
    record["total"] = None
    record["stage"]["cold_start"]["relative_gradient"] = [None] * 20
    record["correlations"][0] |= {"pearson": None, "pearson_std": None, "pearson_mean_loss": None}
    record["gaps"]["proximity"][0] = float("nan")
    record["gaps"]["solver"] = [0.0] * 20
    record["predicted_mean"][1] = None
    record["actual_mean"]["cold_start"] = [float("inf")] * 20
    return record


def hostile() -> dict[str, Any]:
    """Every word of the record is an attack."""

    def attacked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: attacked(each) for key, each in value.items()}
        if isinstance(value, list):
            return [attacked(each) for each in value]
        return HOSTILE if isinstance(value, str) else value

    plain = made_up()
    record = attacked(plain)
    record["removals"] = [[HOSTILE, HOSTILE]] * 20
    record["versions"][HOSTILE] = HOSTILE
    record["kind"], record["stages"] = "decomposition", plain["stages"]
    for line, other in zip(record["correlations"], plain["correlations"], strict=True):
        line["response"] = other["response"]
    return record


def single() -> dict[str, Any]:
    """One removal: no spread, no correlation, one point."""
    record = made_up(removals=3)
    for part in ("removals", "total", "predicted_mean"):
        record[part] = record[part][:1]
    for part in ("gaps", "actual_mean"):
        record[part] = {name: values[:1] for name, values in record[part].items()}
    for entry in record["stage"].values():
        entry |= {name: each[:1] for name, each in entry.items() if isinstance(each, list)}
    return record


CASES = {
    "full": made_up,
    "without recipe": without_recipe,
    "without queries": without_queries,
    "undefined": with_undefined,
    "hostile": hostile,
    "single": single,
}


class Reader(HTMLParser):
    """The words of a page outside of styles and data, its elements with their attributes, and unclosed elements."""

    VOID = frozenset({"meta", "link", "br", "img", "hr", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(html)
        self.close()
        self.words = re.sub(r"\s+", " ", " ".join(self.said))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.said.append(data)


@pytest.fixture(scope="module")
def full() -> str:
    return page.render(made_up())


def stored(html: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="record">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


@pytest.mark.parametrize("name", CASES)
def test_every_record_becomes_a_page(name):
    """Well nested, self-contained, with one labelled image a chart."""
    html = page.render(CASES[name]())
    reader = Reader(html)
    assert reader.open == []
    for _, attributes in reader.elements:
        for attribute in ("src", "href", "xlink:href", "srcset", "action"):
            assert attributes.get(attribute) in (None, "data:,")
    assert not re.search(r"url\(|@import", html)
    assert [attributes["type"] for tag, attributes in reader.elements if tag == "script"] == ["application/json"]
    pictures = [attributes for tag, attributes in reader.elements if tag == "svg" and attributes.get("role") == "img"]
    assert pictures
    assert all(attributes["aria-label"] for attributes in pictures)
    addresses = set(re.findall(r"https?://[^\"' <]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_the_record_is_in_the_page(full):
    assert stored(full) == made_up()


def test_the_verdict_comes_first_then_the_warnings(full):
    record = made_up()
    said = Reader(full).words
    order = [
        *record["verdict"],
        "Read this first",
        *record["notes"],
        "The five gaps",
        "Predicted against actual",
        "Correlations with the prediction",
        "Convergence and residuals",
        "The removals",
        "What was run",
    ]
    places = [said.index(each) for each in order]
    assert places == sorted(places)


def test_means_and_spreads_are_those_of_the_record(full):
    said = Reader(full).words
    for values in made_up()["gaps"].values():
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        [shown] = re.findall(rf"{re.escape(page.number(mean))} ± (\S+)", said)
        assert float(page.number(mean)) == pytest.approx(mean, rel=5e-3)  # three digits
        assert float(shown) == pytest.approx(spread, rel=5e-3)


def test_every_value_of_every_removal_is_in_a_table(full):
    record = made_up()
    cells = re.findall(r'<td class="number">([^<]+)<', full)
    for values in [*record["gaps"].values(), *record["actual_mean"].values(), record["predicted_mean"]]:
        assert {page.number(value) for value in values} <= set(cells)


def test_what_was_run_is_said(full):
    said = Reader(full).words
    for each in ("GaussNewton(rtol=0.001)", "Dual(pieces=None)", "31", "0.03", "2.13.0", "1 min 20 s", "a1a1a1a1a1a1…"):
        assert each in said
    assert "2.25e-12" in said  # the residuals
    assert "nesterov False" in said


def test_correlations_stand_in_the_table_and_over_the_panels(full):
    said = Reader(full).words
    assert said.count("Pearson 0.765, Spearman 0.654") == 3
    assert said.count("0.123 ± 0.200") == len(made_up()["actual_mean"])


def test_what_did_not_converge_is_never_shown_as_ground_truth(full):
    said = Reader(full).words
    assert "proximal bregman: not converged: 3 of 20 (1 × max_steps was reached; 1 × left the basin at 0.7" in said
    assert "cold start: not converged: 20 of 20 (the recipe's 300 epochs are over)" in said
    assert "left the basin: a runaway, not ground truth" in said
    assert re.search(r"17 of 20\s*, 2 left the basin", said)
    assert said.count("3 of 20 not converged") == 2  # over the panel, and beside the correlations
    assert "2 of 20 removals left the basin; without them the mean is" in said
    # The value of 30 of the runaway carries its mark wherever it stands, and does not set the scale of its panel.
    assert '>30.0<abbr class="bad" title="left the basin">×</abbr></td>' in full
    assert ">30.0</td>" not in full
    assert "1 that left the basin lies outside and is drawn at the edge" in said


def test_points_are_drawn_by_how_far_they_can_be_believed():
    values, states = [1.0, 2.0, 3.0, 4.0], list(charts.STATES)
    axis = charts.gap_axis(values, [4.5])
    svg = charts.gap_strip(values, states, mean=2.5, spread=2.0, axis=axis, title="unit", width=350)
    drawn = re.findall(r"<path[^>]*translate[^>]*>", svg)
    assert len(drawn) == 4
    assert [f'fill="{charts.BLUE}"' in point for point in drawn] == [True, False, False, False]
    assert [' fill="' in point for point in drawn] == [True, False, False, False]  # else it inherits fill="none"


def test_converged_records_carry_no_warning():
    record = made_up()
    record["notes"] = []
    for entry in record["stage"].values():
        entry["converged"], entry["result"] = [True] * 20, ["converged"] * 20
    said = Reader(page.render(record)).words
    assert "Read this first" not in said
    assert "not ground truth" not in said


def test_missing_stages_are_said_to_be_missing_and_why():
    said = Reader(page.render(without_recipe())).words
    for name in STAGES[:3]:
        assert f"Missing: {name} needs a recipe: see dw.train." in said
    assert "None: the stages that retrain are left out." in said
    for title, _, question in page.GAPS.values():
        assert title in said
        assert question in said


def test_a_reason_for_one_stage_is_not_taken_for_another():
    record = without_recipe()
    record["left_out"] = ["proximal_bregman is slow.", "proximal warm start has no recipe.", "cold_start is gone."]
    assert page.because(record, "proximal") == "proximal warm start has no recipe."
    assert page.because(record, "cold_start") == "cold_start is gone."
    assert "does not say why" in page.because(record | {"left_out": []}, "cold_start")


def test_without_queries_nothing_is_predicted():
    said = Reader(page.render(without_queries())).words
    assert "no queries were given, so nothing was predicted" in said
    assert "Pearson" not in said


def test_undefined_numbers_are_said_and_counted():
    html = page.render(with_undefined())
    said = Reader(html).words
    assert "NaN" not in html
    assert "Infinity" not in html
    assert "21 numbers of this record are not finite" in said
    assert "Missing: every value is undefined." in said  # cold start has no finite change
    assert "20 values below" in said  # the zeros of the solver gap, on a logarithmic axis
    assert stored(html)["gaps"]["proximity"][0] is None
    rest = made_up()["gaps"]["proximity"][1:]
    assert f"{page.number(statistics.fmean(rest))} ±" in said


def test_hostile_words_stay_words():
    record = hostile()
    html = page.render(record)
    reader = Reader(html)
    assert "img" not in {tag for tag, _ in reader.elements}
    assert not [name for _, attributes in reader.elements for name in attributes if name.startswith("on")]
    assert html.count("</script>") == 1
    assert "<img src=x onerror=alert(1)>" in reader.words  # shown, in the page's own text
    assert stored(html) == record


def test_another_record_is_refused():
    with pytest.raises(ValueError, match="kind 'scores'"):
        page.render({"kind": "scores"})


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1.0, "1.00"), (0.0123456, "0.0123"), (123.456, "123"), (45678.9, "45679"), (-2.5e-7, "-2.50e-7")]
    + [(9.999e-4, "0.00100"), (1e5, "1.00e5"), (None, "undefined")],
)
def test_numbers_have_three_digits(value, shown):
    assert page.number(value) == shown


def test_axes_are_logarithmic_beyond_two_decades():
    assert charts.gap_axis([1.0, 99.0], [120.0]) == charts.Axis(0.0, 1.04 * 120.0)
    assert charts.gap_axis([0.0, 0.02, 3.0], [4.0]) == charts.Axis(0.01, 10.0, logarithmic=True)
    assert charts.gap_axis([0.0, 0.0], [0.0]).high > 0


def test_panels_share_a_scale_unless_sizes_differ_tenfold():
    def points(size: float) -> list[tuple[float, float, str]]:
        return [(value / 10, size * value / 10, charts.CONVERGED) for value in range(-10, 11)]

    alike = charts.panels({"a": points(1.0), "b": points(9.0)})
    assert alike["a"].x == alike["a"].y == alike["b"].x == alike["b"].y
    apart = charts.panels({"a": points(1.0), "b": points(30.0)})
    assert apart["a"].square
    assert not apart["b"].square
    runaway = charts.panels({"a": [*points(1.0), (0.5, 1e5, charts.LEFT)]})["a"]
    assert runaway.y.high < 2
    assert runaway.outside == 1


def test_many_removals_are_sampled_and_that_is_said(monkeypatch):
    points = [(float(value), charts.LEFT if value % 100 == 0 else charts.CONVERGED) for value in range(6000)]
    drawn = charts.sampled(points)
    assert len(drawn) == charts.DRAWN
    assert {(1.0, charts.CONVERGED), (5900.0, charts.LEFT)} <= set(drawn)
    monkeypatch.setattr(charts, "DRAWN", 7)
    monkeypatch.setattr(page, "LISTED", 11)
    said = Reader(page.render(made_up())).words
    assert "7 of 20 removals are drawn" in said
    assert "7 of 20 points are drawn" in said
    assert said.count("The first 11 of 20 removals") == 3


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "folder" / "page.html"
    assert page.write(made_up(), path) == path
    before = path.read_text(encoding="utf-8")
    assert before == page.render(made_up())

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        page.write(without_queries(), path)
    assert path.read_text(encoding="utf-8") == before
    assert os.listdir(path.parent) == ["page.html"]


def test_the_report_computes_nothing_and_imports_no_torch():
    for module in (page, charts):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in imported} & {"torch", "numpy", "pandas", "scipy"}
        ours = {name for name in imported if name.split(".")[0] == "downweight"}
        torchless = {"downweight.errors", "downweight.meta", "downweight.version"}
        assert ours <= {"downweight.report", "downweight.report.charts"} | torchless


def test_a_saved_result_becomes_its_page_again_where_torch_is_not_installed(tmp_path):
    """By the command line; what needs torch says so."""
    written_by_the_store = ("format", "format_version", "package_version", "arrays", "checksum")
    record = {name: value for name, value in made_up(removals=5).items() if name not in written_by_the_store}
    write_folder(tmp_path / "saved", record, {})
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import downweight as dw\n"
        "try:\n    dw.Task\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "from downweight.cli import app\n"
        "app(['report', 'saved', '--out', 'pages/page.html'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "downweight.Task needs PyTorch (pip install torch), which is not here.",
        "Open pages/page.html",
    ]
    written = (tmp_path / "pages/page.html").read_text(encoding="utf-8")
    record = {name: value for name, value in read_meta(tmp_path / "saved").items() if name != "arrays"}
    assert written == page.render(record)
    assert "made by downweight" in written.lower()


def test_a_folder_of_something_else_is_no_page(tmp_path):
    write_folder(tmp_path / "scores", {"kind": "scores"}, {})
    with pytest.raises(dw.ForeignResult, match="holds 'scores'; expected 'decomposition'"):
        page.of_saved(tmp_path / "scores", tmp_path / "page.html")
    with pytest.raises(dw.DamagedResult, match="no such folder"):
        page.of_saved(tmp_path / "none", tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH (`make browser` installs it)")
def test_the_page_opens_in_a_browser(tmp_path):
    """No console message, no request but for the file, charts drawn, and no sideways scrolling on phone and desk."""
    from playwright.sync_api import sync_playwright

    files = {name: page.write(case(), tmp_path / f"{name}.html") for name, case in CASES.items()}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, file in files.items():
            for width in (390, 1280):
                tab = browser.new_page(viewport={"width": width, "height": 900})
                trouble: list[str] = []
                requests: list[str] = []
                tab.on("console", lambda message, said=trouble: said.append(message.text))
                tab.on("pageerror", lambda error, said=trouble: said.append(str(error)))
                tab.on("request", lambda request, asked=requests: asked.append(request.url))
                tab.goto(file.as_uri())
                for state in ("closed", "open"):
                    assert tab.evaluate("document.documentElement.scrollWidth") <= width, (name, width, state)
                    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
                charts_shown = tab.evaluate(
                    """[...document.querySelectorAll('svg[role=img]')].filter(each => each.clientWidth > 0)
                        .map(each => [each.clientWidth, each.querySelectorAll('path').length])"""
                )
                panels = 0 if name == "without queries" else 1
                assert len(charts_shown) >= 2 + panels
                assert all(wide >= 200 and paths > 1 for wide, paths in charts_shown)
                assert trouble == []
                assert [url for url in requests if not url.startswith(("file://", "data:"))] == []
                tab.emulate_media(media="print")
                tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = false)")
                hidden = (
                    "[...document.querySelectorAll('details table')].filter(each => !each.checkVisibility()).length"
                )
                assert tab.evaluate(hidden) == 0
                tab.close()
        browser.close()
