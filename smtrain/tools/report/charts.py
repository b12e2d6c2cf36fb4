"""Curves as SVG that needs no library and no network, and takes the colours of its page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, isfinite, log10

Points = Sequence[tuple[float, float]]
Marks = Sequence[tuple[float, str]]
WIDTH, HEIGHT = 420, 190  # of the drawing; the page scales it
_LEFT, _TOP, _RIGHT, _BOTTOM = 52, 10, WIDTH - 10, HEIGHT - 26
_MOST = 400  # points drawn of a curve


def chart(
    title: str, line: Points, dots: Points = (), *, dots_are: str = "", log: bool = False, marks: Marks = ()
) -> str:
    """A line and dots over steps, as a figure with its title; empty where there are not two points of the line.

    `marks` are steps with a text each, drawn as vertical lines. `log` draws the logarithm of values that are all
    above 0. Values that are no finite number are left out.
    """
    drawn = _thinned([(x, y) for x, y in line if isfinite(y)])
    points = _thinned([(x, y) for x, y in dots if isfinite(y)])
    if len(drawn) < 2:
        return ""
    every = [*drawn, *points]
    log = log and all(y > 0 for _, y in every)

    def scaled(y: float) -> float:
        return log10(y) if log else y

    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    low, high = min(scaled(y) for _, y in every), max(scaled(y) for _, y in every)
    high = high if high > low else low + (abs(low) or 1.0) * 0.1

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
        return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - (scaled(y) - low) / (high - low) * (_BOTTOM - _TOP)

    grid = ""
    for value in _powers(low, high) if log else _ticks(low, high):
        y = _BOTTOM - (value - low) / (high - low) * (_BOTTOM - _TOP)
        shown = 10**value if log else value
        grid += f'<path class="grid" d="M{_LEFT},{y:.1f}H{_RIGHT}"/>'
        grid += f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_short(shown)}</text>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in drawn))
    circles = "".join(
        f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3"><title>step {x:.0f}: {y:.4g}</title></circle>'
        for (x, y) in points
        for cx, cy in [at(x, y)]
    )
    legend = f' <span class="dot">&#9679;</span> {escape(dots_are)}' if points else ""
    for x, text in marks:
        if x0 <= x <= x1:
            across = _LEFT + (x - x0) / (x1 - x0) * (_RIGHT - _LEFT)
            grid += f'<path class="mark" d="M{across:.1f},{_TOP}V{_BOTTOM}"><title>{escape(text)}</title></path>'
    return (
        f"<figure><figcaption>{escape(title)}{legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by step">{grid}'
        f'<path class="axis" d="M{_LEFT},{_TOP}V{_BOTTOM}H{_RIGHT}"/><polyline points="{path}"/>{circles}'
        f'<text x="{_LEFT}" y="{HEIGHT - 8}">step {x0:.0f}</text>'
        f'<text x="{_RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{x1:.0f}</text></svg></figure>'
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if len(points) <= _MOST:
        return points
    return [points[i * (len(points) - 1) // (_MOST - 1)] for i in range(_MOST)]


def _ticks(low: float, high: float) -> list[float]:
    """Two to six round values between the two."""
    rough = (high - low) / 4
    unit = 10 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = -floor(-low / step)
    return [(first + i) * step for i in range(8) if (first + i) * step <= high + step * 1e-6]


def _powers(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2 and 5 times powers of ten between the two; fewer where they are many."""
    found = [k + log10(m) for k in range(floor(low), floor(high) + 1) for m in (1, 2, 5) if low <= k + log10(m) <= high]
    if len(found) <= 6:
        return found
    whole = [value for value in found if abs(value - round(value)) < 1e-9]
    return whole[:: -(-len(whole) // 6)]


def _short(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
