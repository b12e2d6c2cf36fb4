"""A reserve on the disk of SMTRAIN_HOME for what must be written even if the disk is full.

The end of a job and the deletion of an object must be recorded. Their records are small: a file of
a few megabytes is kept, and deleted to make room for them.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from smtrain.core.files import disk_number, disk_sentence
from smtrain.core.files import probe as try_writing
from smtrain.plane.files import make_way

T = TypeVar("T")
RESERVE_BYTES = 4 << 20
_lock = threading.Lock()
_reserve: Path | None = None


def reserve_in(state: Path) -> None:
    """Create the reserve in this folder."""
    global _reserve
    _reserve = state / "reserve"
    make_way(_reserve)
    _fill()


def retry_without_reserve(action: Callable[[], T]) -> T:
    """Do an action; if the disk is full, give up the reserve and try again."""
    try:
        return action()
    except Exception as error:
        # SQLite says "disk I/O error" if it has no room for its shared memory.
        if disk_number(error) not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or not _give_up():
            raise
        return action()


def probe(state: Path) -> None:
    """Raise OSError if the disk is full, before anything new is begun; else refill the reserve."""
    try_writing(state)
    _fill()


def sentence(error: BaseException, state: Path) -> str | None:
    """A sentence about a full, failing or read-only disk; None for any other error."""
    number = disk_number(error)
    if number is None:
        return _permission_sentence(error, state.parent)
    if isinstance(error, sqlite3.Error):
        try:
            probe(state)
        except OSError as plainer:
            if text := _permission_sentence(plainer, state.parent):
                return text
            number = plainer.errno if disk_number(plainer) else number
    text = disk_sentence(OSError(number, ""), f"{state.parent} (SMTRAIN_HOME)") or ""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return text.replace(
            ": free some", ": free some (`smtrain local clean` says what can go)", 1
        )
    return text


def _permission_sentence(error: BaseException, home: Path) -> str | None:
    """A sentence about a file of the home that this user may not touch; None for any other
    error.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM):
        return None
    for name in (error.filename, error.filename2):
        if isinstance(name, str) and Path(name).is_relative_to(home):
            return (
                f"{name} may not be written by this user: make everything in {home} (SMTRAIN_HOME)"
                " yours (`chown -R`, `chattr -R -i`), or set SMTRAIN_HOME to another folder"
            )
    return None


def _fill() -> None:
    """Create or refill the reserve, as far as there is plenty of room."""
    with _lock:
        if _reserve is None:
            return
        try:
            if _reserve.exists() and _reserve.stat().st_size:
                return
            size = min(RESERVE_BYTES, shutil.disk_usage(_reserve.parent).free // 8)
            with open(_reserve, "wb") as handle:
                handle.write(bytes(size))
        except OSError:
            _reserve.unlink(missing_ok=True)


def _give_up() -> bool:
    """Delete the reserve; False if it does not exist."""
    with _lock:
        try:
            if _reserve is None:
                return False
            _reserve.unlink()
        except OSError:
            return False
        return True
