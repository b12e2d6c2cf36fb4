"""A plan as a notebook shows it: where the memory, the step's time and the money go, one bar each, then the summary."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from smtrain.core.config.units import spell
from smtrain.core.web_page import image

if TYPE_CHECKING:
    from smtrain.client.planner.result import Plan

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f")
_LEFT, _WIDTH, _RIGHT, _ROW = 90, 560, 110, 44  # pixels
_WRAPPED = (
    "font-family:monospace;font-size:85%;line-height:1.35;white-space:pre-wrap;overflow-wrap:anywhere;"
    "word-break:normal;text-wrap:pretty"
)
_INK = "#7a7a7a"  # read on light and dark pages; an image does not know the page's colour
_TEXT = f'font-size="11" font-family="sans-serif" fill="{_INK}"'


def card(plan: Plan, text: str) -> str:
    """Bars as an image, and `text`, its summary, below them."""
    bars = svg(plan)
    drawn = image(bars, "memory, step time and cost of the plan", _LEFT + _WIDTH + _RIGHT) if bars else ""
    lines = "".join(_line(line) for line in text.split("\n"))
    return f'{drawn}<div style="{_WRAPPED}">{lines}</div>'


def _line(line: str) -> str:
    """A line of the summary; what does not fit it goes on below its text, as on a terminal, and not by one word."""
    hang = 2 if line.startswith("!") or line[:1].isdigit() else 12
    return f'<div style="padding-left:{hang}ch;text-indent:-{hang}ch">{escape(line) or "&nbsp;"}</div>'


def svg(plan: Plan) -> str:
    """A bar each for a core's memory, up to what it has, the step's seconds and the dollars; none for the unknown."""
    bars: list[tuple[str, Mapping[str, float], float, str, float | None]] = []
    if plan.memory_gib:
        m = _parts(plan.memory_gib)
        total, room = plan.memory_gib["total"], plan.memory_gib["available"]
        bars.append(("core", m, max(total, room), f"{total:.1f} of {room:.0f} GiB", room))
    if plan.step_s:
        total = plan.step_s["total"]
        bars.append(("step", _parts(plan.step_s), total, spell(total), None))
    if plan.dollars and plan.fits:
        bars.append(("cost", plan.dollars_by_item, plan.dollars, f"${plan.dollars:,.0f}", None))
    if not bars:
        return ""
    drawn = "".join(_bar(row, *bar) for row, bar in enumerate(bars))
    wide, high = _LEFT + _WIDTH + _RIGHT, _ROW * len(bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        f'style="display:block;width:100%;max-width:{wide}px;height:auto" '
        f'role="img" aria-label="memory, step time and cost of the plan">{drawn}</svg>'
    )


def _parts(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name not in ("total", "available")}


def _bar(row: int, name: str, parts: Mapping[str, float], whole: float, label: str, room: float | None) -> str:
    top, x, out = row * _ROW + 4, float(_LEFT), [f'<text x="0" y="{row * _ROW + 18}" {_TEXT}>{name}</text>']
    for number, (part, value) in enumerate(parts.items()):
        wide, shown = value / whole * _WIDTH, escape(part.replace("_", " "))
        colour = _COLOURS[number % len(_COLOURS)]
        out.append(
            f'<rect x="{x:.1f}" y="{top}" width="{wide:.1f}" height="20" fill="{colour}">'
            f"<title>{shown}: {value:,.2f}</title></rect>"
        )
        if wide > 7 * len(shown):  # where the word has room
            out.append(f'<text x="{x + 2:.1f}" y="{top + 34}" {_TEXT}>{shown}</text>')
        x += wide
    if room is not None:
        edge = _LEFT + room / whole * _WIDTH
        out.append(f'<path d="M{edge:.1f},{top - 3}v26" stroke="{_INK}" stroke-width="2"/>')
    out.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{top + 14}" {_TEXT}>{escape(label)}</text>')
    return "".join(out)
