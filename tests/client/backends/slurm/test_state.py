"""The state of a job from its history and the queue."""

from __future__ import annotations

import pytest

from smtrain.client.backends.slurm.state import (
    QueueRow,
    description,
    events_of,
    queue_rows,
    state_of,
)

SUBMITTED = {"at": 100, "event": "submitted"}
START = {"at": 110, "event": "start", "id": "7", "restart": 0, "nodes": "node[1-2]"}
AGAIN = {"at": 170, "event": "again", "id": "7", "why": "limit", "status": 0, "step": "40"}
DONE = {"at": 130, "event": "end", "id": "7", "status": 0}
REQUEST = {
    "TrainingJobName": "run-train-00000001",
    "OutputDataConfig": {"S3OutputPath": "file:///fsx/run/jobs"},
    "ResourceConfig": {"InstanceType": "ml.trn1.32xlarge", "InstanceCount": 2},
}


def row(state: str, reason: str = "None") -> QueueRow:
    return QueueRow("7", "run-train-00000001", state, reason)


@pytest.mark.parametrize(
    ("events", "queued", "asked", "status", "secondary"),
    [
        ([SUBMITTED], row("PENDING", "Dependency"), False, "InProgress", "Pending"),
        ([SUBMITTED], None, False, "Stopped", "Stopped"),
        ([SUBMITTED], row("PENDING"), True, "Stopping", "Stopping"),
        ([SUBMITTED], row("CANCELLED"), True, "Stopped", "Stopped"),
        ([SUBMITTED, START], row("RUNNING"), False, "InProgress", "Training"),
        ([SUBMITTED, START], row("COMPLETING"), False, "InProgress", "Training"),
        ([SUBMITTED, START], row("SUSPENDED"), False, "InProgress", "Interrupted"),
        ([SUBMITTED, START, AGAIN], row("PENDING", "BeginTime"), False, "InProgress", "Restarting"),
        ([SUBMITTED, START], None, False, "Failed", "Failed"),
        ([SUBMITTED, START], row("COMPLETED"), False, "Completed", "Completed"),
        ([SUBMITTED, START], row("TIMEOUT"), False, "Failed", "Failed"),
        ([SUBMITTED, START], row("CANCELLED"), False, "Stopped", "Stopped"),
        (
            [SUBMITTED, START, {"at": 130, "event": "left", "id": "7"}],
            None,
            False,
            "Stopped",
            "Stopped",
        ),
        ([SUBMITTED, START, DONE], None, False, "Completed", "Completed"),
        ([SUBMITTED, START, DONE], row("COMPLETED"), True, "Completed", "Completed"),
        (
            [SUBMITTED, START, {"at": 130, "event": "end", "id": "7", "status": 137}],
            None,
            False,
            "Failed",
            "Failed",
        ),
        (
            [SUBMITTED, START, {"at": 130, "event": "stopped", "id": "7"}],
            row("COMPLETING"),
            True,
            "Stopped",
            "Stopped",
        ),
    ],
)
def test_a_status_follows_from_history_and_queue(
    events: list[dict[str, object]],
    queued: QueueRow | None,
    asked: bool,
    status: str,
    secondary: str,
) -> None:
    state = state_of(events, queued, stopping=asked)
    assert (state.status, state.secondary) == (status, secondary)


def test_a_job_is_not_lost_because_slurmctld_does_not_answer() -> None:
    assert (
        state_of([SUBMITTED, START], None, stopping=False, reachable=False).status == "InProgress"
    )
    ended = {"at": 130, "event": "end", "id": "7", "status": 0}
    assert (
        state_of([SUBMITTED, START, ended], None, stopping=False, reachable=False).status
        == "Completed"
    )


def test_a_failure_has_the_words_of_the_stage_else_of_slurm() -> None:
    end = {"at": 130, "event": "end", "id": "7", "status": 137}
    assert state_of([START, end], None, stopping=False, failure="rank 0: loss").message.endswith(
        ": rank 0: loss"
    )
    assert "signal 9" in state_of([START, end], None, stopping=False).message
    assert "cluster.time" in state_of([START], row("TIMEOUT"), stopping=False).message
    assert "NODE_FAIL" in state_of([START], row("NODE_FAIL"), stopping=False).message


def test_the_last_line_of_a_job_that_slurm_ended_is_not_told_as_the_reason() -> None:
    words = "step=40 loss=1.2"
    by_slurm = state_of([START], row("NODE_FAIL"), stopping=False, failure=words).message
    assert by_slurm == f"Slurm ended it: NODE_FAIL (None); its last message: {words}"
    gone = state_of([START], None, stopping=False, failure=words).message
    assert gone.startswith("Slurm no longer has it")
    assert gone.endswith(words)


def test_a_line_that_was_cut_off_is_left_out() -> None:
    text = '{"at": 1, "event": "submitted"}\n{"at": 2, "event": "start", "id": "7"}\n{"at": 3, "eve'
    assert [event["event"] for event in events_of(text)] == ["submitted", "start"]
    assert events_of('[]\n"x"\n{"event": "end"}\n') == []


def test_of_two_jobs_of_a_name_the_one_that_runs_counts() -> None:
    rows = queue_rows(
        "8|a|RUNNING|None\n9|a|CANCELLED|None\n9|b|PENDING|(a|b)\n12|c|FAILED|x\n11|c|COMPLETED|x\n"
    )
    assert rows["a"].id == "8"
    assert rows["c"].id == "12"
    assert rows["b"].reason == "(a|b)"


def test_a_description_has_the_form_of_sagemaker() -> None:
    events = [
        SUBMITTED,
        START,
        AGAIN,
        {**START, "at": 180},
        {"at": 240, "event": "end", "id": "7", "status": 0},
    ]
    made = description(REQUEST, events, state_of(events, None, stopping=False), None)
    changes = [
        (change["Status"], change["EndTime"].timestamp())
        for change in made["SecondaryStatusTransitions"]
    ]
    assert changes == [
        ("Pending", 110),
        ("Training", 170),
        ("Interrupted", 180),
        ("Training", 240),
        ("Completed", 240),
    ]
    assert made["TrainingStartTime"].timestamp() == 110
    assert made["TrainingEndTime"].timestamp() == 240
    assert (
        made["ModelArtifacts"]["S3ModelArtifacts"]
        == "file:///fsx/run/jobs/run-train-00000001/output/model"
    )
