"""Reserve the blocks of a file before it is written."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache
from typing import Any


def reserve(handle: int, size: int) -> None:
    """Give an open file at least `size` bytes; those that it has not yet are zeros.

    Writes into reserved blocks take half the time on ext4, and a disk without space fails now and
    not after hours. A file system that cannot reserve leaves the file as it is. Raises OSError if
    the disk is full.
    """
    # Not `os.posix_fallocate`: on a file system without it, it writes into every block.
    if (fallocate := _fallocate()) is None or not size:
        return
    if fallocate(handle, 0, 0, size) and (code := ctypes.get_errno()) in _FULL:
        raise OSError(code, os.strerror(code))


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@lru_cache(1)
def _fallocate() -> Any:
    """Linux's fallocate(2), which `os` lacks; None on other systems."""
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function
