"""Reserving the blocks of a file before it is written."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from smtrain.worker.checkpoint import reserving


def fail_with(code: int) -> Any:
    def fallocate(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    return lambda: fallocate


def test_a_file_grows_and_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with open(tmp_path / "x", "r+b") as file:
        reserving.reserve(file.fileno(), 5000)
        reserving.reserve(file.fileno(), 10)
        reserving.reserve(file.fileno(), 0)
    content = (tmp_path / "x").read_bytes()
    # Without fallocate(2) the file stays as it was.
    assert content in (b"abc", b"abc" + bytes(4997))
    assert len(content) == 5000 or reserving._fallocate() is None


def test_a_full_disk_is_an_error_and_a_file_system_without_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    try:
        for code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            monkeypatch.setattr(reserving, "_fallocate", fail_with(code))
            reserving.reserve(handle, 10)
        for code in (errno.ENOSPC, errno.EDQUOT):
            monkeypatch.setattr(reserving, "_fallocate", fail_with(code))
            with pytest.raises(OSError, match=os.strerror(code)):
                reserving.reserve(handle, 10)
    finally:
        os.close(handle)
    assert os.stat(tmp_path / "x").st_size == 0
