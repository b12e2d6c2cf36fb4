"""Choose the job that the name of a run means, from the rows of ListTrainingJobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.protocol.requests import is_of_run, is_waiting, stage_of
from smtrain.stages import STAGES

_MAX_ROWS = 1000
"""Jobs that are looked at."""


def row_of_run(place: Backend, name: str, stages: Sequence[str] = ()) -> dict[str, Any] | None:
    """The row of ListTrainingJobs of the job that a run's name means; None for the name of a job or
    of nothing.

    Jobs of `stages` come first, in this order; then the job that runs. If jobs of a queued chain
    wait or never ran, a stage that failed or was stopped comes next, then the next stage to run.
    Else it is the newest job.
    """
    if stage_of(name):
        return None
    rows = [row for page in place.rows(name, _MAX_ROWS) for row in page][:_MAX_ROWS]
    if any(row["TrainingJobName"] == name for row in rows):
        return None
    rows = [row for row in rows if is_of_run(row["TrainingJobName"], name)]
    if place.record.chains:  # submitted at once, often in the same second
        rows.sort(key=lambda row: (row["CreationTime"], _place_in_run(row)), reverse=True)
    order = {stage: rank for rank, stage in enumerate(stages)}
    newest_by_stage = {_stage(row): row for row in reversed(rows)}

    def never_ran(row: dict[str, Any]) -> bool:
        # SageMaker's rows have no start
        is_stopped = place.record.queues and row["TrainingJobStatus"] == "Stopped"
        return is_stopped and "TrainingStartTime" not in row

    has_queue = any(is_waiting(row) or never_ran(row) for row in newest_by_stage.values())

    def rank(row: dict[str, Any]) -> tuple[int, int, int]:
        stage = _stage(row)
        is_final = row["TrainingJobStatus"] in FINAL_STATUSES
        if not is_final and not is_waiting(row):
            urgency = 0
        elif is_waiting(row):
            urgency = 2
        elif not has_queue:
            urgency = 1
        else:
            has_failed = row["TrainingJobStatus"] != "Completed" and not never_ran(row)
            urgency = 1 if has_failed and newest_by_stage[stage] is row else 3
        next_stage = _place_in_run(row) if is_waiting(row) else 0
        return order.get(stage, len(order)), urgency, next_stage

    return min(rows, key=rank, default=None)


def _place_in_run(row: dict[str, Any]) -> int:
    stage = _stage(row)
    return STAGES.index(stage) if stage in STAGES else 0


def _stage(row: dict[str, Any]) -> str:
    return (stage_of(row["TrainingJobName"]) or ("", ""))[1]
