"""Ctrl-C while a job is followed: raise at once if nothing can be lost, else after the current line
is shown.

Python's handler raises between any two instructions: a line that was read and not yet shown would
be lost, also for a later follow, which resumes behind it. So this handler raises only within
`interruptible()`, which encloses calls to AWS and pauses; elsewhere it sets a flag, which is
checked between two events.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")

_STUCK_SECONDS = 2.0
"""A second Ctrl-C after this time, if the first had no effect, raises anywhere: the output may be
blocked.
"""


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C that lost nothing; a notebook shows its sentence instead of a traceback."""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook."""
        return [str(self)]


@contextmanager
def resumable_interrupt(sentence: str) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted` with the sentence; a context manager or decorator."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(sentence) from None


class Interrupts:
    """The state of Ctrl-C."""

    def __init__(self) -> None:
        self.came = False
        self._heeded = self._free = False
        self._first = 0.0

    def heed(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C came and has had no effect yet."""
        if self.came and not self._heeded:
            self._heeded = True
            raise KeyboardInterrupt

    @contextmanager
    def free(self) -> Iterator[None]:
        """Let Ctrl-C raise at once in the block."""
        self.heed()
        was_free, self._free = self._free, True
        try:
            yield
        finally:
            self._free = was_free

    def _take(self, *_: Any) -> None:
        now = time.monotonic()
        if not self.came:
            self.came, self._first = True, now
        elif self._heeded or now - self._first < _STUCK_SECONDS:
            return  # a second one must not interrupt the handling of the first
        if self._free or now - self._first >= _STUCK_SECONDS:
            # `_heeded` stays False, as Python drops an exception raised in a finalizer.
            raise KeyboardInterrupt


_current: Interrupts | None = None


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Let Ctrl-C raise only in `interruptible()` and from `heed`, once; only the main thread gets
    signals.
    """
    global _current
    state = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    previous_handler: Any = signal.signal(signal.SIGINT, state._take)
    outer, _current = _current, state
    try:
        yield state
    finally:
        _current = outer
        signal.signal(signal.SIGINT, previous_handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Enclose an operation that may take long and leaves nothing behind if it is interrupted."""
    if _current is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _current.free():
        yield


def pause(seconds: float) -> None:
    """Sleep, or until Ctrl-C."""
    with interruptible():
        time.sleep(seconds)


def poll(check: Callable[[], _Answer], interval: float, limit: float = inf) -> _Answer:
    """Call `check` every `interval` seconds until its answer is true, or until `limit` seconds have
    passed.

    Returns the last answer: a false one if the time was over. The last pause ends with the time.
    """
    deadline = time.monotonic() + limit
    while not (answer := check()) and (remaining_seconds := deadline - time.monotonic()) > 0:
        pause(min(interval, remaining_seconds))
    return answer
