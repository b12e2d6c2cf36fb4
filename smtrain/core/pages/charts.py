"""Charts as SVG: curves that take the colours of their page, and curves and bars as images for
notebooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import cycle
from math import floor, isfinite, log10

from smtrain.core.pages.page import render

Points = Sequence[tuple[float, float]]
Marks = Sequence[tuple[float, str]]
HELD_OUT = "#d1663d"
_MAX_POINTS = 400  # points of a curve
_BARS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f"),
    *("#d62728", "#e377c2", "#aec7e8", "#ffbb78", "#98df8a", "#c5b0d5", "#c49c94", "#9edae5"),
    *("#dbdb8d", "#c7c7c7", "#ff9896", "#f7b6d2"),
)
"""Colours of the parts of all bars of a picture, in their order (Tableau's 20)."""
_BARS_LEFT, _BARS_WIDTH, _BARS_RIGHT = 90, 560, 110  # pixels
_BAR_HEIGHT, _LABEL_ROW, _BAR_GAP = 20, 16, 12  # pixels
_LETTER, _SWATCH, _LABEL_GAP = 6.4, 13, 12  # pixels: width of a letter of 11 pixels, at most
_HEAT_CELL, _HEAT_ROW = 72, 30  # pixels
BARS_WIDE = _BARS_LEFT + _BARS_WIDTH + _BARS_RIGHT


@dataclass(frozen=True)
class _Area:
    """The area of a curve in pixels, and the values at its edges."""

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[str, str]:
        return f"{self.left + _share(x, self.x, 0.0) * (self.right - self.left):.1f}", self.height(
            y
        )

    def height(self, y: float) -> str:
        return f"{self.bottom - _share(y, self.y, 0.5) * (self.bottom - self.top):.1f}"


def _share(value: float, ends: tuple[float, float], flat: float) -> float:
    low, high = ends
    return (value - low) / (high - low) if high > low else flat


def chart(
    title: str,
    line: Points,
    dots: Points = (),
    *,
    dots_are: str = "",
    log: bool = False,
    marks: Marks = (),
    along: str = "step",
) -> str:
    """A figure with a line and dots over steps, for a page; empty if the line has fewer than two
    points.

    `along` names what is drawn from left to right. `marks` are steps with a text each, drawn as
    vertical lines. `log` draws the logarithm if all values are above 0. Values that are not finite
    are left out.
    """
    line, dots = _thin_points(_finite(line)), _thin_points(_finite(dots))
    if len(line) < 2:
        return ""
    all_points = [*line, *dots]
    log = log and all(y > 0 for _, y in all_points)

    def scale_y(y: float) -> float:
        return log10(y) if log else y

    low, high = _ends(scale_y(y) for _, y in all_points)
    high = high if high > low else low + (abs(low) or 1.0) * 0.1
    width, height = 420, 190  # of the drawing; the page scales it
    area = _Area(52, 10, width - 10, height - 26, _ends(x for x, _ in all_points), (low, high))
    ticks = [
        (area.height(y), _short(10**y if log else y))
        for y in (_powers if log else _ticks)(low, high)
    ]
    return render(
        "chart.html",
        title=title,
        dots_are=dots_are,
        width=width,
        height=height,
        area=area,
        ticks=ticks,
        line=[area.at(x, scale_y(y)) for x, y in line],
        dots=[(*area.at(x, scale_y(y)), f"{along} {x:.0f}: {y:.4g}") for x, y in dots],
        along=along,
        marks=[(area.at(x, low)[0], text) for x, text in marks if area.x[0] <= x <= area.x[1]],
    )


def curve(
    losses: Points,
    width: int = 720,
    height: int = 110,
    points: int = _MAX_POINTS,
    validation_losses: Points = (),
) -> str:
    """(step, loss) pairs as an SVG of at most `points` points; empty if there are fewer than two.

    `validation_losses` are losses on held-out text, drawn as dots. `width` and `height` are pixels.
    Its grey can be read on light and dark pages.
    """
    line, dots = _thin_points(_finite(losses), points), _finite(validation_losses)[-points:]
    if len(line) < 2:
        return ""
    all_points = [*line, *dots]
    area = _Area(
        48,
        8,
        width - 8,
        height - 20,
        _ends(x for x, _ in all_points),
        _ends(y for _, y in all_points),
    )
    return render(
        "curve.svg",
        width=width,
        height=height,
        area=area,
        line=[area.at(*point) for point in line],
        dots=[area.at(*point) for point in dots],
        held_out=HELD_OUT,
    )


@dataclass(frozen=True)
class Bar:
    """A bar of parts, as long as their sum is of `whole`; `mark` is a value at which a line is
    drawn, `form` the format of a part's value.
    """

    name: str
    parts: Mapping[str, float]
    whole: float
    label: str
    mark: float | None = None
    form: str = ".3g"


def heat_map(
    title: str, rows: Sequence[tuple[str, Sequence[float]]], columns: Sequence[str]
) -> str:
    """Cells of shares from 0 to 1 as an SVG: rows by name, each with a value for every column."""
    cells = [
        (
            name,
            [
                (x * _HEAT_CELL, f"{value:.2f}", f"{value:.3f}", value < 0.6)
                for x, value in enumerate(values)
            ],
        )
        for name, values in rows
    ]
    return render(
        "heat_map.svg",
        title=title,
        rows=cells,
        columns=[(x * _HEAT_CELL, name) for x, name in enumerate(columns)],
        left=_BARS_LEFT,
        cell=_HEAT_CELL,
        height=_HEAT_ROW,
        width=_BARS_LEFT + _HEAT_CELL * len(columns) + 8,
    )


def _figure(value: float, form: str) -> str:
    """A value without an exponent: 0.0000845, not 8.45e-05."""
    return format(Decimal(format(value, form).replace(",", "")), "," if "," in form else "f")


def bars(rows: Sequence[Bar], words: str) -> str:
    """Bars below each other, and below each the colour, name and value of its parts; empty without
    bars.

    No two parts of the picture have the same colour, up to 20 of them.
    """
    if not rows:
        return ""
    bar_views, top, colours = [], 4.0, cycle(_BARS)
    for bar in rows:
        x, parts = float(_BARS_LEFT), []
        for part, value in bar.parts.items():
            if not value:
                continue
            wide, name = value / bar.whole * _BARS_WIDTH, part.replace("_", " ")
            parts.append((x, wide, next(colours), name, _figure(value, bar.form)))
            x += wide
        labels, height = _labels([f"{name} {value}" for *_, name, value in parts])
        mark = (
            None if bar.mark is None else f"{_BARS_LEFT + bar.mark / bar.whole * _BARS_WIDTH:.1f}"
        )
        bar_views.append((bar, parts, labels, mark, top))
        top += _BAR_HEIGHT + height + _BAR_GAP
    return render(
        "bars.svg",
        bars=bar_views,
        words=words,
        width=BARS_WIDE,
        height=f"{top:.0f}",
        after=_BARS_LEFT + _BARS_WIDTH + 8,
    )


def _labels(texts: Sequence[str]) -> tuple[list[tuple[float, float, str]], float]:
    """(x, y below the bar, text) of labels in rows as wide as the bar, and the height of the rows."""
    labels, x, y = [], float(_BARS_LEFT), float(_LABEL_ROW)
    for text in texts:
        wide = _SWATCH + _LETTER * len(text)
        if x > _BARS_LEFT and x + wide > _BARS_LEFT + _BARS_WIDTH:
            x, y = float(_BARS_LEFT), y + _LABEL_ROW
        labels.append((x, y, text))
        x += wide + _LABEL_GAP
    return labels, y


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if isfinite(y)]


def _ends(values: Iterable[float]) -> tuple[float, float]:
    numbers = list(values)
    return min(numbers), max(numbers)


def _thin_points(
    points: list[tuple[float, float]], max_points: int = _MAX_POINTS
) -> list[tuple[float, float]]:
    if len(points) <= max_points:
        return points
    return [points[i * (len(points) - 1) // (max_points - 1)] for i in range(max_points)]


def _ticks(low: float, high: float) -> list[float]:
    """Two to seven round values between the two."""
    rough = (high - low) / 6
    unit = 10 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = -floor(-low / step)
    return [(first + i) * step for i in range(8) if (first + i) * step <= high + step * 1e-6]


def _powers(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2 and 5 times powers of ten between the two: only whole powers if there are
    many, and other round values if there are less than two.
    """
    logs = [
        k + log10(m)
        for k in range(floor(low), floor(high) + 1)
        for m in (1, 2, 5)
        if low <= k + log10(m) <= high
    ]
    if len(logs) < 2:
        return [log10(value) for value in _ticks(10**low, 10**high)]
    if len(logs) <= 6:
        return logs
    whole_powers = [value for value in logs if abs(value - round(value)) < 1e-9]
    return whole_powers[:: -(-len(whole_powers) // 6)]


def _short(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
