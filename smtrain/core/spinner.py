"""Show what a command is doing after half a second without output, at a terminal only.

`say` (smtrain/core/text.py) counts as output. Files, pipes and notebooks get nothing from here; in
a pipe a command that takes seconds begins with a line (smtrain/core/work.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SILENT_S = 0.5
"""Longest silence, in seconds."""
_EVERY_S = 0.5
"""Seconds between two updates of the line."""
_SHOWN_S = 2.0
"""Seconds after which the line shows how long the task has taken."""


@dataclass
class _Task:
    """A task, shown in an updated line; or with `keep_line`, in a line that stays."""

    message: str | Callable[[], str]
    keep_line: bool
    began: float
    is_visible: bool = False

    def line(self) -> str:
        text = self.message if isinstance(self.message, str) else self.message()
        seconds = time.monotonic() - self.began
        return text if self.keep_line or seconds < _SHOWN_S else f"{text}, {seconds:.0f} s"


_tasks: list[_Task] = []
_lock = threading.RLock()
_last_word = time.monotonic()
_line_visible = False
"""Whether the line is on the terminal."""
_last_drawn = 0.0
_watching = False


@contextmanager
def spinner(message: str | Callable[[], str], *, keep_line: bool = False) -> Iterator[None]:
    """Show `message` after half a second of silence in the block, until the next output or the end
    of the block.

    `message` may be a function, for a line that changes. `keep_line`: one line that stays, only if
    nothing was said before; it may enclose output that does not go through `say`, such as a live
    panel.
    """
    if not _is_terminal():
        yield
        return
    task = _Task(message, keep_line, time.monotonic())
    with _lock:
        _tasks.append(task)
        _watch()
    try:
        yield
    finally:
        with _lock:
            _tasks.remove(task)
            _wipe()


def word() -> None:
    """Remove the line, as other output follows."""
    global _last_word
    if not _tasks:
        return
    with _lock:
        _last_word = time.monotonic()
        _clear_line()


def _is_terminal() -> bool:
    """Whether a person reads standard error."""
    return (
        sys.stderr is not None
        and sys.stderr.isatty()
        and threading.current_thread() is threading.main_thread()
    )


def _watch() -> None:
    global _watching
    if not _watching:
        _watching = True
        threading.Thread(target=_look, name="doing", daemon=True).start()


def _look() -> None:
    global _watching
    while True:
        time.sleep(0.1)
        with _lock:
            if not _tasks:
                _watching = False
                return
            task, now = _tasks[-1], time.monotonic()
            quiet = now - max(_last_word, task.began) if not _line_visible else now - _last_drawn
            if quiet >= (_EVERY_S if _line_visible else SILENT_S) and not task.is_visible:
                _draw(task)


def _draw(task: _Task) -> None:
    global _line_visible, _last_drawn
    _clear_line()
    columns = shutil.get_terminal_size().columns or 80
    if task.keep_line or os.environ.get("TERM") in ("dumb", "unknown"):
        task.is_visible = True
        sys.stderr.write(task.line() + "\n")
    else:
        sys.stderr.write(task.line()[: columns - 1])
        _line_visible, _last_drawn = True, time.monotonic()
    sys.stderr.flush()


def _clear_line() -> None:
    """Remove the line, and drop the tasks that are shown only before any output."""
    for task in _tasks:
        task.is_visible = task.is_visible or task.keep_line
    _wipe()


def _wipe() -> None:
    global _line_visible
    if _line_visible:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
        _line_visible = False
