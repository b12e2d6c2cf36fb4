"""What every entry script has around it: read the contract, and say in one place why it failed."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

from smtrain.core.config import JobConfig
from smtrain.core.config.secrets import hide
from smtrain.core.config.stage_file import stage_config
from smtrain.core.errors import SmtrainError
from smtrain.core.files import disk_sentence
from smtrain.core.protocol.container import Container
from smtrain.worker.train.exit_message import say, within
from smtrain.worker.train.out_of_memory import memory_sentence


def main(stage: Callable[[JobConfig, Container], None]) -> None:
    """Run one stage; a failure goes to stderr and, with host and rank, to output/failure, and ends with status 1.

    Stages import what they need inside: a library that cannot be loaded is a failure like any other.
    """
    container = Container.from_files()
    threading.excepthook = _of_thread
    config = None
    try:
        config = stage_config(container)
        stage(config, container)
    except SmtrainError as error:
        fail(container, str(error))
    except Exception as error:
        if told := disk_sentence(error, container.root):
            fail(container, told)
        if config is not None and (told := memory_sentence(error, config)):
            fail(container, told)
        # One write, marked as torch marks a rank's traceback: other ranks write to the same log.
        mark = f"[rank{rank}]: " if (rank := os.environ.get("RANK")) else ""
        told = hide(traceback.format_exc())
        say("".join(f"{mark}{line}" for line in told.splitlines(keepends=True)))
        fail(container, f"{type(error).__name__}: {error}")


def _of_thread(what: threading.ExceptHookArgs) -> None:
    """A thread of a library (TensorBoard's writer) that a disk has ended says so in one line."""
    if what.exc_value and (told := disk_sentence(what.exc_value)):
        say(f"{told}\n")
    else:
        threading.__excepthook__(what)


def fail(container: Container, message: str) -> None:
    """Report a failure where SageMaker and people look for it, and end the process with status 1.

    Neither a log that nobody reads nor a disk that is full or hangs keeps it from ending.
    """
    try:
        message = hide(message)
        rank = os.environ.get("RANK")
        where = f"{container.host}, rank {rank}" if rank else container.host
        say(f"{where}: {message}\n")
        within(lambda: container.report_failure(f"{where}: {message}"))
    finally:
        # Not sys.exit: other ranks may hold collectives open that would keep this process from ending.
        os._exit(1)
