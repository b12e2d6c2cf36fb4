"""Reading from a store that fails: the bytes are right, what is refused is said at once, the rest
is tried again.
"""

from __future__ import annotations

import errno
import os
import random
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from smtrain.worker.data.load.verify_on_read import OpenFiles
from smtrain.worker.data.read import sources
from smtrain.worker.data.read.sources import SourceFile, find_files
from smtrain.worker.data.read.split_files import cut_file
from smtrain.worker.object_store import WAITS, StorageError, explain, open_file, retry
from tests.worker.data.tiny_s3 import tiny_s3

BUSY = "AWS Error UNKNOWN (HTTP status 503) during GetObject operation"


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


class Failing:
    """A file system whose calls fail now and then, before and while a file is read."""

    def __init__(self, draw: random.Random, share: float) -> None:
        self._inner, self._draw, self._share, self.failures = fs.LocalFileSystem(), draw, share, 0

    def fail(self) -> None:
        if self._draw.random() < self._share:
            self.failures += 1
            raise OSError(
                self._draw.choice(
                    [BUSY, "Failed to flush response stream", "AWS Error SLOW_DOWN during x"]
                )
            )

    def open_input_file(self, path: str) -> Any:
        self.fail()
        outer, file = self, self._inner.open_input_file(path)

        class File:
            size = file.size

            def read_at(self, count: int, at: int) -> bytes:
                outer.fail()
                return bytes(file.read_at(count, at))

        return File()


@settings(deadline=None)
@given(
    st.binary(max_size=300),
    st.lists(st.tuples(st.integers(0, 320), st.integers(0, 90)), max_size=8),
    st.integers(),
)
def test_reads_are_those_of_the_file_whatever_fails(
    content: bytes, reads: list[tuple[int, int]], seed: int
) -> None:
    failing = Failing(random.Random(seed), 0.3)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr("time.sleep", lambda _: None)
        path = Path(folder) / "a"
        path.write_bytes(content)
        with open_file(failing, str(path), str(path)) as file:
            assert file.size() == len(content)
            for at, count in reads:
                file.seek(at)
                assert bytes(file.read(count)) == content[at : at + count]
                assert file.tell() == min(at + count, max(at, len(content)))
            file.seek(0)
            assert bytes(file.read()) == content


def test_a_table_is_read_under_failures(tmp_path: Path) -> None:
    table = pa.table({"text": [f"the words of {number}" for number in range(5000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=500)
    failing = Failing(random.Random(1), 0.3)
    assert pq.read_table(open_file(failing, str(tmp_path / "a.parquet"), "a")).equals(table)
    assert failing.failures


REFUSALS = [
    OSError(f"AWS Error {code} during GetObject operation")
    for code in ("ACCESS_DENIED", "NO_SUCH_BUCKET")
]


@pytest.mark.parametrize("error", [FileNotFoundError("no"), PermissionError("no"), *REFUSALS])
def test_a_refusal_is_not_tried_again(error: OSError, waits: list[float]) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)):
        retry(call)
    assert waits == []


def test_a_store_that_does_not_recover_is_given_up_after_a_minute(waits: list[float]) -> None:
    def call() -> None:
        raise OSError(BUSY)

    with pytest.raises(OSError, match="503"):
        retry(call)
    assert len(waits) == len(WAITS)
    assert all(wait / 2 <= waited <= wait for wait, waited in zip(WAITS, waits, strict=True))


class Channel:
    """A file system whose first reads fail as those of a mount that has ended."""

    def __init__(self, fails: int) -> None:
        self._inner, self._fails = fs.LocalFileSystem(), fails

    def open_input_file(self, path: str) -> Any:
        outer, file = self, self._inner.open_input_file(path)

        class File:
            size = file.size

            def read_at(self, count: int, at: int) -> bytes:
                outer._fails -= 1
                if outer._fails >= 0:
                    raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
                return bytes(file.read_at(count, at))

        return File()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_mounted_file_is_read_again_and_named_when_it_stays_away(
    kind: str, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"a.{kind}"
    (
        pq.write_table(pa.table({"text": ["some words"]}), path)
        if kind == "parquet"
        else path.write_text('{"text": "a"}')
    )
    file = SourceFile(str(path), path.name, kind, path.stat().st_size)
    monkeypatch.setattr(sources, "is_remote", lambda path: True)
    channels = [Channel(3), Channel(99)]
    monkeypatch.setattr(fs, "LocalFileSystem", lambda: channels[0])
    assert len(list(cut_file(file))) == 1
    assert len(waits) == 3
    del channels[0]
    with pytest.raises(
        StorageError, match=rf"{path} cannot be read: .*not connected; see that its disk or channel"
    ):
        list(cut_file(file))


@pytest.mark.parametrize("fails", [2, 99])
def test_training_reads_a_channel_again_and_opens_it_again(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left, read = tmp_path / "tokens.bin", iter(range(fails)), os.pread
    path.write_bytes(b"the words")

    def pread(file: int, count: int, start: int) -> bytes:
        if next(left, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, count, start)

    monkeypatch.setattr("os.pread", pread)
    files = OpenFiles([path])
    path.replace(tmp_path / "before")
    path.write_bytes(b"of others")  # another file of this name, as after a mount that has ended
    with pytest.raises(OSError, match="Input/output") if fails > len(WAITS) else nullcontext():
        assert files.read(0, 5, 1) == b"f oth"
    files.close()


def test_a_file_that_only_tells_what_others_are_is_not_taken_for_empty(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_s3(monkeypatch.setenv) as store:
        store.objects |= {
            f"in/{name}": b'{"text": "a"}\n' * 2 for name in ("state.json", "a.json", "b.arrow")
        }
        heads = iter(
            [None, None]
        )  # the answers to small reads are cut, so only a second HEAD tells why they fail
        store.fault = lambda operation: (
            next(heads, "expired")
            if operation == "HeadObject"
            else "expired"
            if operation == "GetObject"
            else None
        )
        with pytest.raises(StorageError, match="may have expired"):
            find_files("s3://b/in")
        store.fault = lambda operation: None
        assert [file.name for file in find_files("s3://b/in")] == ["a.json", "b.arrow"]
    assert len(waits) == 1


@pytest.mark.parametrize("status", [500, 503])
def test_an_answer_without_a_name_is_explained_by_its_status(status: int) -> None:
    busy = OSError(
        f"AWS Error UNKNOWN (HTTP status {status}) during HeadObject operation: No response body."
    )
    assert explain(busy) == f"S3 answered HeadObject with HTTP {status}; try again in a minute"
    assert "may have expired" in explain(OSError(str(busy).replace(str(status), "400")))
