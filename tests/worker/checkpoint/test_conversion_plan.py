"""Sharing the jobs of a conversion among threads."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from smtrain.worker.checkpoint import conversion_plan
from smtrain.worker.checkpoint.conversion_plan import on_threads


def test_everything_is_done_once_and_each_thread_has_a_group_of_its_own_while_there_are_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversion_plan, "cores_here", lambda: 3)
    together = threading.Barrier(3, timeout=30)
    done: list[tuple[int, int]] = []

    def call(group: int, number: int) -> None:
        if number == 0:
            # breaks if two of these are in one thread, or a second call of a group comes first
            together.wait()
        done.append((group, number))

    sizes = {0: 40, 1: 5, 2: 1, 3: 0}
    on_threads(
        [partial(call, group, number) for number in range(count)] for group, count in sizes.items()
    )
    assert sorted(done) == [
        (group, number) for group, count in sizes.items() for number in range(count)
    ]


def test_the_first_error_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_plan, "cores_here", lambda: 2)
    done: list[int] = []

    def call(number: int) -> None:
        if number == 3:
            raise OSError("the disk is full")
        done.append(number)

    with pytest.raises(OSError, match="the disk is full"):
        on_threads([[partial(call, number) for number in range(1000)]])
    assert len(done) < 1000


def test_nothing_to_do() -> None:
    on_threads([])
    on_threads([[]])
