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


def dollars(spent: Cost) -> float:
    return inf if spent.total is None else spent.total


@dataclass(frozen=True)
class Limits:
    """Limits of a run in dollars and hours; None: no limit."""

    budget: float | None = None
    deadline_hours: float | None = None

    @property
    def given(self) -> list[str]:
        """Their names, in words."""
        both = (("budget", self.budget), ("deadline", self.deadline_hours))
        return [f"the {name}" for name, limit in both if limit is not None]

    @property
    def only_deadline(self) -> bool:
        return self.deadline_hours is not None and self.budget is None

    def kept(self, spent: Cost, but: str = "") -> bool:
        """Whether a cost is within all limits, or within all `but` one."""
        budget = inf if self.budget is None or but == "budget" else self.budget
        deadline = inf if self.deadline_hours is None or but == "deadline" else self.deadline_hours
        return dollars(spent) <= budget and spent.train_hours <= deadline

    def relaxed(self, ways: Sequence[Way]) -> list[str]:
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
        within, out = [way for way in ways if self.kept(way[1])], []
        for name, limit, given, less in rules:
            if given is None:
                continue
            beyond = [way for way in ways if self.kept(way[1], but=name) and less(way) < inf]
            best = min(beyond, key=less, default=None)
            if best is not None and less(best) < min(map(less, within), default=inf):
                out.append(f"without the {name} of {limit}: {_said(best)}")
            elif within:
                out.append(
                    f"without the {name} of {limit}: nothing"
                    f" {'faster' if name == 'budget' else 'cheaper'}"
                )
        return out


def larger_batch(
    config: JobConfig, now: Candidate | None, search: Callable[[JobConfig], Iterable[Candidate]]
) -> list[str]:
    """The gain of twice train.max_global_batch_size on the same machines; `search` yields meshes,
    fastest first.
    """
    most = config.train.max_global_batch_size
    if most is None or now is None:
        return []
    larger = config.model_copy(
        update={"train": config.train.model_copy(update={"global_batch_size": 2 * most})}
    )
    best = next((one for one in search(larger) if one.machine == now.machine), None)
    if best is None:
        return []
    times = (2 * most / best.step_s) / (config.train.global_batch_size / now.step_s)
    gain = (
        f"{times - 1:.0%} more tokens a second ({best.mesh})"
        if times > _WORTH
        else "no more tokens a second"
    )
    return [f"with train.max_global_batch_size {2 * most} for {most}: {gain}"]


def _said(way: Way) -> str:
    found, spent = way
    money = f"${spent.total:,.0f}" if spent.total is not None else "no price known"
    machine = found.machine
    return (
        f"{spell(spent.train_hours * HOUR)}, {money} ({machine.count} x {machine.type},"
        f" {found.mesh})"
    )
