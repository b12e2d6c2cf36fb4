"""Compare plans: the time and money for the same number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smtrain.client.planner.result import Plan
from smtrain.core import text
from smtrain.core.config.units import format_parameters

DAY = 86400.0
Span = tuple[float, float, float]
"""A value, and the two ends of its 90 % interval."""


@dataclass(frozen=True)
class Side:
    """One plan in figures that can be compared with another's; None if unknown."""

    name: str
    plan: Plan
    step_s: Span | None
    tokens_per_s: Span | None
    tokens_per_dollar: Span | None
    days: Span | None
    """Days of undisturbed training."""
    dollars: Span | None


@dataclass(frozen=True)
class Sides:
    """Plans compared at the same number of tokens."""

    tokens: float
    sides: tuple[Side, ...]

    @property
    def fits(self) -> bool:
        """Whether all plans fit."""
        return all(side.plan.fits for side in self.sides)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; spans are {"value", "low", "high"}."""
        return {
            "tokens": self.tokens,
            "plans": [
                {
                    "name": side.name,
                    **{key: _plain(getattr(side, key)) for key, *_ in _ROWS},
                    "plan": side.plan.to_dict(),
                }
                for side in self.sides
            ],
        }

    def __str__(self) -> str:
        plans = [side.plan for side in self.sides]
        rows = [
            ("", [side.name for side in self.sides]),
            ("model", [f"{p.model}, {format_parameters(p.parameters)}" for p in plans]),
            ("machines", [p.machines for p in plans]),
            ("mesh", [str(p.mesh).partition(",")[0] for p in plans]),
            ("memory", [_memory(p) for p in plans]),
        ]
        for key, name, form, unit in _ROWS:
            title = name.format(tokens=_count(self.tokens))
            rows.append(
                (title, [_format_span(getattr(side, key), form, unit) for side in self.sides])
            )
        rows.append(
            ("of peak", [f"{p.mfu:.0%}" if p.fits and p.mfu is not None else "-" for p in plans])
        )
        rows.append(("calibrated", [_calibration_note(p) for p in plans]))
        return "\n".join(
            [*text.align_columns([(title, *cells) for title, cells in rows]), *self._notes()]
        )

    def _notes(self) -> list[str]:
        """The verdict, then faults, warnings and prices, each once."""
        out = ["", *self._verdict()]
        for side in self.sides:
            out += [f"! {side.name}: DOES NOT FIT: {fault}" for fault in side.plan.faults]
            out += [f"! {side.name}: {w}" for w in side.plan.warnings if not w.startswith("price:")]
        return out + list(
            dict.fromkeys(f"  {price}" for side in self.sides for price in side.plan.prices)
        )

    def _verdict(self) -> list[str]:
        """Which plan is faster and which is cheaper, and whether the intervals overlap."""
        out = []
        for key, word, unit in (("days", "faster", "time"), ("dollars", "cheaper", "money")):
            spans = [(getattr(side, key), side.name) for side in self.sides if getattr(side, key)]
            if len(spans) < 2:
                continue
            (best, name), (second_span, second), *_ = sorted(spans)
            if not best[0]:
                continue
            sure = best[2] < second_span[1]
            text = f"{name} is {word}: {second_span[0] / best[0]:.2f} times the {unit} on {second}"
            out.append(
                text
                if sure
                else f"{text}; the intervals overlap, so this may be the other way round"
            )
        return out


_ROWS = (
    ("step_s", "step", "{:.3g}", "s"),
    ("tokens_per_s", "tokens/s", "{:,.0f}", ""),
    ("tokens_per_dollar", "tokens/$", "{:,.0f}", ""),
    ("days", "days to {tokens} tokens", "{:,.2f}", ""),
    ("dollars", "$ to {tokens} tokens", "{:,.0f}", ""),
)


def compare_plans(
    plans: Sequence[tuple[str, Plan]],
    tokens: float | None = None,
    planned_tokens: float | None = None,
) -> Sides:
    """Compare named plans at `tokens`, or else at `planned_tokens`, the tokens of the first
    plan's run.
    """
    goal = tokens or planned_tokens or 1e9
    return Sides(goal, tuple(_side(name, plan, goal) for name, plan in plans))


def _side(name: str, plan: Plan, tokens: float) -> Side:
    s, rate = plan.sequences_per_s, plan.tokens_per_s
    if not plan.fits or s is None or rate is None or plan.step_s is None:
        return Side(name, plan, None, None, None, None, None)
    low, high = s["low"] / s["value"], s["high"] / s["value"]
    step, per_dollar = plan.step_s["total"], plan.tokens_per_dollar
    return Side(
        name=name,
        plan=plan,
        step_s=(step, step / high, step / low),
        tokens_per_s=(rate, rate * low, rate * high),
        tokens_per_dollar=(per_dollar, per_dollar * low, per_dollar * high) if per_dollar else None,
        days=_spread(tokens / rate / DAY, low, high),
        dollars=_spread(tokens / per_dollar, low, high) if per_dollar else None,
    )


def _spread(value: float, low: float, high: float) -> Span:
    return value, value / high, value / low


def _plain(span: Span | None) -> dict[str, float] | None:
    return None if span is None else dict(zip(("value", "low", "high"), span, strict=True))


def _format_span(span: Span | None, form: str, unit: str) -> str:
    if span is None:
        return "-"
    value, low, high = (form.format(number) for number in span)
    return f"{value}{' ' + unit if unit else ''} ({text.span(low, high)})"


def _calibration_note(plan: Plan) -> str:
    """Whether a published run is near, or by how much the speed may be off."""
    rate = plan.sequences_per_s
    if plan.calibrated or rate is None:
        return "yes" if plan.calibrated else "NO"
    return f"NO: up to {rate['value'] / rate['low']:.1f} times off"


def _memory(plan: Plan) -> str:
    if not plan.memory_gib:
        return "-"
    return f"{plan.memory_gib['total']:.1f} of {plan.memory_gib['available']:.0f} GiB a device"


def _count(tokens: float) -> str:
    for size, word in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:.4g} {word}"
    return f"{tokens:,.0f}"
