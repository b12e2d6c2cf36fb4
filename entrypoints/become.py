"""Run a script in a fork of another Python as a new Python would run it. Standard library only."""

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
    arguments: list[str],
    environment: dict[str, str],
    files: dict[int, int],
    mask: set[Any],
    exits: bool = False,
) -> None:
    """Run the script `arguments[0]` in this fork, and end with it.

    No code of the parent runs here again.

    `files` are the descriptors of the standard streams; `mask` are the signals that stay blocked.
    With `exits` the functions registered with atexit run, including those that were registered
    before the fork.
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
        os.closerange(
            3, 1 + max(map(int, os.listdir("/proc/self/fd")))
        )  # the parent's sockets and files
        os.environ.clear()
        os.environ.update(environment)
        sys.stdout = sys.__stdout__ = _open_unbuffered(1, sys.stdout)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _open_unbuffered(2, sys.stderr)  # type: ignore[misc]
        sys.argv, sys.orig_argv = (
            arguments,
            [
                sys.executable,
                *arguments,
            ],
        )  # a script may start its command again
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
        # os._exit: in an ordinary exit, objects of the parent would close files that this process
        # has not opened.
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            if exits:
                atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


def _open_unbuffered(descriptor: int, like: Any) -> io.TextIOWrapper:
    """An unbuffered standard stream, as with `python -u`."""
    raw: Any = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True)
