"""torchrun on this machine, with ranks that are forks of it: `python forking.py ARGUMENTS OF
TORCHRUN`.

A short run spends most of its time importing torch and transformers, in torchrun and again in every
rank. Here torchrun imports them once and forks every rank. Only local runs of the native engine
without a GPU start this way, because a GPU's driver does not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from become import become


def preload(ml: Path) -> None:
    """Import what every rank needs. If that fails, the ranks fail too and report it."""
    gc.disable()  # a fifth of the time of an import goes to collections that find nothing
    with contextlib.suppress(Exception):
        import torch._dynamo  # noqa: F401 - torch.optim imports it when it is used

        import smtrain.worker.engine.native
        import smtrain.worker.train.start  # noqa: F401

        kind = json.loads((ml / "input/data/model/config.json").read_text("utf-8"))["model_type"]
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    gc.freeze()  # or the first collection of every rank would copy all pages
    gc.enable()


class Rank:
    """A forked rank, with the part of `subprocess.Popen` that torchrun uses."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], outputs: list[int]
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        # Between fork and `become` a signal would run torchrun's handler in the rank.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # torchrun's store has a thread, in C++
                self.pid = os.fork()
            if self.pid == 0:
                become(arguments, environment, dict(enumerate(outputs, 1)), mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self) -> int | None:
        """The exit status, minus the signal that ended it, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Signal it while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def fork_ranks() -> None:
    """Make torchrun fork ranks that are Python scripts."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    original_popen = SubprocessHandler._popen

    def start(handler: Any, command: tuple[str, ...], environment: dict[str, str]) -> Any:
        if list(command[:2]) != [sys.executable, "-u"] or not command[2].endswith(".py"):
            return original_popen(handler, command, environment)
        streams: list[Any] = [handler._stdout or sys.__stdout__, handler._stderr or sys.__stderr__]
        return Rank(list(command[2:]), environment, [stream.fileno() for stream in streams])

    SubprocessHandler._popen = start  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    preload(Path(os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml")))
    from rendezvous import on_its_own_address
    from torch.distributed.run import main

    on_its_own_address()
    with contextlib.suppress(
        ImportError, AttributeError
    ):  # else another torch: each rank starts a Python
        fork_ranks()
    main()
