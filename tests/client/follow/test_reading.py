"""Every line once: late, out of order, equal to another, over pages, failures and a resumed
follow.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    CredentialRetrievalError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.client.backends.base import Pace
from smtrain.client.backends.sagemaker import retry as patience_module
from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.client.follow import follower as follower_module
from smtrain.client.follow import merge
from smtrain.client.follow.follower import Cursor, Follower, StatusChange
from smtrain.client.follow.merge import ReorderBuffer
from smtrain.client.follow.reading import MINUTE, LogReading, SeenEvents, last_lines
from smtrain.core.errors import JobError
from smtrain.core.protocol.log_lines import Line
from tests.tiers import examples

from .cloudwatch import Logs, SageMaker, description, error, target, unreachable

QUICK = Pace(0.001, 0.002, 0.01, 0.005, 60, ((0, 5), (0.01, 120), (0.05, 3600)), 60, (0.1, 1), 0.1)
T = 1_795_262_400_000

# host, second it was written, text, and the reading before which it arrives: few texts and seconds,
# so that lines equal in all of them are common.
events = st.lists(
    st.tuples(
        st.sampled_from(["algo-1", "algo-2", "algo-10"]),
        st.integers(0, 400),
        st.sampled_from("ab"),
        st.integers(0, 3),
    ),
    max_size=40,
)


def reading_of(logs: Logs, **options: Any) -> LogReading:
    return LogReading(target(logs), "job", options.pop("host", None), Patience(1.0), **options)


@settings(deadline=None, max_examples=examples(150))
@given(events, st.integers(1, 7))
def test_whatever_arrives_whenever_is_given_once(
    written: list[tuple[str, int, str, int]], page: int
) -> None:
    logs = Logs(page)
    logs.arrive("job-2/algo-1-17", T, "of another job")
    reading, lines = reading_of(logs), []
    for moment in range(4):
        for host, second, text, arrives in written:
            if arrives == moment:
                logs.arrive(f"job/{host}-17", T + second * 1000, text)
        lines += [line for batch in reading.new(T) for line, _ in batch]
    expected = Counter((host, T + second * 1000, text) for host, second, text, _ in written)
    assert Counter((line.host, line.timestamp, line.text) for line in lines) == expected


def test_a_failed_page_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    logs = Logs()
    for i in range(10):
        logs.arrive("job/algo-1-17", T + i, str(i))
    logs.failures = [
        unreachable(),
        error("FilterLogEvents", "ThrottlingException"),
        error("FilterLogEvents", "InternalFailure", 500),
    ]
    patience = Patience(60.0, sleep=waits.append)
    reading = LogReading(target(logs), "job", None, patience)
    assert [line.text for page in reading.new(T) for line, _ in page] == [str(i) for i in range(10)]
    assert len(waits) == 3
    assert waits[2] > waits[0]
    assert (patience.repeated, patience.trouble) == (3, None)
    assert patience.calls["filter_log_events"] == 7


def test_an_expired_token_starts_the_reading_again() -> None:
    logs = Logs()
    for i in range(10):
        logs.arrive("job/algo-1-17", T, str(i % 2))
    reading, lines = reading_of(logs), []
    pages = reading.new(T)
    lines += next(pages)
    logs.failures = [error("FilterLogEvents", "InvalidParameterException")]
    for page in pages:
        lines += page
    assert Counter(line.text for line, _ in lines) == {"0": 5, "1": 5}


def test_what_patience_cannot_mend_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    logs = Logs()
    logs.failures = [error("FilterLogEvents", "AccessDeniedException")]
    with pytest.raises(Exception, match="AccessDenied"):
        list(reading_of(logs).new(T))
    clock = iter(range(0, 10_000, 30))
    monkeypatch.setattr(vars(patience_module)["time"], "monotonic", lambda: float(next(clock)))
    logs.failures = [unreachable() for _ in range(50)]
    with pytest.raises(JobError, match=r"no answer for 60 s.*Could not connect"):
        list(LogReading(target(logs), "job", None, Patience(60, sleep=lambda _: None)).new(T))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20 * MINUTE), st.integers(0, 2**64 - 1)), max_size=60))
def test_a_key_is_known_also_after_a_resume(keys: list[tuple[int, int]]) -> None:
    seen, known = SeenEvents(), set()
    for timestamp, key in keys:
        assert seen.add(timestamp, key) == ((timestamp, key) not in known)
        known.add((timestamp, key))
    assert len(seen) == len(known)
    again = SeenEvents()
    again.restore(seen.since(5 * MINUTE))
    for timestamp, key in keys:
        if timestamp >= 5 * MINUTE:
            assert not again.add(timestamp, key)


def test_hosts_are_merged_by_time_and_a_late_line_still_comes() -> None:
    order = ReorderBuffer()
    for stamp, host, text in [
        (30, "algo-10", "c"),
        (10, "algo-2", "a"),
        (30, "algo-2", "b"),
        (30, "algo-10", "d"),
    ]:
        order.take(Line(host, stamp, text), 0, now=0.0)
    assert [line.text for line in order.free(0.01, now=0.0)] == ["a"]
    assert [line.text for line in order.free(0.01, now=1.0)] == ["b", "c", "d"]
    order.take(Line("algo-1", 5, "late"), 0, now=1.0)
    assert [line.text for line in order.free(0.01, now=1.0)] == ["late"]


def follow(logs: Logs, sagemaker: SageMaker, **options: Any) -> Follower:
    follower = Follower(target(logs, sagemaker), "job", **options)
    follower.pace = QUICK
    return follower


def texts(follower: Follower) -> list[str]:
    return [
        e.status if isinstance(e, StatusChange) else e.text
        for e in follower.events()
        if isinstance(e, StatusChange | Line)
    ]


def test_the_end_is_told_after_the_last_line() -> None:
    logs = Logs()
    stamp = int(description("InProgress")["CreationTime"].timestamp() * 1000)
    for i in range(5):
        logs.arrive("job/algo-1-17", stamp + i, f"line {i}")
    running = description("InProgress", "Starting", "Training")
    sagemaker = SageMaker(
        running, running, description("Stopped", "Starting", "Training", "Stopping", "Stopped")
    )
    shown = texts(follow(logs, sagemaker))
    assert [text for text in shown if text.startswith("line")] == [f"line {i}" for i in range(5)]
    assert [text for text in shown if not text.startswith("line")] == [
        "Starting",
        "Training",
        "Stopping",
        "Stopped",
    ]
    assert shown[-1] == "Stopped"


def test_no_job_is_a_sentence() -> None:
    sagemaker = SageMaker(description("InProgress"))
    sagemaker.failures = [
        error("DescribeTrainingJob", "ValidationException: Requested resource not found.")
    ]
    with pytest.raises(JobError, match="job: no such job on target local"):
        list(follow(Logs(), sagemaker).events())


@settings(deadline=None, max_examples=examples(60))
@given(written=events, left_after=st.integers(0, 30))
def test_a_follow_that_is_left_goes_on_at_the_same_line(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[tuple[str, int, str, int]],
    left_after: int,
) -> None:
    file = tmp_path_factory.mktemp("cursor") / "job.json"
    logs = Logs()
    stamp = int(description("InProgress")["CreationTime"].timestamp() * 1000)
    for host, second, text, arrives in written:
        if arrives < 2:
            logs.arrive(f"job/{host}-17", stamp + second * 1000, text)
    first = follow(logs, SageMaker(description("InProgress", "Starting", "Training")), cursor=file)
    shown, changes = [], []
    stream = first.events()
    for polls, event in enumerate(stream):
        if isinstance(event, Line):
            shown.append(event)
        elif isinstance(event, StatusChange):
            changes.append(event.status)
        if len(shown) >= left_after or polls > 50:
            break
    stream.close()
    for host, second, text, arrives in written:
        if arrives >= 2:
            logs.arrive(f"job/{host}-17", stamp + second * 1000, text)
    second_follow = follow(
        logs,
        SageMaker(description("Completed", "Starting", "Training", "Completed")),
        cursor=file,
        resume=True,
    )
    for event in second_follow.events():
        if isinstance(event, Line):
            shown.append(event)
        elif isinstance(event, StatusChange):
            changes.append(event.status)
    assert changes == ["Starting", "Training", "Completed"]
    assert Counter((x.host, x.timestamp, x.text) for x in shown) == Counter(
        (host, stamp + second * 1000, text) for host, second, text, _ in written
    )


def test_a_broken_cursor_file_is_none(tmp_path: Path) -> None:
    file = tmp_path / "cursor.json"
    assert Cursor.load(file) is None
    file.write_text('{"start": 1')
    assert Cursor.load(file) is None
    cursor = Cursor(5, 7, 2, {3: {1, 2**64 - 1}})
    cursor.save(file)
    assert Cursor.load(file) == cursor


def test_tail_gives_the_last_lines_and_all_new_ones() -> None:
    logs = Logs()
    stamp = int(description("InProgress")["CreationTime"].timestamp() * 1000)
    for i in range(20):
        logs.arrive(f"job/algo-{i % 2 + 1}-17", stamp + i, f"line {i}")
    assert texts(follow(logs, SageMaker(description("Completed")), tail=3)) == [
        "line 17",
        "line 18",
        "line 19",
    ]
    assert texts(follow(logs, SageMaker(description("Completed")), since=stamp + 18)) == [
        "line 18",
        "line 19",
    ]
    assert texts(follow(logs, SageMaker(description("Completed")), host="algo-2", tail=1)) == [
        "line 19"
    ]


class Backwards:
    """GetLogEvents from the end, with an empty page on the way, as CloudWatch may send one."""

    def describe_log_streams(self, **arguments: Any) -> dict[str, Any]:
        if "nextToken" in arguments:
            return {"logStreams": [{"logStreamName": "job/algo-2-17"}]}
        return {"logStreams": [{"logStreamName": "job/algo-1-17"}], "nextToken": "more"}

    def get_log_events(
        self, *, logStreamName: str, limit: int, nextToken: str = "b/10", **_: Any
    ) -> dict[str, Any]:
        end = int(nextToken[2:])
        if end == 8:
            return {"events": [], "nextBackwardToken": "b/7"}
        first = max(0, end - min(limit, 2))
        events = [
            {"timestamp": T + i, "message": f"{logStreamName[4:10]} {i}"}
            for i in range(first, min(end, 10))
        ]
        return {"events": events, "nextBackwardToken": f"b/{first}"}


def test_last_lines_of_every_host() -> None:
    lines = last_lines(target(Backwards()), "job", count=4)
    assert [line.text for line in lines if line.host == "algo-1"] == [
        f"algo-1 {i}" for i in (5, 6, 8, 9)
    ]
    assert len(lines) == 8
    assert lines == sorted(lines, key=lambda line: line.timestamp)


@pytest.mark.parametrize(
    "failure",
    [
        error("FilterLogEvents", "ExpiredTokenException"),
        error("FilterLogEvents", "ExpiredToken"),
        TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"),
        UnauthorizedSSOTokenError(),
        CredentialRetrievalError(provider="process", error_msg="exit 1"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_expired_credentials_say_how_to_come_back(
    failure: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from smtrain.client.follow.show import View
    from smtrain.client.follow.show import follow as show
    from smtrain.client.jobs.job import Job

    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    logs = Logs()
    logs.failures = [failure]
    job = Job("job", target(logs, SageMaker(description("InProgress", "Starting", "Training"))))
    with pytest.raises(
        JobError, match=r"credentials have expired.*the job is still running"
    ) as caught:
        show(job, View(), say=lambda _: None)
    assert "refresh them (`aws sso login`" in str(caught.value)
    assert "smtrain logs job --follow --resume --target local" in str(caught.value)
    assert Cursor.load(Cursor.path(job.target, "job", None))


def _many(count: int) -> Logs:
    logs, began = Logs(1000), int(description("InProgress")["CreationTime"].timestamp() * 1000)
    for i in range(count):
        logs.arrive("job/algo-1-17", began + i // 100, f"line {i}")
    return logs


def test_the_keys_of_many_lines_take_no_memory() -> None:
    seen = SeenEvents()
    tracemalloc.start()
    try:
        assert all(seen.add(T + i // 100, i) for i in range(30_000))
        assert not any(seen.add(T + i // 100, i) for i in range(30_000))
        assert tracemalloc.get_traced_memory()[1] < 100_000  # a set of them takes 3 MB
    finally:
        tracemalloc.stop()
    assert len(seen) == 30_000


def test_no_more_lines_wait_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MOST_HELD", 100)
    order, shown = ReorderBuffer(), []
    for page in range(20):
        for i in range(50):
            order.take(Line("algo-1", T, str(50 * page + i)), 0, now=0.0)
        shown += [line.text for line in order.free(60.0, now=0.0)]
        assert len(order) <= 100
    assert shown == [str(i) for i in range(900)]


def test_a_tail_holds_its_own_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, count = _many(5_000), 5_000
    follower = follow(logs, SageMaker(description("Completed")), tail=7)
    most = 0

    def take(*args: Any) -> None:
        nonlocal most
        ReorderBuffer.take(follower.order, *args)
        most = max(most, len(follower.order))

    monkeypatch.setattr(follower.order, "take", take)
    assert texts(follower) == [f"line {i}" for i in range(count - 7, count)]
    assert most <= 1007  # a page of CloudWatch, and the tail


def test_a_cursor_keeps_so_many_events_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "MOST_KEYS", 1000)
    logs, count = _many(5_000), 5_000
    file = tmp_path / "cursor.json"
    assert len(texts(follow(logs, SageMaker(description("Completed")), cursor=file))) == count
    cursor = Cursor.load(file)
    assert cursor
    assert sum(map(len, cursor.keys.values())) <= 1100  # and the first of the minute
    logs.arrive("job/algo-1-17", cursor.start, "late")
    for late in (["late"], []):
        assert (
            texts(follow(logs, SageMaker(description("Completed")), cursor=file, resume=True))
            == late
        )
