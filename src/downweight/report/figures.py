"""The paper's teaching figures as SVG text: plain numbers in, no torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair
import vl_convert

from downweight.report.charts import BLUE, GREY, INK, PALE, chart_of

ORANGE, LIGHT = "#c4540a", "#f6dcc8"
LEVELS = (0.02, 0.1, 0.3, 0.8, 2.0)  # of the cost above its least value on the grid


def paths(
    across: Sequence[float],
    along: Sequence[float],
    costs: Mapping[str, Sequence[Sequence[float]]],
    ways: Mapping[str, Sequence[Sequence[float]]],
    stars: Mapping[str, Sequence[float]],
) -> str:
    """Paths of parameters over the contours of a cost: `costs[name][row][column]` on the grid along x across."""
    colours = {name: colour for name, colour in zip(costs, (GREY, PALE), strict=False)}
    ways_colours = {name: colour for name, colour in zip(ways, (INK, BLUE), strict=False)}
    lines = [
        {"cost": name, "piece": f"{name} {level} {place}", "x": x, "y": y, "at": at}
        for name, values in costs.items()
        for level in LEVELS
        for place, piece in enumerate(contour(across, along, values, min(map(min, values)) + level))
        for at, (x, y) in enumerate(piece)
    ]
    steps = [{"path": name, "x": x, "y": y, "at": at} for name, way in ways.items() for at, (x, y) in enumerate(way)]
    marks = [{"name": name, "x": x, "y": y} for name, (x, y) in stars.items()]
    x = altair.X("x:Q", title="θ₁", scale=altair.Scale(domain=[across[0], across[-1]], nice=False))
    y = altair.Y("y:Q", title="θ₂", scale=altair.Scale(domain=[along[0], along[-1]], nice=False))
    contours = chart_of(lines).mark_line(strokeWidth=1.2).encode(
        x=x, y=y, detail="piece:N", order="at:Q", color=_colour("cost", "cost", colours)
    )  # fmt: skip
    drawn = chart_of(steps).mark_line(strokeWidth=2, point=altair.OverlayMarkDef(size=26)).encode(
        x=x, y=y, order="at:Q", color=_colour("path", "ε from 0 to 1/N", ways_colours)
    )  # fmt: skip
    star = "M0,-1L.23,-.31L.95,-.31L.36,.12L.59,.81L0,.38L-.59,.81L-.36,.12L-.95,-.31L-.23,-.31Z"
    stars_ = chart_of(marks).mark_point(shape=star, size=170, filled=True, color=INK).encode(x=x, y=y)
    names = chart_of(marks).mark_text(dx=14, dy=-8, color=INK, fontSize=13).encode(x=x, y=y, text="name:N")
    layers = altair.layer(contours, drawn, stars_, names).resolve_scale(color="independent")
    return _svg(layers.properties(width=380, height=340))


def regions(
    axis: Sequence[float],
    outputs: Mapping[str, Sequence[Sequence[float]]],
    rows: Sequence[tuple[float, float, int]],
    removed: int,
) -> str:
    """The regions of two classes, one panel a network: `outputs[name][row][column]` are logits of class 1."""
    half = (axis[1] - axis[0]) / 2
    points = [{"x": x, "y": y, "class": str(label)} for x, y, label in rows]
    corner = [points[removed]]
    colours = _colour("class", "class", {"0": ORANGE, "1": BLUE})
    ends = [axis[0] - half, axis[-1] + half]
    x = altair.X("x:Q", title=None, scale=altair.Scale(domain=ends, nice=False))
    y = altair.Y("y:Q", title=None, scale=altair.Scale(domain=ends, nice=False))
    panels = []
    for name, values in outputs.items():
        cells = [
            {"x": a - half, "x2": a + half, "y": b - half, "y2": b + half, "side": str(int(value > 0))}
            for b, line in zip(axis, values, strict=True)
            for a, value in zip(axis, line, strict=True)
        ]
        shade = altair.Fill("side:N", scale=altair.Scale(domain=["0", "1"], range=[LIGHT, PALE]), legend=None)
        field = chart_of(cells).mark_rect(strokeWidth=0).encode(x=x, x2="x2:Q", y=y, y2="y2:Q", fill=shade)
        dots = chart_of(points).mark_circle(size=30, opacity=1).encode(x=x, y=y, color=colours)
        ring = chart_of(corner).mark_point(size=190, color=INK, strokeWidth=1.6).encode(x=x, y=y)
        panels.append(altair.layer(field, dots, ring).properties(width=230, height=230, title=name))
    return _svg(altair.hconcat(*panels))


def contour(
    across: Sequence[float], along: Sequence[float], values: Sequence[Sequence[float]], level: float
) -> list[list[tuple[float, float]]]:
    """Short lines at which the values cross a level: the two triangles of each cell, linearly."""
    pieces = []
    for i in range(len(along) - 1):
        for j in range(len(across) - 1):
            corners = [(across[j + b], along[i + a], values[i + a][j + b]) for a, b in ((0, 0), (0, 1), (1, 1), (1, 0))]
            for triangle in (corners[:3], [corners[0], *corners[2:]]):
                met = [
                    (x + (level - v) / (w - v) * (x_ - x), y + (level - v) / (w - v) * (y_ - y))
                    for (x, y, v), (x_, y_, w) in zip(triangle, [*triangle[1:], triangle[0]], strict=True)
                    if (v < level) != (w < level)
                ]
                if met:
                    pieces.append(met)
    return pieces


def _colour(field: str, title: str, colours: Mapping[str, str]) -> altair.Color:
    scale = altair.Scale(domain=list(colours), range=list(colours.values()))
    return altair.Color(f"{field}:N", title=title, scale=scale)


def _svg(chart: Any) -> str:
    return vl_convert.vegalite_to_svg(
        chart.properties(padding={"left": 5, "top": 5, "bottom": 5, "right": 40})
        .configure(background="white")
        .to_dict()
    )
