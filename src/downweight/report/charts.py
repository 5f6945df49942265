"""The pictures of a page as SVG text: one strip a gap, one panel predicted against actual; no JavaScript, no torch."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair
import vl_convert

INK, RULE, BLUE, PALE, GREY = "#1a1a1a", "#e5e5e5", "#1c5c9c", "#c9dcf0", "#6b6b6b"
DRAWN = 500  # points in one picture; of more, a sample evenly spaced in size is drawn (a guess that keeps pages small)
DECADES = 18  # a logarithmic axis shows at most this many; more than a float64 can tell apart in one sum
LOG_BEYOND = 100.0  # more than two decades between the least and the greatest value: logarithmic
OWN_SCALE_BEYOND = 10.0  # panels whose sizes differ by more than this get scales of their own

# How far a point can be believed, from best to worst, and how it is drawn: anything but the first is hollow.
CONVERGED, UNRECORDED, UNCONVERGED, LEFT = "converged", "not recorded", "not converged", "left the basin"
STATES = [CONVERGED, UNRECORDED, UNCONVERGED, LEFT]
SHAPES = {CONVERGED: "circle", UNRECORDED: "square", UNCONVERGED: "circle", LEFT: "M-1,-1L1,1M-1,1L1,-1"}
STROKES = {CONVERGED: BLUE, UNRECORDED: GREY, UNCONVERGED: BLUE, LEFT: GREY}
FILLS = {CONVERGED: BLUE, UNRECORDED: "transparent", UNCONVERGED: "transparent", LEFT: "transparent"}


@dataclass(frozen=True)
class Axis:
    """The interval that an axis shows."""

    low: float
    high: float
    logarithmic: bool = False

    def clamp(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Panel:
    """Predicted against actual for one response: where its points lie and what its axes show."""

    points: Sequence[tuple[float, float, str]]  # predicted, actual, state
    x: Axis
    y: Axis

    @property
    def square(self) -> bool:
        return self.x == self.y

    @property
    def outside(self) -> int:
        return sum(not (self.x.holds(predicted) and self.y.holds(actual)) for predicted, actual, _ in self.points)


def gap_axis(values: Sequence[float], ends: Sequence[float]) -> Axis:
    """One axis for all strips: from 0, or logarithmic where the positive `values` span more than two decades.

    `ends` are the upper ends of the bars of spread, which it holds too.
    """
    positive = [value for value in values if value > 0]
    high = max([*positive, *(end for end in ends if end > 0)], default=1.0)
    if not positive or max(positive) / min(positive) <= LOG_BEYOND:
        return Axis(0.0, 1.04 * high)
    top = math.ceil(math.log10(high))
    bottom = max(math.floor(math.log10(min(positive))), top - DECADES)
    return Axis(10.0**bottom, 10.0**top, logarithmic=True)


def gap_strip(
    values: Sequence[float],
    states: Sequence[str],
    *,
    mean: float,
    spread: float | None,
    axis: Axis,
    title: str,
    width: int,
) -> str:
    """One gap as SVG: a bar to the mean, a line of ± `spread` about it, and a point a removal."""
    points = [
        # The golden ratio spreads neighbours over the band, the same way in every drawing.
        {"value": axis.clamp(value), "height": 0.5 * (index * 0.618034 % 1) + 0.05, "state": state}
        for index, (value, state) in enumerate(sampled(list(zip(values, states, strict=True))))
    ]
    bar = {"low": axis.low, "mean": axis.clamp(mean), "bottom": 0.66, "middle": 0.82, "top": 0.98}
    x_axis = altair.Axis(
        title=textwrap.wrap(title, max(20, width // 7)) or None,
        values=_decades(axis, at_most=width // 60) if axis.logarithmic else altair.Undefined,
        tickCount=altair.Undefined if axis.logarithmic else 5,  # would thin the decades
        format="~e" if axis.logarithmic or axis.high < 1e-3 or axis.high >= 1e5 else "~f",
    )
    kind = "log" if axis.logarithmic else "linear"
    x = altair.X("low:Q", axis=x_axis, scale=altair.Scale(type=kind, domain=[axis.low, axis.high], nice=False))
    y = altair.Scale(domain=[0, 1])
    layers = [
        chart_of([bar]).mark_rect(color=PALE).encode(x, altair.X2("mean"), _band("bottom", y), altair.Y2("top")),
        chart_of(points)
        .mark_point(size=30, opacity=0.8, strokeWidth=1.3)
        .encode(altair.X("value:Q"), _band("height", y), **_look()),
    ]
    if spread is not None:
        ends = [mean - spread, mean + spread]
        line = {"from": axis.clamp(ends[0]), "to": axis.clamp(ends[1]), "middle": 0.82}
        # An end beyond the axis, as below zero on a logarithmic one, gets no cap.
        caps = [{"end": end, "middle": 0.82} for end in ends if axis.holds(end)]
        layers += [
            chart_of([line]).mark_rule(color=INK).encode(altair.X("from:Q"), altair.X2("to"), _band("middle", y)),
            chart_of(caps).mark_tick(color=INK, size=9).encode(altair.X("end:Q"), _band("middle", y)),
        ]
    layers.append(
        chart_of([bar])
        .mark_rule(color=INK, strokeWidth=3)
        .encode(altair.X("mean:Q"), _band("bottom", y), altair.Y2("top"))
    )
    return _svg(altair.LayerChart(layer=layers), width, 84 + (16 * len(x_axis.title) if title else 0))


def panels(points: dict[str, Sequence[tuple[float, float, str]]]) -> dict[str, Panel]:
    """Where everything goes in panels side by side; a point is (predicted, actual, state).

    One scale for all axes, unless sizes differ by more than ten times; then each panel has its own, and where the two
    axes of a panel differ by as much, each axis. Points that left the basin set no scale and are drawn at the edge.
    """
    believed = {
        name: [point for point in each if point[-1] != LEFT] or list(each) for name, each in points.items() if each
    }
    sides = {name: ([x for x, _, _ in each], [y for _, y, _ in each]) for name, each in believed.items()}
    everything = [side for pair in sides.values() for side in pair]
    found = {}
    for name, pair in sides.items():
        if _alike(everything):
            x = y = _around([value for side in everything for value in side])
        elif _alike(pair):
            x = y = _around([*pair[0], *pair[1]])
        else:
            x, y = (_around(side) for side in pair)
        found[name] = Panel(points[name], x, y)
    return found


def scatter(panel: Panel, *, unit: str, width: int = 300) -> str:
    """One panel as SVG, with the dashed line on which the prediction is exact."""
    x_power, y_power = (_power(axis) for axis in (panel.x, panel.y))
    points = [
        {"x": panel.x.clamp(predicted) / 10.0**x_power, "y": panel.y.clamp(actual) / 10.0**y_power, "state": state}
        for predicted, actual, state in sampled(list(panel.points), by=1)
    ]
    # The part of y = x that both axes show; everything else would need clipping, whose ids collide within a page.
    low, high = max(panel.x.low, panel.y.low), min(panel.x.high, panel.y.high)
    line = [{"x": end / 10.0**x_power, "y": end / 10.0**y_power} for end in (low, high) if low < high]

    def side(axis: Axis, power: int, what: str) -> dict[str, Any]:
        shift = textwrap.shorten(unit, 40, placeholder=" …") if power == 0 else _scaled(unit, power)
        title = [what, f"({shift})"] if shift else [what]
        return {
            "title": title,
            "scale": altair.Scale(domain=[axis.low / 10.0**power, axis.high / 10.0**power], nice=False, zero=False),
            "axis": altair.Axis(tickCount=5, format="~f", titlePadding=9),
        }

    x = altair.X("x:Q", **side(panel.x, x_power, "predicted by influence"))
    y = altair.Y("y:Q", **side(panel.y, y_power, "actual"))
    identity = chart_of(line).mark_line(color=GREY, strokeDash=[5, 4]).encode(x=x, y=y)
    marks = chart_of(points).mark_point(size=38, opacity=0.8, strokeWidth=1.4).encode(x=x, y=y, **_look())
    return _svg(altair.LayerChart(layer=[identity, marks]), width, width - 10)


def swatch(state: str) -> str:
    """How points of a state are drawn, as a small SVG for a legend."""
    style = f'fill="{FILLS[state]}" stroke="{STROKES[state]}" stroke-width="1.5"'
    shapes = {
        "circle": f'<circle cx="7" cy="7" r="4" {style}/>',
        "square": f'<rect x="3" y="3" width="8" height="8" {style}/>',
    }
    drawn = shapes.get(SHAPES[state], f'<path d="M3,3L11,11M3,11L11,3" {style}/>')
    return f'<svg class="swatch" aria-hidden="true" width="14" height="14" viewBox="0 0 14 14">{drawn}</svg>'


def sampled(points: list[tuple], *, by: int = 0) -> list[tuple]:
    """All points, or DRAWN of them: evenly spaced in the order of state and size, the extremes of both among them."""
    if len(points) <= DRAWN:
        return points
    order = sorted(points, key=lambda point: (STATES.index(point[-1]), point[by]))
    return [order[round(index * (len(order) - 1) / (DRAWN - 1))] for index in range(DRAWN)]


def _alike(groups: Sequence[Sequence[float]]) -> bool:
    sizes = [max(abs(value) for value in group) for group in groups if group]
    return not sizes or max(sizes) <= OWN_SCALE_BEYOND * min(sizes)


def _around(values: Sequence[float]) -> Axis:
    low, high = min(values, default=0.0), max(values, default=0.0)
    margin = 0.06 * (high - low) or abs(high) or 1.0
    return Axis(low - margin, high + margin)


def _power(axis: Axis) -> int:
    """The power of ten, a multiple of three, that leaves an axis with numbers from 1 to 1000; 0 near those."""
    size = max(abs(axis.low), abs(axis.high))
    return 0 if 0.1 <= size < 1e4 else 3 * math.floor(math.log10(size) / 3)


def _scaled(unit: str, power: int) -> str:
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits} {textwrap.shorten(unit, 32, placeholder=' …')}".strip()


def _decades(axis: Axis, at_most: int) -> list[float]:
    low, high = round(math.log10(axis.low)), round(math.log10(axis.high))
    step = math.ceil((high - low) / max(1, at_most))
    return [10.0**power for power in range(low, high + 1, step)]


def chart_of(values: list[dict[str, Any]]) -> altair.Chart:
    return altair.Chart(altair.Data(values=values))


def _band(field: str, scale: altair.Scale) -> altair.Y:
    """The height within a strip, which means nothing and has no axis."""
    return altair.Y(f"{field}:Q", scale=scale, axis=None)


def _look() -> dict[str, Any]:
    """Shape and colours by state."""

    def by_state(looks: dict[str, str]) -> altair.Scale:
        return altair.Scale(domain=STATES, range=[looks[state] for state in STATES])

    return {
        "shape": altair.Shape("state:N", scale=by_state(SHAPES), legend=None),
        "stroke": altair.Stroke("state:N", scale=by_state(STROKES), legend=None),
        "fill": altair.Fill("state:N", scale=by_state(FILLS), legend=None),
    }


def _svg(chart: altair.LayerChart, width: int, height: int) -> str:
    """`width` and `height` are those of the whole picture, so that pictures beside each other are equally wide."""
    fitted = chart.properties(
        width=width, height=height, autosize=altair.AutoSizeParams(type="fit", contains="padding"), padding=6
    ).configure(
        aria=False,  # the page labels each picture as a whole
        background="transparent",
        axis=altair.AxisConfig(
            gridColor=RULE, domainColor=GREY, tickColor=GREY, labelColor=INK, titleColor=INK,
            titleFontWeight="normal", labelFontSize=11, titleFontSize=12, labelFlush=True,
        ),
        view=altair.ViewConfig(stroke=None),
    )  # fmt: skip
    return vl_convert.vegalite_to_svg(fitted.to_dict())
