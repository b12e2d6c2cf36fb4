"""A buffered tracker never blocks: each step is sent once, and waits while the tracker is down."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from smtrain.core.config.track import Track
from smtrain.core.tracking.buffer import Buffered
from smtrain.core.tracking.settings import TrackedStep, id_of, parameters, parse, variable


class Server:
    """A tracker that keeps accepted data; while `down` it refuses, while `hanging` it does not
    answer.
    """

    name = "Tracker"

    def __init__(self, known: set[tuple[str, int]] | None = None) -> None:
        self.known, self.taken, self.ended = known or set(), list[TrackedStep](), list[str]()
        self.down, self.hanging, self.asked = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.released = threading.Event()

    def begin(self, first: TrackedStep) -> set[tuple[str, int]]:
        return self.known

    def write(self, records: Sequence[TrackedStep]) -> None:
        self.asked.set()
        if self.hanging.is_set():
            self.released.wait()
        if self.down.is_set():
            raise ConnectionError("refused\nmore")
        self.taken += records

    def end(self, status: str) -> None:
        self.ended.append(status)


def step(number: int, **more: float) -> TrackedStep:
    return TrackedStep(number, 1000 * number, {"step": float(number), "loss": 3.0 / number, **more})


def test_every_step_is_sent_once_and_in_order() -> None:
    server = Server()
    buffered = Buffered(server, print)
    for number in [*range(1, 501), *range(400, 601)]:
        buffered.log(step(number))
    assert buffered.close("Completed", 30) == 0
    assert [record.step for record in server.taken] == list(range(1, 601))
    assert server.ended == ["Completed"]


def test_what_an_earlier_process_sent_is_not_sent_again_but_its_validation_is() -> None:
    server = Server({("loss", n) for n in range(1, 11)} | {("val_loss", 5)})
    buffered = Buffered(server, print)
    for number in (4, 5, 10, 11):
        buffered.log(step(number, val_loss=1.0) if number in (5, 10) else step(number))
    buffered.close(None, 30)
    assert [(r.step, sorted(r.numbers)) for r in server.taken] == [
        (10, ["val_loss"]),
        (11, ["loss", "step"]),
    ]
    assert server.ended == [], "a running job is left open"


def test_a_tracker_that_is_down_is_told_of_once_and_gets_everything_later() -> None:
    server, lines = Server(), list[str]()
    server.down.set()
    buffered = Buffered(server, lines.append)
    for number in range(1, 300):
        buffered.log(step(number))
    assert server.asked.wait(30)
    server.down.clear()
    assert buffered.close("Failed", 60) == 0
    assert [record.step for record in server.taken] == list(range(1, 300))
    assert [line.partition(" (")[0] for line in lines if "does not" in line] in (
        [],
        ["Tracker does not take what is tracked"],
    )
    assert all("more" not in line for line in lines)


def test_a_tracker_that_hangs_holds_nobody() -> None:
    server = Server()
    server.hanging.set()
    buffered = Buffered(server, print)
    buffered.log(step(1))
    assert server.asked.wait(30)
    for number in range(2, 1000):
        buffered.log(step(number))  # would never return if it waited
    assert buffered.close("Completed", 0.1) == 999
    server.released.set()


def test_what_a_job_carries_is_what_the_config_says_and_no_more() -> None:
    track = Track.model_validate(
        {"mlflow": "http://here:5000", "wandb": {"project": "p", "key": {"secret": "name"}}}
    )
    assert parse(variable(track)) == track
    assert variable(Track()) is None
    for other in (None, "", "{", '{"new_key": 1}', '{"by": "nobody"}'):
        assert parse(other) is None
    assert parameters({"a": {"b": 1, "c": None}, "d": [1, 2], "e": ""}) == {
        "a.b": "1",
        "d": "[1, 2]",
    }
    assert id_of("s3://b/run/") == id_of("s3://b/run")


@pytest.mark.parametrize(
    "uri", ["here", "arn:aws:sagemaker:us-east-1:1:thing/x", "ftp://x", "http://"]
)
def test_an_address_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="ARN"):
        Track.model_validate({"mlflow": uri})
