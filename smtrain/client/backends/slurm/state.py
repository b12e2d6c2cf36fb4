"""Derive a job's description, in DescribeTrainingJob's form, from its history and Slurm's queue.

The history decides for a job that has ended, since Slurm forgets a job after MinJobAge and
accounting may be off. The queue decides for a job that has not ended. No other state is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from smtrain.client.backends.description import JobState, JobTimes, describe
from smtrain.core.files import parse_json

QUEUE = "%i|%j|%T|%r"
"""squeue's format of a row, which is the same in all releases, unlike its JSON."""
_END_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
        "TIMEOUT",
    }
)
_WAITS = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"}
)
_NEVER_RAN_MESSAGE = (
    "it never ran: a stage before it did not succeed, or it was cancelled while it waited"
)
_CANCELLED_MESSAGE = (
    "it was cancelled in Slurm (scancel, or an administrator); launch it again to resume"
)
_PREEMPTED_MESSAGE = "Slurm gave its nodes to another job; launch it again to resume"
# Slurm's reasons for a waiting job, and their meaning for the user.
_WAIT_REASONS = {
    "JobHeldUser": "it is held; `scontrol release {id}` on the head node lets it run",
    "JobHeldAdmin": (
        "an administrator holds it, or it could not start on a node; ask them to release {id}"
    ),
    "launch failed requeued held": (
        "it could not start on a node and is held; ask the administrators to release {id}"
    ),
    "Resources": "it waits for nodes",
    "Priority": "it waits for nodes; other jobs come first",
    "Dependency": "it waits for the stage before it",
    "DependencyNeverSatisfied": (
        "the stage before it did not succeed; `smtrain run` again starts with that one"
    ),
    "BeginTime": "it waits for its time to begin",
    "PartitionDown": "its partition is down",
    "ReqNodeNotAvail": "nodes that it asks for are down or reserved",
    "PartitionTimeLimit": (
        "its time limit is longer than the partition's; set a shorter cluster.time"
    ),
    "AssocGrpGRES": "its account has used up its share",
}
_LIMIT = "its time limit came before a step was saved; raise cluster.time, or cluster.save_before"
_ENDS = {
    "limit": _LIMIT,
    "no requeue": (
        "Slurm refused to requeue it; ask the administrators for JobRequeue, or launch it again to"
        " resume"
    ),
}


@dataclass(frozen=True)
class QueueRow:
    """A job in squeue's answer."""

    id: str
    name: str
    state: str
    reason: str

    @property
    def has_ended(self) -> bool:
        return self.state in _END_STATES

    @property
    def rank(self) -> tuple[bool, int]:
        number = self.id.partition("_")[0]  # a job array: not ours, but of the same name
        return not self.has_ended, int(number) if number.isdigit() else 0


