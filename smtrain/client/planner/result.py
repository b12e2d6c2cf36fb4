"""What a plan tells: needs, times and costs of a run, and the best ways to do it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from smtrain.client.planner.cost import Price, Saving
from smtrain.client.planner.machines import Mesh


@dataclass(frozen=True)
class Choice:
    """One way to do the run, as the table of choices shows it."""

    machines: str
    mesh: Mesh
    hours: float
    dollars: float | None
    core_gib: float


@dataclass(frozen=True)
class Plan:
    """What a run needs, takes and costs; figures in GiB, seconds, hours and dollars, None where unknown."""

    model: str
    parameters: int
    machines: str
    mesh: Mesh
    fits: bool
    faults: tuple[str, ...]
    """Why it cannot run; empty if it fits."""
    warnings: tuple[str, ...]
    memory_gib: dict[str, float]
    """Of the core that needs most, by part; `total` and `available` too."""
    host_memory_gib: dict[str, float]
    """At load, at save and during an asynchronous save; `available` too."""
    step_s: dict[str, float] | None
    """Seconds of an optimizer step by part, and `total`."""
    sequences_per_s: dict[str, float] | None
    """`value`, and the ends `low` and `high` of the 90 % interval."""
    tokens_per_s: float | None
    mfu: float | None
    calibrated: bool
    nearest: str | None
    """The published run most like this one."""
    hours: float | None
    """Billed wall time of the train stage, interruptions and saving included."""
    attempts: int | None
    """Jobs that a cluster's time limit cuts the train stage into; None for another target."""
    dollars: float | None
    dollars_by_item: dict[str, float]
    dollars_per_million_tokens: float | None
    tokens_per_dollar: float | None
    """As the published Trainium table counts: tokens of an undisturbed hour over its price."""
    prices: tuple[Price, ...]
    save: Saving | None
    save_interval_steps: int | None
    """The interval that loses least (Young/Daly), in steps."""
    checkpoint_gib: float
    choices: tuple[Choice, ...]
    """The best five ways, this one among them or not."""
    relaxed: tuple[str, ...] = ()
    """What would be gained without the budget, without the deadline, and with a larger train.max_global_batch_size."""

    disk_gib: dict[str, float] = field(default_factory=dict)
    """The disk of a run on this machine: `needed` below $SMTRAIN_HOME, and `free` there."""
    hours_by_stage: dict[str, float] = field(default_factory=dict)
    """Hours of each stage of a run on AWS, one after the other; compile, fetch and prepare are among them."""
    here: bool = False
    """Planned for this machine, which costs nothing."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinities become None."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str), parse_constant=lambda _: None)
        return told

    def __str__(self) -> str:
        from smtrain.client.planner.show import summary

        return summary(self)

    def _repr_html_(self) -> str:
        """Bars of memory, step and cost above the summary, for a notebook."""
        from smtrain.client.planner.picture import card

        return card(self)
