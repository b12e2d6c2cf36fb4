"""Reading from a store that fails: the bytes are right, what is refused is said at once, the rest is tried again."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import fs

from smtrain.worker.data.read.object_store import WAITS, open_file, retry

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
            raise OSError(self._draw.choice([BUSY, "Failed to flush response stream", "AWS Error SLOW_DOWN during x"]))

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
@given(st.binary(max_size=300), st.lists(st.tuples(st.integers(0, 320), st.integers(0, 90)), max_size=8), st.integers())
def test_reads_are_those_of_the_file_whatever_fails(content: bytes, reads: list[tuple[int, int]], seed: int) -> None:
    failing = Failing(random.Random(seed), 0.3)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr("time.sleep", lambda _: None)
        path = Path(folder) / "a"
        path.write_bytes(content)
        with open_file(failing, str(path)) as file:
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
    assert pq.read_table(open_file(failing, str(tmp_path / "a.parquet"))).equals(table)
    assert failing.failures


REFUSALS = [OSError(f"AWS Error {code} during GetObject operation") for code in ("ACCESS_DENIED", "NO_SUCH_BUCKET")]


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
