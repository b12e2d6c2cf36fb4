"""Run one command's module: errors a user can mend become sentences on stderr and status 2, never a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from importlib import import_module

from smtrain.disk import disk_sentence
from smtrain.errors import ConfigError, SmtrainError
from smtrain.extras import missing
from smtrain.text import say

_REMEDIES = {
    errno.ENOSPC: "free space there, or choose another disk",
    errno.EDQUOT: "free space there, or choose another disk",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose one that you may read and write",
    errno.EPERM: "choose one that you may read and write",
}


def call(name: str, module: str, argv: list[str]) -> int:
    """Call a command's typer app with its arguments; returns the exit status."""
    return guarded(lambda: import_module(module).app(args=argv, prog_name=f"smtrain {name}", standalone_mode=True))


def guarded(command: Callable[[], object]) -> int:
    """The exit status of a command. Its errors are told here, and so is a reader of its output that has gone."""
    try:
        status = _ended(command)
        sys.stdout.flush()  # what is left in it is refused here, not while the interpreter ends
    except ConfigError as error:
        for fault in error.faults:
            say(f"smtrain: {fault}", error=True)
        return 2
    except SmtrainError as error:
        say(f"smtrain: {error}", error=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _close()
        return 0
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        if isinstance(error, OSError):
            _close()
        say(f"smtrain: {sentence}", error=True)
        return 2
    return status if isinstance(status, int) else 0


def _ended(command: Callable[[], object]) -> object:
    """What a command gives back, or leaves with: click's own way is to exit."""
    try:
        return command()
    except SystemExit as leaving:
        return leaving.code


def _close() -> None:
    """Where nobody takes our output any more, what is left of it goes nowhere: the interpreter would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _sentence(error: Exception) -> str | None:
    """What a user can mend: the disk, a missing package, AWS. None for anything else, which is a fault of ours."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("smtrain"):
        return missing(error.name)
    if isinstance(error, OSError) and error.strerror and not type(error).__module__.startswith(("botocore", "urllib")):
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = _REMEDIES.get(error.errno or 0, "name another file or folder")
        return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}; {remedy}"
    try:
        from smtrain.job.calls import spell
    except ImportError:
        return disk_sentence(error)
    return spell(error) or disk_sentence(error)
