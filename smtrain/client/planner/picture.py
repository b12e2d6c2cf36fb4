"""A plan as a notebook shows it: a bar each for memory, step time and cost, then the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from smtrain.core.config.units import spell
from smtrain.core.pages.charts import BARS_WIDE, Bar, bars
from smtrain.core.pages.page import image, render

if TYPE_CHECKING:
    from smtrain.client.planner.result import Plan

_WORDS = "memory, step time and cost of the plan"


def card(plan: Plan, summary: Callable[[Sequence[str]], str]) -> str:
    """Bars as an image, and below them the plan's summary without the bars of these names."""
    rows = plan_bars(plan)
    text = summary([bar.name for bar in rows])
    # A line too long for the picture continues below its text, as on a terminal.
    lines = [
        (line, 2 if line.startswith("!") or line[:1].isdigit() else 12) for line in text.split("\n")
    ]
    picture = image(bars(rows, _WORDS), _WORDS, BARS_WIDE) if rows else ""
    return render("plan.html", picture=picture, lines=lines)


def plan_bars(plan: Plan) -> list[Bar]:
    """Bars of a core's memory up to its size, of the step's seconds, and of the dollars; unknown
    ones have no bar.
    """
    rows = []
    if plan.memory_gib:
        total, room = plan.memory_gib["total"], plan.memory_gib["available"]
        label = f"{total:.1f} of {room:.0f} GiB"
        rows.append(Bar("core", _parts(plan.memory_gib), max(total, room), label, room))
    if plan.step_s:
        total = plan.step_s["total"]
        rows.append(Bar("step", _parts(plan.step_s), total, spell(total)))
    if plan.dollars and plan.fits:
        label = f"${plan.dollars:,.0f}"
        rows.append(Bar("cost", plan.dollars_by_item, plan.dollars, label, form=",.2f"))
    return rows


def _parts(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if name not in ("total", "available")}
