"""Run a stage in its container: every entry script calls `main`."""

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
from smtrain.worker.output import fail, say
from smtrain.worker.train.out_of_memory import memory_sentence


def main(stage: Callable[[JobConfig, Container], None]) -> None:
    """Run one stage; a failure goes to stderr and, with host and rank, to output/failure, and ends
    with status 1.

    Stages import their libraries inside functions: a library that cannot be loaded is a failure
    like any other.
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
        if sentence := disk_sentence(error, container.root):
            fail(container, sentence)
        if config is not None and (sentence := memory_sentence(error, config)):
            fail(container, sentence)
        # One write, marked as torch marks a rank's traceback: other ranks write to the same log.
        mark = f"[rank{rank}]: " if (rank := os.environ.get("RANK")) else ""
        lines = hide(traceback.format_exc()).splitlines(keepends=True)
        say("".join(f"{mark}{line}" for line in lines))
        fail(container, f"{type(error).__name__}: {error}")


def _of_thread(args: threading.ExceptHookArgs) -> None:
    """Report in one line that a full disk ended a library's thread, such as TensorBoard's
    writer.
    """
    if args.exc_value and (sentence := disk_sentence(args.exc_value)):
        say(f"{sentence}\n")
    else:
        threading.__excepthook__(args)
