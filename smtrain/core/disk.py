"""What a disk that takes no more says: one sentence with the place and the remedy."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

_SAYS = {
    errno.ENOSPC: "no space left on {place}: free some, and the same command goes on",
    errno.EDQUOT: "the disk quota is used up at {place}: free some, and the same command goes on",
    errno.EROFS: "{place} is read-only: make it writable, and the same command goes on",
    errno.EIO: "input/output error on {place}: look at the disk (`dmesg`), and the same command goes on",
}
# How libraries that do not raise OSError (SQLite, Rust, C++) spell the same.
_SPELLED = (
    (re.compile(r"no space left|os error 28\b|database or disk is full", re.I), errno.ENOSPC),
    (re.compile(r"disk quota exceeded|os error 122\b", re.I), errno.EDQUOT),
    (re.compile(r"read-?only (file system|database)|os error 30\b", re.I), errno.EROFS),
    (re.compile(r"input/output error|disk i/o error|unable to open database|os error 5\b", re.I), errno.EIO),
)
_PROBE_BYTES = 1 << 16


def probe(folder: Path) -> None:
    """Raise OSError where the disk of this folder takes nothing more."""
    file = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    try:
        with open(file, "wb", buffering=0) as handle:
            if handle.write(bytes(_PROBE_BYTES)) < _PROBE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle.fileno())
    finally:
        file.unlink(missing_ok=True)


def disk_number(error: BaseException) -> int | None:
    """The errno of a disk that is full, over its quota, read-only or failing, wherever it stands; None for others."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _SAYS:
            return cause.errno
        if not isinstance(cause, OSError) or cause.errno is None:
            for pattern, number in _SPELLED:
                if pattern.search(str(cause)):
                    return number
    return None


def disk_sentence(error: BaseException, place: str | Path | None = None) -> str | None:
    """What to tell the user about a disk that takes no more; None for any other error.

    `place` is used where the error names no file of its own.
    """
    number = disk_number(error)
    if number is None:
        return None
    named = (str(e.filename) for e in _causes(error) if isinstance(e, OSError) and isinstance(e.filename, str))
    return _SAYS[number].format(place=next(named, None) or place or "the disk")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
