"""Ctrl-C while following: it is not lost, and a second one cuts nothing short."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from smtrain.core.interrupts import interruptible, interrupts, pause, poll


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupts_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as state:
        press()
        with pytest.raises(KeyboardInterrupt):
            state.heed()
        press()
        state.heed()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_pause_and_a_call_are_cut_short_at_once() -> None:
    threading.Timer(0.2, press).start()
    with interrupts(), pytest.raises(KeyboardInterrupt):
        pause(60.0)
    with interrupts():
        press()
        with pytest.raises(KeyboardInterrupt), interruptible():
            raise AssertionError("one that came before must not wait for the call")


def test_a_later_one_gets_out_of_what_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smtrain.core.interrupts._STUCK_SECONDS", 0.3)
    with interrupts():
        press()
        threading.Timer(0.5, press).start()
        with pytest.raises(KeyboardInterrupt):
            time.sleep(60.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_a_finalizer_swallowed_is_heeded_later() -> None:
    class Busy:
        def __del__(self) -> None:
            press()
            for _ in range(1000):  # the handler runs between instructions
                pass

    with interrupts() as state:
        busy: Any = Busy()
        state.heed()
        with interruptible():
            del busy
        assert state.came
        with pytest.raises(KeyboardInterrupt):
            state.heed()


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def run() -> None:
        with interrupts() as state:
            seen.append((state.came, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, signal.getsignal(signal.SIGINT))]


def test_polling_ends_with_a_true_answer_or_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, waits, now = ["", "", "done"], [], [0.0]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert poll(lambda: answers.pop(0), 2.0) == "done"
    assert waits == [2.0, 2.0]
    assert poll(lambda: 0, 2.0, limit=3.0) == 0
    assert waits[2:] == [2.0, 1.0], "the last pause ends with the time"
