"""A plan: memory, time and cost of a run, the best choices, and a summary of one screen."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from smtrain.client.planner.cost import Saving
from smtrain.client.planner.gpu_options import GpuOptions
from smtrain.client.planner.machines import Mesh
from smtrain.client.planner.offers import Offer, table_lines
from smtrain.client.prices import Price
from smtrain.core.config.units import format_parameters, spell
from smtrain.core.text import span
from smtrain.stages import STAGES
from smtrain.stages.base import START_S


@dataclass(frozen=True)
class Choice:
    """One row of the table of choices."""

    machines: str
    mesh: Mesh
    hours: float
    dollars: float | None
    core_gib: float


@dataclass(frozen=True)
class Plan:
    """Needs and costs of a run in GiB, seconds, hours and dollars; None if unknown."""

    model: str
    parameters: int
    machines: str
    mesh: Mesh
    fits: bool
    faults: tuple[str, ...]
    """Reasons why it cannot run; empty if it fits."""
    warnings: tuple[str, ...]
    memory_gib: dict[str, float]
    """Memory by part of the core that needs the most, with `total` and `available`."""
    host_memory_gib: dict[str, float]
    """Memory of a host at load, at save and during an asynchronous save, with `available`."""
    step_s: dict[str, float] | None
    """Seconds of an optimizer step by part, with `total`."""
    sequences_per_s: dict[str, float] | None
    """`value`, and the ends `low` and `high` of the 90 % interval."""
    tokens_per_s: float | None
    mfu: float | None
    calibrated: bool
    nearest: str | None
    """The most similar published run."""
    hours: float | None
    """Billed wall time of the train stage, with interruptions and saves."""
    attempts: int | None
    """Jobs of the train stage under a cluster's time limit; None for other targets."""
    dollars: float | None
    dollars_by_item: dict[str, float]
    dollars_per_million_tokens: float | None
    tokens_per_dollar: float | None
    """Tokens of an undisturbed hour divided by its price, as in the published table for Trainium.
    """
    prices: tuple[Price, ...]
    save: Saving | None
    save_interval_steps: int | None
    """The save interval that loses the least time (Young, Daly), in steps."""
    checkpoint_gib: float
    choices: tuple[Choice, ...]
    """The five best choices; this plan may be another one."""
    relaxed: tuple[str, ...] = ()
    """Gains without the budget, without the deadline, and with a larger
    train.max_global_batch_size.
    """

    disk_gib: dict[str, float] = field(default_factory=dict)
    """The disk of a run on this machine: `needed` below $SMTRAIN_HOME, and `free` there."""
    hours_by_stage: dict[str, float] = field(default_factory=dict)
    """Hours of each stage of a run on AWS; stages run one after the other."""
    unestimated: dict[str, str] = field(default_factory=dict)
    """Stages of the run whose time and cost are not planned, and the reasons."""
    active_parameters: int | None = None
    """Parameters that a token meets; None if it meets all, as without experts."""
    billed: bool = True
    """Planned for machines that AWS bills."""
    by_own_run: bool = False
    """Corrected by a run of the user's own on the same chip (`measured`)."""
    here: bool = False
    """Planned for this machine, at no cost."""
    other_prices: tuple[Price, ...] = ()
    """The other known prices of the train stage's machines: on demand, spot, reserved."""
    gpu_options: GpuOptions | None = None
    """Prices of train.compile and train.deterministic, on GPUs whose kernels are known."""
    offers: tuple[Offer, ...] = ()
    """All machines, regions and kinds of price, cheapest first (`cheapest`)."""
    shards_fully: bool = False
    """Processes that hold the same parameters divide weights and gradients too
    (`parallel.shard: full`).
    """
    chosen_offer: int = 0
    """The place of this plan among `offers`: the first whose machines need no commitment."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinities become None."""
        values: dict[str, Any] = json.loads(
            json.dumps(asdict(self), default=str), parse_constant=lambda _: None
        )
        return values

    def __str__(self) -> str:
        return summary(self)

    def _repr_html_(self) -> str:
        """Bars of memory, step and cost above the rest of the summary, for a notebook."""
        from smtrain.client.planner.picture import card

        return card(self, lambda drawn: summary(self, drawn))


