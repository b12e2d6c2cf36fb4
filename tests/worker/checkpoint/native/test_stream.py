"""Files that are hashed, flushed and read back while they are written."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.worker.checkpoint.dtypes import FP32
from smtrain.worker.checkpoint.native import files, stream
from smtrain.worker.checkpoint.native.files import write_stream
from smtrain.worker.checkpoint.native.stream import LostBytesError, StreamedFile
from smtrain.worker.checkpoint.tensor_files import Tensor


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Blocks and segments of a few bytes, so that small files have many."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "BLOCK", 5)
        patched.setattr(stream, "SEGMENT", 12)
        patched.setattr(files, "BLOCK", 8)
        yield


@given(st.lists(st.binary(max_size=30), max_size=8), st.booleans())
def test_sums_are_those_of_the_bytes_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], read_back: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "streamed"
    with StreamedFile(path, read_back) as file:
        for block in blocks:
            file.write(block)
        about = file.finish()
    content = b"".join(blocks)
    assert path.read_bytes() == content
    assert about == {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "crc32": zlib.crc32(content),
    }


def flip(descriptor: int, at: int) -> None:
    with open(os.readlink(f"/proc/self/fd/{descriptor}"), "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [0, 39], ids=["first", "last"])
def test_a_byte_that_the_disk_changes_is_seen_and_the_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    changed: list[int] = []

    def lossy(descriptor: int) -> None:
        if not changed and os.fstat(descriptor).st_size > at:
            flip(descriptor, at)
            changed.append(at)

    monkeypatch.setattr(stream, "_flush", lossy)
    write_stream(
        tmp_path / "unread",
        {"a": Tensor(FP32, (10,))},
        lambda name: [np.arange(10, dtype=np.uint32)],
    )
    changed.clear()
    with pytest.raises(LostBytesError):
        write_stream(
            tmp_path / "x",
            {"a": Tensor(FP32, (10,))},
            lambda name: [np.arange(10, dtype=np.uint32)],
            True,
        )
    assert changed
    assert [path.name for path in tmp_path.iterdir()] == ["unread"]


def test_an_error_of_a_flush_is_one_of_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        write_stream(
            tmp_path / "x",
            {"a": Tensor(FP32, (10,))},
            lambda name: [np.arange(10, dtype=np.uint32)],
        )
    assert not list(tmp_path.iterdir())


def test_the_next_segment_is_written_while_one_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushing, written = threading.Event(), threading.Event()

    def slow(descriptor: int) -> None:
        flushing.set()
        assert written.wait(60)

    monkeypatch.setattr(stream, "_flush", slow)
    with StreamedFile(tmp_path / "x", read_back=True) as file:
        file.write(bytes(12))
        assert flushing.wait(60)
        file.write(b"1" * 10)
        written.set()
        assert file.finish()["size"] == 22


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_piece_is_hashed_before_the_next_is_made_unless_all_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    free, crcs = threading.Event(), list[int]()
    real = vars(stream)["crc32"]

    def slow(block: bytes, crc: int) -> int:
        if len(block) == 8 and not in_memory:
            crcs.append(1)
        elif len(block) == 8:
            assert free.wait(60)
            crcs.append(1)
        return real(block, crc)

    def pieces(name: str) -> Iterator[np.ndarray]:
        yield np.arange(2, dtype=np.uint32)
        assert len(crcs) == (0 if in_memory else 1)
        free.set()
        yield np.arange(2, dtype=np.uint32)

    monkeypatch.setattr(stream, "crc32", slow)
    write_stream(tmp_path / "x", {"a": Tensor(FP32, (4,))}, pieces, in_memory=in_memory)
    assert len(crcs) == 2
