"""Ctrl-C while following: it is not lost, and a second one cuts nothing short."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from smtrain.follow.interrupts import interrupts


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_interrupts_and_the_second_does_not() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts():
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_a_finalizer_swallowed_is_heeded_later() -> None:
    class Busy:
        def __del__(self) -> None:
            press()
            for _ in range(1000):  # the handler runs between instructions
                pass

    with interrupts() as found:
        busy: Any = Busy()
        found.heed()
        del busy
        assert found.came
        with pytest.raises(KeyboardInterrupt):
            found.heed()


def test_elsewhere_than_in_the_main_thread_signals_are_left_alone() -> None:
    seen = []

    def run() -> None:
        with interrupts() as found:
            seen.append((found.came, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(False, signal.getsignal(signal.SIGINT))]
