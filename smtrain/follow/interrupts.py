"""Ctrl-C while a job is followed: once, whatever Python was doing when it came."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.came = False

    def heed(self) -> None:
        """Raises `KeyboardInterrupt` where one came and was lost: Python drops what is raised in a finalizer."""
        if self.came:
            raise KeyboardInterrupt

    def _take(self, *_: Any) -> None:
        if not self.came:  # a second one must not cut short how the first is dealt with
            self.came = True
            raise KeyboardInterrupt


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """The first Ctrl-C within raises `KeyboardInterrupt`, later ones nothing. Only the main thread has signals."""
    found = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    before: Any = signal.signal(signal.SIGINT, found._take)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)
