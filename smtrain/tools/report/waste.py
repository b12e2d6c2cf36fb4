"""Split the cost of a run into steps that count and waste."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smtrain.core.protocol.log_lines import step_record

if TYPE_CHECKING:
    from smtrain.tools.report.gather import JobAccount

USEFUL = "steps that count"


@dataclass(frozen=True)
class Portion:
    """A part of the bill: seconds over all jobs, and dollars if prices are known."""

    stage: str
    what: str
    seconds: float
    dollars: float | None
    wasted: bool


def portions(jobs: Sequence[JobAccount]) -> list[Portion]:
    """Every billed second of the jobs (oldest first) under one name, by stage; they add up to the
    bill.
    """
    by_name: dict[tuple[str, str], Portion] = {}
    trains = [job for job in jobs if job.stage == "train"]
    for job in jobs:
        split = (
            _split_train(job, _next_first_step(job, trains))
            if job.stage == "train"
            else _split_other(job)
        )
        for name, seconds, is_waste in split:
            _add(by_name, job, name, seconds, is_waste)
        if pool := job.cost.items.get("warm pool"):
            previous = by_name.get((job.stage, "warm pool, idle"))
            retained_seconds = (job.description.get("WarmPoolStatus") or {}).get(
                "ResourceRetainedBillableTimeInSeconds", 0.0
            )
            by_name[job.stage, "warm pool, idle"] = Portion(
                job.stage,
                "warm pool, idle",
                retained_seconds + (previous.seconds if previous else 0.0),
                pool + ((previous.dollars or 0.0) if previous else 0.0),
                True,
            )
    return [portion for portion in by_name.values() if portion.seconds > 0]


def _add(
    by_name: dict[tuple[str, str], Portion],
    job: JobAccount,
    name: str,
    seconds: float,
    is_waste: bool,
) -> None:
    window_seconds, billable_seconds = _window(job), job.cost.billable_s
    seconds = (
        seconds * billable_seconds / window_seconds if window_seconds else 0.0
    )  # spot is billed less than its time
    has_price = job.cost.dollars is not None
    dollars = (
        job.cost.items.get("training", 0.0) * seconds / billable_seconds
        if has_price and billable_seconds
        else 0.0
    )
    previous = by_name.get((job.stage, name))
    if previous is not None:
        seconds += previous.seconds
        has_price = has_price and previous.dollars is not None
        dollars += previous.dollars or 0.0
    by_name[job.stage, name] = Portion(
        job.stage, name, seconds, dollars if has_price else None, is_waste
    )


def _window(job: JobAccount) -> float:
    """Seconds from the start to the end of its machines."""
    began = job.description.get("TrainingStartTime")
    current_time = datetime.datetime.now(datetime.timezone.utc)
    end = job.description.get("TrainingEndTime") or current_time
    return max(0.0, float((end - began).total_seconds())) if began else 0.0


def _split_other(job: JobAccount) -> list[tuple[str, float, bool]]:
    has_failed = job.status in ("Failed", "Stopped")
    return [
        ("attempts that did not end well" if has_failed else "its work", _window(job), has_failed)
    ]


def _next_first_step(job: JobAccount, trains: Sequence[JobAccount]) -> float | None:
    """The first step of the next attempt with steps; None if no attempt follows."""
    later = trains[trains.index(job) + 1 :]
    firsts = (min((_step(line.text) for line in attempt.steps), default=None) for attempt in later)
    return next((first for first in firsts if first is not None), None)


def _step(text: str) -> float:
    return (step_record(text) or {"step": 0.0})["step"]


def _split_train(job: JobAccount, repeated_from: float | None) -> list[tuple[str, float, bool]]:
    """(name, seconds of its window, True if it is waste)."""
    window_seconds = _window(job)
    step_records = [
        (line.timestamp / 1000, r)
        for line in job.steps
        if "loss" in (r := step_record(line.text) or {})
    ]
    if not step_records:
        well = job.status == "Completed"
        return [
            (
                "nothing was left to train" if well else "attempts that ended before a step",
                window_seconds,
                True,
            )
        ]
    start = job.description["TrainingStartTime"].timestamp()
    (first, head), (last, tail) = step_records[0], step_records[-1]
    step_count = max(0.0, tail["step"] - head["step"])
    step_seconds = (last - first) / step_count if step_count else 0.0
    startup_seconds = min(window_seconds, max(0.0, first - step_seconds - start))
    stepping = min(window_seconds - startup_seconds, last - first + step_seconds)
    data_seconds = min(
        stepping,
        sum(r.get("data_wait", 0.0) for _, r in step_records)
        * step_seconds
        * _steps_between_lines(step_records),
    )
    repeated_seconds = 0.0
    if repeated_from is not None and step_count:
        steps = [r["step"] for _, r in step_records]
        repeated_seconds = stepping * sum(step >= repeated_from for step in steps) / len(steps)
    data_seconds *= 1 - repeated_seconds / stepping if stepping else 0.0
    return [
        (USEFUL, stepping - repeated_seconds - data_seconds, False),
        ("steps done again after a restart", repeated_seconds, True),
        ("waiting for data", data_seconds, True),
        ("before the first step: download, start, compilation", startup_seconds, True),
        ("after the last step: saving, upload", window_seconds - startup_seconds - stepping, True),
    ]


def _steps_between_lines(step_records: Sequence[tuple[float, dict[str, float]]]) -> float:
    """Steps from one line to the next."""
    return (
        (step_records[-1][1]["step"] - step_records[0][1]["step"]) / (len(step_records) - 1)
        if len(step_records) > 1
        else 1.0
    )
