"""A plan as a tag of its job, short enough for AWS, to compare the job with it later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smtrain.client.planner.result import Plan

TAG = "smtrain:plan"
_FIELDS = ("sequences_per_s", "low", "high", "tokens_per_s", "hours", "dollars")


def write(plan: Plan) -> str:
    """The tag's value: `sequences_per_s=12.2 low=10.4 ... dollars=190012`, without unknown
    numbers.
    """
    speed = plan.sequences_per_s or {}
    numbers = {
        "sequences_per_s": speed.get("value"),
        "low": speed.get("low"),
        "high": speed.get("high"),
        "tokens_per_s": plan.tokens_per_s,
        "hours": plan.hours,
        "dollars": plan.dollars,
    }
    return " ".join(f"{name}={numbers[name]:.6g}" for name in _FIELDS if numbers[name] is not None)


def read(tags: Iterable[Mapping[str, str]]) -> dict[str, float]:
    """The numbers of a job's plan; empty if it has none."""
    value = next((tag["Value"] for tag in tags if tag["Key"] == TAG), "")
    pairs = (part.partition("=") for part in value.split())
    return {name: float(number) for name, equals, number in pairs if equals and name in _FIELDS}


def compare(plan_values: Mapping[str, float], tokens_per_s: float | None) -> str:
    """One line: the plan, and the actual throughput."""
    if "tokens_per_s" not in plan_values:
        return "no throughput was planned"
    text = f"{plan_values['tokens_per_s']:,.0f} tokens/s"
    if "hours" in plan_values:
        text += f", {plan_values['hours']:.1f} h"
    if "dollars" in plan_values:
        text += f", ${plan_values['dollars']:,.2f}"
    if tokens_per_s:
        share = tokens_per_s / plan_values["tokens_per_s"]
        low, high = (
            plan_values.get(end, 0) / plan_values["sequences_per_s"] for end in ("low", "high")
        )
        mesh_words = (
            "within the plan"
            if low <= share <= high
            else "below the plan"
            if share < low
            else "above the plan"
        )
        text += f"; actual {tokens_per_s:,.0f} tokens/s, {share:.0%} of it, {mesh_words}"
    return text
