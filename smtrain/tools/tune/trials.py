"""Trials of a tuning: values, status and curve of each, their table and picture, and their file
between two calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from smtrain.core.digests import verify_record, with_digest
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import missing_module
from smtrain.core.files import read_object, write_atomically
from smtrain.core.text import align_columns
from smtrain.tools.tune.space import Axis, Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Status = Literal["running", "finished", "stopped early", "stopped", "failed"]
FORMAT, VERSION = "smtrain-tuning", 1
FINISHED_FIRST = 3
"""Trials that must finish before another one may be stopped for being worse than their median."""
_NOT_BEFORE = 0.25
"""Share of its steps after which a trial may be stopped: with a slow warm-up it is behind at first.
"""


@dataclass
class Trial:
    """One training."""

    number: int
    values: Values
    run: str = ""
    """Name of its run; on AWS of its job."""
    job: str = ""
    status: Status = "running"
    value: float | None = None
    """The objective at its last step."""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """The objective by step."""
    reason: str = ""
    """Reason of its failure."""
    dollars: float | None = None
    """Its cost; on this machine, the cost of the same time on AWS."""

    def value_at(self, step: int) -> float | None:
        """The objective at the last step up to this one."""
        values = [value for at, value in self.curve if at <= step]
        return values[-1] if values else None


def is_hopeless(trial: Trial, all_trials: Sequence[Trial], steps: int) -> bool:
    """The median rule: its best value is worse than the median of the finished trials at the same
    step.
    """
    points = [(step, value) for step, value in trial.curve if step > 0]
    if not points or points[-1][0] < _NOT_BEFORE * steps:
        return False
    step, best = points[-1][0], min(value for _, value in points)
    values_at_step = [
        value
        for trial_at_step in all_trials
        if trial_at_step.status == "finished"
        and (value := trial_at_step.value_at(step)) is not None
    ]
    return len(values_at_step) >= FINISHED_FIRST and best > median(values_at_step)


@dataclass(frozen=True)
class Tuning:
    """The result of `tune`; `print` it for the table."""

    name: str
    objective: str
    """`val_loss` or `loss`: the last value of each trial counts, and the lowest is best."""
    axes: tuple[Axis, ...]
    trials: tuple[Trial, ...]
    files: tuple[Path, ...] = ()
    """The written files: the best config, the trials, the picture."""

    @property
    def best(self) -> Trial | None:
        """The finished trial with the lowest objective; None if no trial finished."""
        finished_trials = [
            t
            for t in self.trials
            if t.status == "finished" and t.value is not None and isfinite(t.value)
        ]
        return min(finished_trials, key=lambda trial: (trial.value, trial.number), default=None)

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
        return draw(self)

    def __str__(self) -> str:
        keys = [axis.key for axis in self.axes]
        rows = [["", "trial", *keys, self.objective, "state", "run"]]
        order = sorted(self.trials, key=lambda t: (t.value is None, t.value or 0.0, t.number))
        best = self.best
        for trial in order:
            value = "-" if trial.value is None else f"{trial.value:.4f}"
            mark = "*" if best and trial.number == best.number else ""
            rows.append(
                [
                    mark,
                    str(trial.number),
                    *(trial.values[k] for k in keys),
                    value,
                    trial.status,
                    trial.run,
                ]
            )
        lines = align_columns(rows) + [
            f"trial {trial.number} failed: {trial.reason}" for trial in self.trials if trial.reason
        ]
        return "\n".join(lines)


class TuningRecord:
    """The trials of one tuning in a file, replaced at every change, so that an interrupted tuning
    can resume.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Trial]:
        """The trials of earlier calls. Raises `JobError` for a damaged file."""
        try:
            content = verify_record(read_object(self.path))
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ValueError("it is from another version")
            return [
                Trial(
                    **{
                        **trial,
                        "curve": [(int(step), float(value)) for step, value in trial["curve"]],
                    }
                )
                for trial in content["trials"]
            ]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise JobError(
                f"{self.path} cannot be read ({error}); delete it, and the tuning starts again with"
                " the jobs that are done"
            ) from None

    def write(self, trials: Sequence[Trial]) -> None:
        """Replace the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "version": VERSION,
            "trials": [asdict(trial) for trial in trials],
        }
        write_atomically(self.path, json.dumps(with_digest(content)) + "\n")


_FINISHED_COLOUR, _OTHER_COLOUR, _BEST_COLOUR = "#1f77b4", "#999999", "#d95f02"


def draw(tuning: Tuning) -> Figure:
    """A panel for each key, and one with the curves if known.

    Raises `ConfigError` without matplotlib.
    """
    from smtrain.client.follow.curve import figure_class

    curves = [trial for trial in tuning.trials if len(trial.curve) > 1]
    panels = len(tuning.axes) + bool(curves)
    try:
        figure = figure_class()(figsize=(4.2 * panels, 3.6), layout="constrained")
    except ImportError:
        raise ConfigError([missing_module("matplotlib")]) from None
    row: Any = figure.subplots(1, panels, squeeze=False)[0]
    best = tuning.best
    for panel, axis in zip(row, tuning.axes, strict=False):
        for trial in tuning.trials:
            if trial.value is None:
                continue
            text = trial.values[axis.key]
            at = float(text) if axis.is_range else axis.values.index(text)
            is_best = best is not None and trial.number == best.number
            colour = (
                _BEST_COLOUR
                if is_best
                else _FINISHED_COLOUR
                if trial.status == "finished"
                else _OTHER_COLOUR
            )
            panel.plot(
                at,
                trial.value,
                "o",
                color=colour,
                markersize=8 if is_best else 5,
                zorder=3 if is_best else 2,
            )
        if axis.log:
            panel.set_xscale("log")
        if not axis.is_range:
            panel.set_xticks(range(len(axis.values)), axis.values)
        panel.set_xlabel(axis.key)
        panel.set_ylabel(tuning.objective)
    for trial in curves:
        is_best = best is not None and trial.number == best.number
        colour = (
            _BEST_COLOUR
            if is_best
            else _FINISHED_COLOUR
            if trial.status == "finished"
            else _OTHER_COLOUR
        )
        steps, values = zip(*trial.curve, strict=True)
        row[-1].plot(
            steps, values, color=colour, linewidth=2 if is_best else 1, zorder=3 if is_best else 2
        )
    if curves:
        row[-1].set_xlabel("step")
    for panel in row:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
