"""The state of a job, gathered from its events, for the panel and for summary lines."""

from __future__ import annotations

import datetime
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.client.follow.follower import Event, StatusPolled
from smtrain.client.follow.job_cost import JobCost, cost_of
from smtrain.client.follow.machines import usage_rows
from smtrain.core.config.units import spell
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.protocol.log_lines import PROFILE, Line, machine_record, step_record, warning
from smtrain.core.protocol.requests import display_status, groups_of, is_waiting
from smtrain.core.targets import TARGETS

_RATE_STEPS = 20
SILENT_S = 600.0
_WORTH_SAYING = 0.01
"""Smallest share of a step's time spent on waiting for data to show."""
_KEPT_LINES, _KEPT_STEPS = 50, 5000


@dataclass
class Progress:
    """State of one job. `take` every event."""

    name: str
    target: str
    region: str | None
    patience: Patience | None = None
    """The patience of the client that reads these events."""
    job: dict[str, Any] = field(default_factory=dict)
    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    """Lines for the panel; the follower appends them."""
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    """(step, loss) of the steps so far."""
    last: dict[str, float] = field(default_factory=dict)
    """Numbers of the last step's line."""
    val_points: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_STEPS)
    )
    """(step, held-out loss) of the validations so far."""
    machines: dict[str, dict[str, float]] = field(default_factory=dict)
    """The last report of each host about its machine."""
    warnings: list[str] = field(default_factory=list)
    """Findings about the training's health, each with its remedy."""
    profile: str = ""
    """The job's report of which part of a step takes how long, if any."""
    _last_line_at: float = field(default_factory=time.monotonic)
    _steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RATE_STEPS))

    def take(self, event: Event) -> None:
        """Note an event."""
        if isinstance(event, StatusPolled):
            self.job = event.job
        elif isinstance(event, Line):
            self._last_line_at = time.monotonic()
            if record := step_record(event.text):
                self.note(record)
                if "loss" in record:
                    self._steps.append((event.timestamp, record["step"]))
            elif used := machine_record(event.text):
                self.machines[event.host] = used
            elif warning_text := warning(event.text):
                self.warnings.append(warning_text)
            elif event.text.startswith(PROFILE):
                self.profile = event.text.removeprefix(PROFILE)

    def note(self, record: dict[str, float]) -> None:
        """Note the numbers of a step's line."""
        self.last = record
        if "loss" in record:
            self.points.append((record["step"], record["loss"]))
        if "val_loss" in record:
            self.val_points.append((record["step"], record["val_loss"]))

    @property
    def status(self) -> str:
        """SageMaker's status, with the secondary status in brackets if it differs; Pending for a
        job that waits.
        """
        if is_waiting(self.job):
            return display_status(self.job)
        status, secondary = (
            self.job.get("TrainingJobStatus", "not asked yet"),
            self.job.get("SecondaryStatus"),
        )
        return status if secondary in (None, status) else f"{status} ({secondary})"

    @property
    def has_ended(self) -> bool:
        return self.job.get("TrainingJobStatus") in FINAL_STATUSES

    @property
    def trouble(self) -> str | None:
        """A reason to worry: AWS does not answer, or a training job has been silent for long."""
        if self.patience and self.patience.trouble:
            return f"no answer from AWS ({self.patience.trouble}), retrying"
        silent = time.monotonic() - self._last_line_at
        if self.job.get("SecondaryStatus") == "Training" and silent > SILENT_S:
            return f"no line for {spell(silent)}: compiling, or stalled"
        return None

    @property
    def hosts(self) -> int:
        return sum(count for _, count in groups_of(self.job)) if self.job else 1

    def transitions(self, now: datetime.datetime) -> list[tuple[str, float]]:
        """(status, seconds) of each secondary status so far; the current one counts up to now."""
        changes = self.job.get("SecondaryStatusTransitions", [])
        return [
            (c["Status"], ((c.get("EndTime") or now) - c["StartTime"]).total_seconds())
            for c in changes
            if not (c is changes[-1] and self.has_ended)
        ]

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the speed of the last steps; None if unknown."""
        if len(self._steps) < 2 or "of" not in self.last or self.has_ended:
            return None
        (t0, s0), (t1, s1) = self._steps[0], self._steps[-1]
        return (self.last["of"] - s1) * (t1 - t0) / 1000 / (s1 - s0) if s1 > s0 else None

    def cost(self, now: datetime.datetime | None = None) -> JobCost | None:
        """The cost so far, or as billed at the end."""
        return (
            cost_of(self.job, region=self.region, local=TARGETS[self.target].here, now=now)
            if self.job
            else None
        )

    def elapsed_s(self, now: datetime.datetime) -> float:
        """Seconds since the job was created, until now or its end."""
        if not self.job:
            return 0.0
        end = self.job.get("TrainingEndTime") or (
            self.job["LastModifiedTime"] if self.has_ended else now
        )
        return max(0.0, float((end - self.job["CreationTime"]).total_seconds()))

    def numbers(self) -> list[tuple[str, str]]:
        """(name, value) of the last step, as text."""
        last, numbers = self.last, []
        if not last:
            return []
        numbers.append(
            ("step", f"{last['step']:.0f}" + (f" of {last['of']:.0f}" if "of" in last else ""))
        )
        for key, name, form in (
            ("loss", "loss", "{:.4f}"),
            ("grad_norm", "grad norm", "{:.3f}"),
            ("tokens_per_s", "tokens/s", "{:,.0f}"),
            ("mfu", "MFU", "{:.1%}"),
            ("rewards/margins", "margin", "{:.4f}"),
            ("rewards/accuracies", "accuracy", "{:.0%}"),
            ("experts/load_max", "busiest expert", "{:.1f} x mean"),
            ("experts/entropy", "router entropy", "{:.2f}"),
        ):
            if key in last:
                numbers.append((name, form.format(last[key])))
        if last.get("experts/dropped"):
            numbers.append(("dropped", f"{last['experts/dropped']:.1%}"))
        if last.get("data_wait", 0.0) >= _WORTH_SAYING:
            numbers.append(("data wait", f"{last['data_wait']:.0%}"))
        if self.val_points:
            at, loss = self.val_points[-1]
            lowest, best = min((val_loss, step) for step, val_loss in self.val_points)
            better = f" (lowest {lowest:.4f} at step {best:.0f})" if lowest < loss else ""
            numbers.append(
                (
                    "val loss",
                    f"{loss:.4f}{better}" + ("" if at == last["step"] else f" at step {at:.0f}"),
                )
            )
        if (eta_s := self.eta_s) is not None:
            numbers.append(("ETA", spell(eta_s)))
        return numbers

    def use(self) -> list[tuple[str, str]]:
        """(name, value) of the machines' use; for several the mean, and the range if they differ
        much.
        """
        return usage_rows(list(self.machines.values()))

    def summary(self, now: datetime.datetime) -> str:
        """One line: status, step, loss, rate, time left, dollars."""
        parts = [f"{self.status} {spell(self.elapsed_s(now))}"]
        parts += [f"{name} {value}" for name, value in self.numbers()]
        cost = self.cost(now)
        if cost and cost.dollars is not None and cost.billable_s:
            parts.append(f"${cost.dollars:,.2f}" + ("" if cost.is_billed else " if on AWS"))
        if self.trouble:
            parts.append(self.trouble)
        return ", ".join(parts)