def queue_rows(text: str) -> dict[str, QueueRow]:
    """squeue's rows by job name; of several jobs of a name the newest unfinished one, else the
    newest.
    """
    rows: dict[str, QueueRow] = {}
    for line in text.splitlines():
        id_, name, state, reason = (line.split("|", 3) + [""] * 3)[:4]
        row = QueueRow(id_, name, state.split(" ")[0], reason)
        if name and (name not in rows or row.rank > rows[name].rank):
            rows[name] = row
    return rows


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a history, without lines that a crash or a full disk cut off."""
    events = []
    for line in text.splitlines():
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event and isinstance(event.get("at"), int):
            events.append(event)
    return events


def state_of(
    events: list[dict[str, Any]],
    row: QueueRow | None,
    *,
    stopping: bool,
    failure: str = "",
    reachable: bool = True,
) -> JobState:
    """`stopping`: the user asked it to stop.

    `failure`: the job's last message. `reachable`: squeue answered.
    """
    last = events[-1] if events else {"event": "submitted"}
    has_started = any(event["event"] == "start" for event in events)
    if last["event"] == "stopped":
        return JobState("Stopped", "Stopped")
    if last["event"] == "end":
        if last.get("status") == 0:
            return JobState("Completed", "Completed")
        return JobState(
            "Failed", "Failed", _ENDS.get(str(last.get("why"))) or _status(last, failure)
        )
    if not reachable or (row and not row.has_ended):
        return _active_state(row, has_started=has_started, stopping=stopping)
    if row and row.state == "COMPLETED":
        return JobState("Completed", "Completed")
    if stopping or last["event"] == "left" or (row and row.state in ("CANCELLED", "PREEMPTED")):
        stop_reason = (
            _PREEMPTED_MESSAGE
            if row and row.state == "PREEMPTED"
            else ""
            if stopping
            else _CANCELLED_MESSAGE
        )
        return JobState("Stopped", "Stopped", stop_reason if has_started else _NEVER_RAN_MESSAGE)
    last_message = f"; its last message: {failure}" if failure else ""  # this need not be the cause
    if row:
        reason = (
            _LIMIT
            if row.state == "TIMEOUT"
            else f"Slurm ended it: {row.state} ({row.reason}){last_message}"
        )
        return JobState("Failed", "Failed", reason)
    if not has_started:
        return JobState("Stopped", "Stopped", _NEVER_RAN_MESSAGE)
    return JobState(
        "Failed",
        "Failed",
        "Slurm no longer has it, and it did not record its end: a node was lost, or it "
        f"was killed; launch it again to resume from its last checkpoint{last_message}",
    )


def _active_state(row: QueueRow | None, *, has_started: bool, stopping: bool) -> JobState:
    if stopping:
        return JobState("Stopping", "Stopping")
    if row is None:
        return JobState(
            "InProgress", "Training" if has_started else "Pending", "Slurm does not answer"
        )
    if row.state in _WAITS:
        return JobState("InProgress", "Restarting" if has_started else "Pending", _wait_state(row))
    return JobState(
        "InProgress", "Interrupted" if row.state == "SUSPENDED" else "Training", row.state
    )


def _wait_state(row: QueueRow) -> str:
    """Slurm's state and reason of a waiting job, and their meaning."""
    reason = row.reason.strip("()").replace("_", " ")
    meaning = _WAIT_REASONS.get(reason.partition(",")[0], "").format(id=row.id)
    return f"{row.state}: {row.reason}" + (f"; {meaning}" if meaning else "")


def _status(last: Mapping[str, Any], failure: str) -> str:
    status = int(last.get("status") or 1)
    return (
        f"it ended with status {status}"
        + (f" (signal {status - 128})" if 128 < status < 193 else "")
        + (f": {failure}" if failure else "")
    )


def description(
    request: Mapping[str, Any], events: list[dict[str, Any]], state: JobState, row: QueueRow | None
) -> dict[str, Any]:
    """DescribeTrainingJob's answer for such a job."""
    times = [_moment(event["at"]) for event in events] or [datetime.now(timezone.utc)]
    id_ = next(
        (str(event["id"]) for event in reversed(events) if event.get("id")), row.id if row else ""
    )
    start_time = next((_moment(event["at"]) for event in events if event["event"] == "start"), None)
    return describe(
        request,
        "slurm",
        id_,
        state,
        JobTimes(times[0], times[-1], start_time),
        _transitions(events, state),
    )


def _transitions(events: Iterable[dict[str, Any]], state: JobState) -> list[dict[str, Any]]:
    changes: list[dict[str, Any]] = []

    def change(status: str, at: datetime, message: str = "") -> None:
        if changes:
            changes[-1]["EndTime"] = at
        changes.append({"Status": status, "StartTime": at, "StatusMessage": message})

    for event in events:
        at = _moment(event["at"])
        if event["event"] == "submitted":
            change("Pending", at, f"Slurm job {event.get('id', '')}")
        elif event["event"] == "start":
            change("Training", at, f"on {event.get('nodes', '')}")
        elif event["event"] in ("again", "left"):
            cause = {
                "limit": "its time limit came",
                "failed": "it failed",
                "told": "it was told to end",
            }.get(str(event.get("why")), "Slurm ended it")
            change("Interrupted", at, f"{cause}; it resumes from its last checkpoint")
    if state.secondary in ("Pending", "Restarting") and state.message and changes:
        changes[-1]["StatusMessage"] = state.message
    if state.status in ("Completed", "Failed", "Stopped"):
        last = _moment(max((event["at"] for event in events), default=0))
        change(state.secondary, last, state.message)
        changes[-1]["EndTime"] = last
    return changes


def _moment(at: int) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)
