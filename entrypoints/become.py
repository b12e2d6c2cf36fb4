"""What a fork of another Python does to run a script as a new Python would. Standard library alone."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import sys
import threading
from typing import Any


def become(
    arguments: list[str], environment: dict[str, str], files: dict[int, int], mask: set[Any], exits: bool = False
) -> None:
    """Run the script `arguments[0]` in this fork, and end with it. Nothing of the parent's runs here again.

    `files` are the descriptors to have, by standard stream; `mask` are the signals that stay blocked. With `exits` the
    functions that wait for the exit are run, those that were registered before the fork among them.
    """
    status = 1
    try:
        os.setsid()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for standard, descriptor in files.items():
            os.dup2(descriptor, standard)
        os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))  # the parent's sockets and files
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout = sys.__stdout__ = _unbuffered(1, sys.stdout)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _unbuffered(2, sys.stderr)  # type: ignore[misc]
        sys.argv = arguments
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != arguments[0]:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        # Not by an exit of Python's: objects of the parent's that are still here would close what they have not opened.
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            if exits:
                atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


def _unbuffered(descriptor: int, like: Any) -> io.TextIOWrapper:
    """A standard stream as `python -u` has it."""
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True)
