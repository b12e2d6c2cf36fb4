"""Trials of a tuning: what each was given, what became of it, and where that is kept between two calls."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from smtrain.core.errors import JobError
from smtrain.core.text import aligned
from smtrain.tools.tune.space import Axis, Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["running", "finished", "stopped early", "stopped", "failed"]
FORMAT, VERSION = "smtrain-tuning", 1
FINISHED_FIRST = 3
"""So many trials end undisturbed before another is stopped for being worse than their median."""
_NOT_BEFORE = 0.25
"""Share of its steps that a trial does before it may be stopped: a slow warm-up is behind others at first."""


@dataclass
class Trial:
    """One training."""

    number: int
    values: Values
    run: str = ""
    """Name of its run; on AWS that of its job."""
    job: str = ""
    status: Status = "running"
    value: float | None = None
    """The objective at the end, or where it was stopped."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """The objective by step."""
    reason: str = ""
    """Why it failed."""
    dollars: float | None = None
    """What it cost; at home, what the same time would cost on AWS."""

    def reached(self, step: int) -> float | None:
        """The objective at the last step up to this one."""
        known = [value for at, value in self.curve if at <= step]
        return known[-1] if known else None


def hopeless(trial: Trial, others: Sequence[Trial], steps: int) -> bool:
    """The median rule: its best so far is worse than the median of what the finished trials had reached by then."""
    after = [(step, value) for step, value in trial.curve if step > 0]
    if not after or after[-1][0] < _NOT_BEFORE * steps:
        return False
    step, best = after[-1][0], min(value for _, value in after)
    reached = [value for other in others if other.status == "finished" and (value := other.reached(step)) is not None]
    return len(reached) >= FINISHED_FIRST and best > median(reached)


@dataclass(frozen=True)
class Tuning:
    """What `tune` found; `print` it for the table."""

    name: str
    objective: str
    """`val_loss` or `loss`: the last one of each trial is compared, and the lowest is best."""
    axes: tuple[Axis, ...]
    trials: tuple[Trial, ...]
    files: tuple[Path, ...] = ()
    """What was written: the best config, the trials, the picture."""

    @property
    def best(self) -> Trial | None:
        """The trial with the lowest objective of those that went to their end; None where none did."""
        ended = [t for t in self.trials if t.status == "finished" and t.value is not None and isfinite(t.value)]
        return min(ended, key=lambda trial: (trial.value, trial.number), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        best = self.best
        return {
            "name": self.name,
            "objective": self.objective,
            "over": [str(axis) for axis in self.axes],
            "best": best.number if best else None,
            "trials": [asdict(trial) for trial in self.trials],
        }

    def plot(self) -> Figure:
        """The objective over each key, and the trials' curves, as a matplotlib Figure."""
        from smtrain.tools.tune.picture import draw

        return draw(self)

    def __str__(self) -> str:
        keys = [axis.key for axis in self.axes]
        rows = [["", "trial", *keys, self.objective, "state", "run"]]
        order = sorted(self.trials, key=lambda t: (t.value is None, t.value or 0.0, t.number))
        best = self.best
        for trial in order:
            value = "-" if trial.value is None else f"{trial.value:.4f}"
            mark = "*" if best and trial.number == best.number else ""
            rows.append([mark, str(trial.number), *(trial.values[k] for k in keys), value, trial.status, trial.run])
        lines = aligned(rows) + [
            f"trial {trial.number} failed: {trial.reason}" for trial in self.trials if trial.reason
        ]
        return "\n".join(lines)


class TuningRecord:
    """The trials of one tuning in a file, written whole at every change, so that an interrupted one goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Trial]:
        """The trials of the calls before; none where there was none. Raises `JobError` for a damaged file."""
        try:
            told = json.loads(self.path.read_text("utf-8"))
            if (told["format"], told["version"]) != (FORMAT, VERSION):
                raise ValueError("it is from another version")
            return [
                Trial(**{**trial, "curve": [(int(step), float(value)) for step, value in trial["curve"]]})
                for trial in told["trials"]
            ]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise JobError(
                f"{self.path} cannot be read ({error}); delete it, and the tuning begins anew with jobs that are done"
            ) from None

    def write(self, trials: Sequence[Trial]) -> None:
        """Beside, then renamed: a reader sees the old file or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        told = {"format": FORMAT, "version": VERSION, "trials": [asdict(trial) for trial in trials]}
        beside.write_text(json.dumps(told) + "\n", "utf-8")
        os.replace(beside, self.path)
