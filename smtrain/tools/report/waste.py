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
        split = _of_train(job, _resumed_at(job, trains)) if job.stage == "train" else _of_other(job)
        for what, seconds, wasted in split:
            _add(by_name, job, what, seconds, wasted)
        if pool := job.cost.items.get("warm pool"):
            before = by_name.get((job.stage, "warm pool, idle"))
            held = (job.description.get("WarmPoolStatus") or {}).get(
                "ResourceRetainedBillableTimeInSeconds", 0.0
            )
            by_name[job.stage, "warm pool, idle"] = Portion(
                job.stage,
                "warm pool, idle",
                held + (before.seconds if before else 0.0),
                pool + ((before.dollars or 0.0) if before else 0.0),
                True,
            )
    return [portion for portion in by_name.values() if portion.seconds > 0]


def _add(
    by_name: dict[tuple[str, str], Portion],
    job: JobAccount,
    what: str,
    seconds: float,
    wasted: bool,
) -> None:
    whole, billed = _window(job), job.cost.billable_s
    seconds = seconds * billed / whole if whole else 0.0  # spot is billed less than its time
    priced = job.cost.dollars is not None
    dollars = job.cost.items.get("training", 0.0) * seconds / billed if priced and billed else 0.0
    before = by_name.get((job.stage, what))
    if before is not None:
        seconds += before.seconds
        priced = priced and before.dollars is not None
        dollars += before.dollars or 0.0
    by_name[job.stage, what] = Portion(
        job.stage, what, seconds, dollars if priced else None, wasted
    )


def _window(job: JobAccount) -> float:
    """Seconds from the start to the end of its machines."""
    began = job.description.get("TrainingStartTime")
    now = datetime.datetime.now(datetime.timezone.utc)
    end = job.description.get("TrainingEndTime") or now
    return max(0.0, float((end - began).total_seconds())) if began else 0.0


def _of_other(job: JobAccount) -> list[tuple[str, float, bool]]:
    failed = job.status in ("Failed", "Stopped")
    return [("attempts that did not end well" if failed else "its work", _window(job), failed)]


def _resumed_at(job: JobAccount, trains: Sequence[JobAccount]) -> float | None:
    """The first step of the next attempt with steps; None if no attempt follows."""
    later = trains[trains.index(job) + 1 :]
    firsts = (min((_step(line.text) for line in other.steps), default=None) for other in later)
    return next((first for first in firsts if first is not None), None)


def _step(text: str) -> float:
    return (step_record(text) or {"step": 0.0})["step"]


def _of_train(job: JobAccount, repeated_from: float | None) -> list[tuple[str, float, bool]]:
    """(name, seconds of its window, True if it is waste)."""
    whole = _window(job)
    done = [
        (line.timestamp / 1000, r)
        for line in job.steps
        if "loss" in (r := step_record(line.text) or {})
    ]
    if not done:
        well = job.status == "Completed"
        return [
            (
                "nothing was left to train" if well else "attempts that ended before a step",
                whole,
                True,
            )
        ]
    start = job.description["TrainingStartTime"].timestamp()
    (first, head), (last, tail) = done[0], done[-1]
    counted = max(0.0, tail["step"] - head["step"])
    each = (last - first) / counted if counted else 0.0
    before = min(whole, max(0.0, first - each - start))
    stepping = min(whole - before, last - first + each)
    waited = min(stepping, sum(r.get("data_wait", 0.0) for _, r in done) * each * _every(done))
    lost = 0.0
    if repeated_from is not None and counted:
        steps = [r["step"] for _, r in done]
        lost = stepping * sum(step >= repeated_from for step in steps) / len(steps)
    waited *= 1 - lost / stepping if stepping else 0.0
    return [
        (USEFUL, stepping - lost - waited, False),
        ("steps done again after a restart", lost, True),
        ("waiting for data", waited, True),
        ("before the first step: download, start, compilation", before, True),
        ("after the last step: saving, upload", whole - before - stepping, True),
    ]


def _every(done: Sequence[tuple[float, dict[str, float]]]) -> float:
    """Steps from one line to the next."""
    return (done[-1][1]["step"] - done[0][1]["step"]) / (len(done) - 1) if len(done) > 1 else 1.0
