"""Room on the disk of SMTRAIN_HOME: whether there is any, and a reserve for what must be written on a full one.

A job that ended is ended and an object that was deleted is gone, also where the disk is full: the records of both are
small, and a file of a few megabytes is kept to make way for them.
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


def place(folder: Path) -> str:
    """How sentences name the disk of the control plane."""
    return f"{folder} (SMTRAIN_HOME)"


def reserve_in(state: Path) -> None:
    """Keep the reserve in this folder from now on."""
    global _reserve
    _reserve = state / "reserve"
    make_way(_reserve)
    _fill()


def insist(action: Callable[[], T]) -> T:
    """Do what must be done on a full disk as well: tried once more without the reserve."""
    try:
        return action()
    except Exception as error:
        # SQLite says "disk I/O error" where it has no room for its shared memory.
        if disk_number(error) not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or not _give_up():
            raise
        return action()


def probe(state: Path) -> None:
    """Raise OSError where this disk takes nothing more, so that nothing new is begun; make the reserve again."""
    try_writing(state)
    _fill()


def sentence(error: BaseException, state: Path) -> str | None:
    """A sentence about a disk that takes no more, or may not be written; None for any other error."""
    number = disk_number(error)
    if number is None:
        return _forbidden(error, state.parent)
    if isinstance(error, sqlite3.Error):
        try:
            probe(state)
        except OSError as plainer:
            if told := _forbidden(plainer, state.parent):
                return told
            number = plainer.errno if disk_number(plainer) else number
    told = disk_sentence(OSError(number, ""), place(state.parent)) or ""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return told.replace(": free some", ": free some (`smtrain local clean` says what can go)", 1)
    return told


def _forbidden(error: BaseException, home: Path) -> str | None:
    """A sentence about a file of the home that this user may not touch; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM):
        return None
    for name in (error.filename, error.filename2):
        if isinstance(name, str) and Path(name).is_relative_to(home):
            return (
                f"{name} may not be written by this user: make everything in {home} (SMTRAIN_HOME) yours "
                "(`chown -R`, `chattr -R -i`), or set SMTRAIN_HOME to another folder"
            )
    return None


def _fill() -> None:
    """Make the reserve again where there is plenty of room for it."""
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
    """Free the reserve; False where there is none."""
    with _lock:
        try:
            if _reserve is None:
                return False
            _reserve.unlink()
        except OSError:
            return False
        return True
