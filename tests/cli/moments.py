"""Calls that are killed, or interrupted by another call, at one of the changes that they make below
a folder.

Everything runs in a fork of the test, because an audit hook cannot be removed from a process.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.errors import SmtrainError

Call = Callable[[], object]
_CHANGES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.truncate",
    "shutil.rmtree",
}
_KILLED = 137


@dataclass
class Moments:
    """Runs calls, and does something right before one of the changes that they make below a
    folder.
    """

    folder: Path
    _act: Callable[[str, tuple[Any, ...]], None] | None = None
    _number = _count = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The audit hook. Python makes these calls, C++ makes none."""
        if self._act is None or not self._is_change(event, arguments):
            return
        self._count += 1
        if self._count - 1 == self._number:
            act, self._act = self._act, None
            act(event, arguments)

    def _is_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event != "open" and event not in _CHANGES:
            return False
        path = arguments[0]
        if not isinstance(path, (str, os.PathLike)) or not os.path.abspath(path).startswith(
            str(self.folder)
        ):
            return False
        return event != "open" or bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))

    def count(self, call: Call) -> int:
        """Run a call that succeeds; returns the number of its changes."""
        self._number, self._count, self._act = -1, 0, lambda *_: None
        call()
        self._act = None
        return self._count

    def interrupted(self, call: Call, number: int, other: Call) -> tuple[str, str]:
        """Run a call, and the other right before its change `number`; returns their errors, empty
        for success.
        """
        errors = ["", ""]
        self._number, self._count = number, 0

        def act(*_: object) -> None:
            errors[1] = error_of(other)

        self._act = act
        errors[0] = error_of(call)
        self._act = None
        return errors[0], errors[1]

    def killed(self, call: Call, number: int) -> None:
        """Run a call, killed right before its change `number`; a file that it opens for
        writing is empty.
        """
        self._number, self._count = number, 0
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == _KILLED, "it ended before it was killed"
            return

        def act(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open":
                os.close(os.open(arguments[0], arguments[2] & ~os.O_EXCL, 0o644))
            os._exit(_KILLED)

        self._act = act
        call()
        os._exit(0)


def error_of(call: Call) -> str:
    """The sentence that a call ends with; empty if it succeeds."""
    try:
        call()
    except SmtrainError as error:
        return str(error)
    return ""


def in_fork(folder: Path, check: Callable[[Moments], None]) -> None:
    """Run a check in a fork; its failure is this test's."""
    report = folder.with_name(f"{folder.name}.failed")
    child = os.fork()
    if child == 0:
        try:
            moments = Moments(folder)
            sys.addaudithook(moments)
            check(moments)
            os._exit(0)
        except BaseException:
            report.write_text(traceback.format_exc())
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        pytest.fail(report.read_text() if report.exists() else f"the fork ended with {status}")


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder that are not hidden, with their bytes."""
    below = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path.read_bytes()
        for name, path in below.items()
        if not any(part.startswith(".") for part in name.parts)
    }
