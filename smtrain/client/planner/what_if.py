"""Budget and deadline of a plan, and the gain if one of them were dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from smtrain.client.planner.cost import Cost
from smtrain.client.planner.search import Candidate
from smtrain.client.prices import HOUR
from smtrain.core.config import JobConfig
from smtrain.core.config.units import spell

Way = tuple[Candidate, Cost]
_WORTH = 1.02  # a smaller gain in tokens per second is within the error of the planner


def dollars(cost: Cost) -> float:
    return inf if cost.total is None else cost.total


@dataclass(frozen=True)
class Limits:
    """Limits of a run in dollars and hours; None: no limit."""

    budget: float | None = None
    deadline_hours: float | None = None

    @property
    def names(self) -> list[str]:
        """Their names, in words."""
        limits = (("budget", self.budget), ("deadline", self.deadline_hours))
        return [f"the {name}" for name, limit in limits if limit is not None]

    @property
    def only_deadline(self) -> bool:
        return self.deadline_hours is not None and self.budget is None

    def allows(self, cost: Cost, but: str = "") -> bool:
        """Whether a cost is within all limits, or within all `but` one."""
        budget = inf if self.budget is None or but == "budget" else self.budget
        deadline = inf if self.deadline_hours is None or but == "deadline" else self.deadline_hours
        return dollars(cost) <= budget and cost.train_hours <= deadline

    def gains_without(self, ways: Sequence[Way]) -> list[str]:
        """The choices that a limit rules out: the fastest that only the budget forbids, and the
        cheapest that only the deadline forbids.
        """
        rules: list[tuple[str, str, float | None, Callable[[Way], float]]] = [
            ("budget", f"${self.budget or 0:,.0f}", self.budget, lambda way: way[1].train_hours),
            (
                "deadline",
                spell((self.deadline_hours or 0) * HOUR),
                self.deadline_hours,
                lambda way: dollars(way[1]),
            ),
        ]
        allowed_ways, out = [way for way in ways if self.allows(way[1])], []
        for name, limit, bound, rank in rules:
            if bound is None:
                continue
            beyond = [way for way in ways if self.allows(way[1], but=name) and rank(way) < inf]
            best = min(beyond, key=rank, default=None)
            if best is not None and rank(best) < min(map(rank, allowed_ways), default=inf):
                out.append(f"without the {name} of {limit}: {_describe_way(best)}")
            elif allowed_ways:
                out.append(
                    f"without the {name} of {limit}: nothing"
                    f" {'faster' if name == 'budget' else 'cheaper'}"
                )
        return out


def larger_batch(
    config: JobConfig, current: Candidate | None, search: Callable[[JobConfig], Iterable[Candidate]]
) -> list[str]:
    """The gain of twice train.max_global_batch_size on the same machines; `search` yields meshes,
    fastest first.
    """
    max_batch = config.train.max_global_batch_size
    if max_batch is None or current is None:
        return []
    larger = config.model_copy(
        update={"train": config.train.model_copy(update={"global_batch_size": 2 * max_batch})}
    )
    best = next(
        (candidate for candidate in search(larger) if candidate.machine == current.machine), None
    )
    if best is None:
        return []
    times = (2 * max_batch / best.step_s) / (config.train.global_batch_size / current.step_s)
    gain = (
        f"{times - 1:.0%} more tokens a second ({best.mesh})"
        if times > _WORTH
        else "no more tokens a second"
    )
    return [f"with train.max_global_batch_size {2 * max_batch} for {max_batch}: {gain}"]


def _describe_way(way: Way) -> str:
    candidate, cost = way
    money = f"${cost.total:,.0f}" if cost.total is not None else "no price known"
    machine = candidate.machine
    return (
        f"{spell(cost.train_hours * HOUR)}, {money} ({machine.count} x {machine.type},"
        f" {candidate.mesh})"
    )
