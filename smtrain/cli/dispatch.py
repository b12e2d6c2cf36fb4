"""Run one command's module; errors that a user can correct become sentences on stderr and status 2,
not tracebacks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from smtrain.core.errors import ConfigError, SmtrainError
from smtrain.core.public_api import sentence
from smtrain.core.spinner import spinner
from smtrain.core.text import plainly, say


class UsageError(SmtrainError):
    """A command was called with words that it does not take."""


# The library names keys in its errors; the command line shows the flags that the user typed.

_flags: dict[str, str] = {}
_ALWAYS = {" (overwrite=True)": ""}


def forget() -> None:
    """Forget the flags of an earlier command."""
    _flags.clear()


def register_flags(flags: dict[str, str]) -> None:
    """Name these keys in later errors by their flags."""
    _flags.update(flags)


def in_flags(text: str) -> str:
    """The sentence with flags in place of keys: dotted keys anywhere, plain words only at its
    beginning.
    """
    for key, flag in _flags.items():
        if re.search(r"[. ]", key):
            text = re.sub(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", flag, text)
        elif text.startswith((f"{key}:", f"{key} ")):
            text = flag + text[len(key) :]
    for words, replacement in _ALWAYS.items():
        text = text.replace(words, replacement)
    return text


def call(name: str, module: str, argv: list[str]) -> int:
    """Call a command's typer app with its arguments; returns the exit status."""

    def command() -> object:
        # a program reads JSON, even through a terminal
        progress = (
            nullcontext()
            if "--json" in argv or name == "help"
            else spinner(f"smtrain {name}: one moment", keep_line=True)
        )
        with progress:
            return _run_app(import_module(module).app, f"smtrain {name}", argv)

    return run_guarded(command)


def _run_app(app: Any, name: str, argv: list[str]) -> object:
    """Run a command; a wrong command line becomes one sentence, like any other error."""
    try:
        return app(args=argv, prog_name=name, standalone_mode=False)
    except Exception as error:  # newer typers have their own click, so no class is named here
        if type(error).__name__ == "Abort":
            raise KeyboardInterrupt from None
        if not hasattr(error, "format_message"):
            raise
        from smtrain.cli.usage import sentence_of

        raise UsageError(sentence_of(error, name, argv)) from None


def run_guarded(command: Callable[[], object]) -> int:
    """The exit status of a command, with its errors printed; a closed pipe is no error."""
    forget()
    plainly(sys.stdout)
    plainly(sys.stderr)
    try:
        status = _result_or_exit_status(command)
        sys.stdout.flush()  # an error of the last write must come here, not at interpreter exit
    except ConfigError as error:
        for fault in error.faults:
            say(f"smtrain: {in_flags(fault)}", error=True)
        return 2
    except UsageError as error:
        say(error, error=True)
        return 2
    except SmtrainError as error:
        if isinstance(error.__cause__, OSError):
            _close()
        say(f"smtrain: {in_flags(str(error))}", error=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _close()
        return 0
    except Exception as error:
        text = sentence(error)
        if text is None:
            raise
        if isinstance(error, OSError):
            _close()
        say(f"smtrain: {text}", error=True)
        return 2
    return status if isinstance(status, int) else 0


def _result_or_exit_status(command: Callable[[], object]) -> object:
    """The result of a command, or its exit status: click exits by itself."""
    try:
        return command()
    except SystemExit as leaving:
        return leaving.code


def _close() -> None:
    """Discard the rest of the output if its reader is gone: the interpreter would complain about
    it.
    """
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
