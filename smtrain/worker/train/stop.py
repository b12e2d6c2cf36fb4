"""SIGTERM: noted by any rank, agreed on by all, and fatal to a first step that still compiles."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

from smtrain.worker.engine.base import Engine

GRACE = 20.0  # seconds after SIGTERM for a first step, nearly done, to be saved like any other
PROOF_SECONDS = (
    60.0  # after SIGTERM; SageMaker's other 60 are for files that are still being written then
)


class StopRequest:
    """SIGTERM, seen by any rank, agreed on by all at the end of a step."""

    def __init__(self) -> None:
        self._received: float | None = None
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._received = self._received or time.monotonic()

    def is_agreed(self, engine: Engine) -> bool:
        """Whether any rank was told to stop.

        Collective: hosts get their signals at different moments.
        """
        return engine.is_any_set(self._received is not None)

    def in_time(self, engine: Engine, seconds: float) -> bool:
        """Whether every rank can still write its files after something that takes this long.

        Collective.
        """
        received_at = self._received
        return not engine.is_any_set(
            received_at is not None and time.monotonic() - received_at + seconds > PROOF_SECONDS
        )


class FirstStep:
    """Ends the process with status 0 some seconds after SIGTERM, unless `mark_done` was called.

    There is nothing to save yet, and the first step can take hours to compile. Python runs no
    signal handler while a library compiles, but writes the signal's number to a pipe at once; a
    thread reads it. SIGTERM must have a Python handler already. Create this in the main thread.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace, self._done = grace, threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="stop before the first step", daemon=True).start()

    def mark_done(self) -> None:
        """All ranks have done the first step, so from now on a stop saves.

        Call it in the main thread.
        """
        if self._done.is_set():
            return
        self._done.set()
        signal.set_wakeup_fd(-1)
        os.close(self._write)  # ends the thread

    def _run(self) -> None:
        while numbers := os.read(self._read, 64):
            if signal.SIGTERM in numbers and not self._done.wait(self._grace):
                if os.environ.get("RANK", "0") == "0":
                    sys.stdout.write(
                        "asked to stop before the first step was done: nothing to save\n"
                    )
                    sys.stdout.flush()
                os._exit(0)  # not sys.exit: the main thread may be compiling for hours yet
        os.close(self._read)