def summary(plan: Plan, drawn: Collection[str] = ()) -> str:
    """The plan in words: needs and costs, then choices, then warnings.

    `drawn` names bars of a picture above it (`core`, `step`, `cost`), whose parts are left out.
    """
    active = (
        ""
        if plan.active_parameters is None
        else f", {format_parameters(plan.active_parameters)} of them active"
    )
    lines = [
        f"{plan.model}: {format_parameters(plan.parameters)} parameters{active} on {plan.machines}"
    ]
    shard = ", parallel.shard: full" if plan.shards_fully else ""
    lines.append(f"mesh        {plan.mesh}{shard}")
    if plan.memory_gib and "core" not in drawn:
        m = plan.memory_gib
        parts = ", ".join(
            f"{n} {v:.1f}" for n, v in m.items() if n not in ("total", "available") and v >= 0.05
        )
        lines.append(
            f"core        {m['total']:.1f} of {m['available']:.0f}"
            f" GiB{f' ({parts})' if parts else ''}"
        )
    if h := plan.host_memory_gib:
        lines.append(
            f"host        load {h['load']:.0f}, save {h['save']:.0f}, asynchronous save"
            f" {h['async_save']:.0f} of {h['available']:.0f} GiB; a checkpoint is"
            f" {_three_digits(plan.checkpoint_gib)} GiB"
        )
    for fault in plan.faults:
        lines.append(f"DOES NOT FIT: {fault}")
    if d := plan.disk_gib:
        lines.append(
            f"disk        {_three_digits(d['needed'])} of {_three_digits(d['free'])} GiB that are"
            " free"
        )
    if plan.fits and plan.sequences_per_s and plan.step_s:
        s = plan.sequences_per_s
        calibration_note = (
            ""
            if plan.calibrated
            else ", by a measurement of this machine"
            if plan.here
            else ", UNCALIBRATED"
        )
        calibration_note = ", by your own run" if plan.by_own_run else calibration_note
        share = "" if plan.mfu is None else f", {plan.mfu:.0%} of peak"
        lines.append(
            f"throughput  {_wide_speed(plan)}, UNCALIBRATED"
            if is_wide(plan)
            else (
                f"throughput  {_three_digits(s['value'])} sequences/s"
                f" ({span(_three_digits(s['low']), _three_digits(s['high']))}),"
                f" {_three_digits(plan.tokens_per_s)} tokens/s{share}{calibration_note}"
            )
        )
        t = plan.step_s
        parts = ", ".join(
            f"{n.replace('_', ' ')} {v / t['total']:.0%}" for n, v in t.items() if n != "total"
        )
        if "step" not in drawn:
            lines.append(f"step        {t['total']:.3g} s: {parts}")
        lines += plan.gpu_options.lines() if plan.gpu_options else []
    if plan.fits and plan.hours is not None:
        cut = (
            f", in {plan.attempts} attempt{'s' * (plan.attempts > 1)} (cluster.time)"
            if plan.attempts
            else ""
        )
        # only AWS bills by known prices
        machine_words = (
            "for training"
            if plan.attempts
            else "billed for training"
            if plan.billed
            else "of training"
        )
        hours = [plan.hours * ratio * 3600 for ratio in _ratios(plan)]
        lines.append(
            f"time        {span(*map(spell, hours)) if is_wide(plan) else spell(plan.hours * 3600)}"
            f" {machine_words}{cut}"
        )
    if plan.here:
        lines.append("cost        nothing here")
    if plan.fits and plan.dollars is not None:
        listed = ", ".join(f"{n} {v:,.2f}" for n, v in plan.dollars_by_item.items())
        items = "" if "cost" in drawn else f" ({listed})"
        middle = "by the middle: " if is_wide(plan) else ""
        if is_wide(plan):
            lines.append(f"cost        {_money(plan)}; the middle is ${plan.dollars:,.2f}{items}")
        else:
            lines.append(f"cost        ${plan.dollars:,.2f}{items}")
        lines.append(
            f"            {middle}{_three_digits(plan.dollars_per_million_tokens)} $ a million "
            f"tokens, {plan.tokens_per_dollar:,.0f} tokens a dollar"
        )
        lines += [f"            {price}" for price in plan.prices]
        lines += [f"            not used: {price}" for price in plan.other_prices]
    if plan.fits and len(plan.hours_by_stage) > 1:
        lines.append(_total(plan))
    for reason in dict.fromkeys(plan.unestimated.values()) if plan.fits else ():
        stages = ", ".join(
            stage for stage, stage_reason in plan.unestimated.items() if stage_reason == reason
        )
        lines.append(f"not planned {stages}: {reason}")
    if plan.fits and plan.save and plan.save_interval_steps:
        lines.append(
            f"saving      a checkpoint takes {spell(plan.save.save_s)}; train.save_interval"
            f" {plan.save_interval_steps} loses the least time"
        )
    if plan.offers:
        lines += ["", *table_lines(plan.offers, plan.chosen_offer)]
    elif plan.choices:
        lines += ["", "choices, by the middle of their intervals" if is_wide(plan) else "choices"]
        lines += [_row(i, c) for i, c in enumerate(plan.choices, 1)]
    if plan.relaxed:
        lines += ["", "relaxed", *plan.relaxed]
    if plan.warnings:
        lines += ["", *(f"! {w}" for w in plan.warnings)]
    return "\n".join(lines)


