"""A stop before the first step is done: there is nothing to save, and a first step can take hours to compile."""

from __future__ import annotations

import os
import signal
import sys
import threading

GRACE = 20.0  # seconds after SIGTERM for a first step that is nearly done, to be saved like any other


class FirstStep:
    """From SIGTERM on, ends the process with status 0 after some seconds unless `done` was called.

    Python runs no signal handler while a library compiles, but writes the signal's number to a pipe at once; a thread
    reads it. SIGTERM must have a handler of Python's already, and this be made in the main thread.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace, self._done = grace, threading.Event()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="stop before the first step", daemon=True).start()

    def done(self) -> None:
        """All ranks have the first step behind them, so from now on a stop saves. In the main thread."""
        if self._done.is_set():
            return
        self._done.set()
        signal.set_wakeup_fd(-1)
        os.close(self._write)  # ends the thread

    def _run(self) -> None:
        while numbers := os.read(self._read, 64):
            if signal.SIGTERM in numbers and not self._done.wait(self._grace):
                if os.environ.get("RANK", "0") == "0":
                    sys.stdout.write("asked to stop before the first step was done: nothing to save\n")
                    sys.stdout.flush()
                os._exit(0)  # the main thread may be compiling for hours yet
        os.close(self._read)
