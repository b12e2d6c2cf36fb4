"""A stream's lines on disk are read as they were written, from any place and in both directions."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.plane.server import logfile
from smtrain.plane.server.logfile import LogFile
from tests import tiers

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
BATCHES = st.lists(
    st.tuples(st.integers(0, 5), st.lists(TEXT, min_size=1, max_size=5)), min_size=1, max_size=12
)


def written(log: LogFile, batches: list[tuple[int, list[str]]]) -> list[tuple[int, int, str]]:
    """Append the batches, each so many ms after the last one; return the expected lines."""
    stamp, expected = 1_000, list[tuple[int, int, str]]()
    for later, texts in batches:
        stamp += later
        log.append([(stamp, text) for text in texts])
        expected += [(len(expected) + i, stamp, text) for i, text in enumerate(texts)]
    return expected


@settings(max_examples=tiers.examples(100), deadline=None)
@given(batches=BATCHES, block=st.sampled_from([1, 100, 1 << 16]), on_disk=st.booleans())
def test_lines_come_back_from_every_place(
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[tuple[int, list[str]]],
    block: int,
    on_disk: bool,
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfile, "BLOCK_BYTES", block)
        log = LogFile(path if on_disk else None)
        expected = written(log, batches)
        for closed in (False, True):
            for number in range(len(expected) + 1):
                assert [tuple(line) for line in log.lines(number)] == expected[number:]
                assert [tuple(line) for line in log.lines_before(number)] == expected[:number][::-1]
            for stamp in {line[1] + more for line in expected for more in (-1, 0, 1)}:
                assert log.number_at(stamp) == sum(line[1] < stamp for line in expected)
            if not closed:
                log.close()
        if on_disk:
            again, places = LogFile.load(path)
            assert [pair for batch in places for pair in batch] == [line[1:] for line in expected]
            assert [tuple(line) for line in again.lines()] == expected
            assert (again.count, again.first, again.stamp) == (log.count, log.first, log.stamp)


def test_rows_that_are_not_ours_are_left_out_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(
        b'[1000, "one"]\n'
        + deep
        + b'\n[1e300, "x"]\n\xff\n["x", 1]\n[2000, "lone \\ud800"]\n[1500, "back"]\n'
        + b"x" * (logfile.ROW_BYTES * 2)
        + b'\n[3000, "last"]\n[4000, "cut'
    )
    log, places = LogFile.load(path)
    list(places)
    assert [(line.stamp, line.text) for line in log.lines()] == [
        (1000, "one"),
        (2000, "lone ?"),
        (2000, "back"),
        (3000, "last"),
    ]
    output = capsys.readouterr().out
    assert [n for n in range(1, 12) if f"line {n} of {path} is damaged" in output] == [
        2,
        3,
        4,
        5,
        8,
    ]


def test_a_full_disk_is_told_once_and_its_lines_are_read_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[OSError] = []
    log = LogFile(tmp_path / "a.jsonl", errors.append)
    log.append([(1, "on the disk")])
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 5:
            return real(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    log.append([(2, "half")])
    log.append([(3, "none")])
    assert len(errors) == 1
    assert [line.text for line in log.lines()] == ["on the disk", "half", "none"]
    log.close()
    assert [line.text for line in log.lines()] == ["on the disk", "half", "none"]


def test_memory_is_that_of_a_block(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.jsonl")
    for n in range(200):
        log.append([(n, "x" * 100)] * 100)
    assert len(log._newest) * 100 < 2 * logfile.BLOCK_BYTES
    assert len(log._blocks) < 60
    assert sum(1 for _ in log.lines()) == 20_000