_WIDE = 4
"""An interval that reaches so many times below its middle is shown first, as its middle is no more
than a guess.
"""


def is_wide(plan: Plan) -> bool:
    """Whether so little is known of the speed that no single number stands for it, as on
    Trainium2.
    """
    s = plan.sequences_per_s
    return s is not None and s["low"] * _WIDE < s["value"]


def _ratios(plan: Plan) -> tuple[float, float]:
    """The least and most time of the training, as multiples of the middle."""
    s = plan.sequences_per_s
    return (s["value"] / s["high"], s["value"] / s["low"]) if s else (1.0, 1.0)


def _wide_speed(plan: Plan) -> str:
    """The speed from the slowest to the fastest of the interval."""
    fast, slow = _ratios(plan)
    sequences, tokens, share = (
        f"{_three_digits(value / slow)} to {_three_digits(value / fast)}"
        for value in (
            (plan.sequences_per_s or {})["value"],
            plan.tokens_per_s or 0.0,
            100 * (plan.mfu or 0.0),
        )
    )
    return f"{sequences} sequences/s, {tokens} tokens/s" + (
        f" ({share} % of peak)" if plan.mfu else ""
    )


def _money(plan: Plan) -> str:
    """Dollars from the fastest to the slowest training of the interval; empty without a price."""
    if plan.dollars is None:
        return ""
    train = plan.dollars_by_item.get("train", 0.0)
    return " to ".join(f"${plan.dollars + train * (ratio - 1):,.2f}" for ratio in _ratios(plan))


def _total(plan: Plan) -> str:
    """Time and money of all stages, in the order in which they run."""
    hours = {stage: plan.hours_by_stage[stage] for stage in STAGES if stage in plan.hours_by_stage}
    if is_wide(plan):
        other_stages = ", ".join(
            f"{stage} {spell(stage_h * 3600)}"
            for stage, stage_h in hours.items()
            if stage != "train"
        )
        return (
            f"total       {_money(plan) or 'the time above'}, of which the stages but train take"
            f" {other_stages}"
        )
    parts = ", ".join(f"{stage} {spell(stage_h * 3600)}" for stage, stage_h in hours.items())
    money = "" if plan.dollars is None else f" and ${plan.dollars:,.2f}"
    start = f"each has {spell(START_S)} to start its machine and pull its image"
    return f"total       {spell(sum(hours.values()) * 3600)}{money}: {parts}; {start}"


def _three_digits(value: float | None) -> str:
    """A number with three significant digits and no exponent."""
    return "unknown" if value is None else f"{float(f'{value:.3g}'):,.10g}"


def _row(number: int, c: Choice) -> str:
    money = f"${c.dollars:,.0f}" if c.dollars is not None else "no price"
    return (
        f"{number}. {spell(c.hours * 3600):>10} {money:>12}  {c.core_gib:5.1f} GiB  {c.machines},"
        f" {c.mesh}"
    )
