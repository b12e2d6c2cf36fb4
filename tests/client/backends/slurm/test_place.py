"""A job's failure message is read from the shared folder; a pipe or folder in its place is skipped."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from smtrain.client.backends.slurm.place import _ROW


def said(job: Path) -> bytes:
    return subprocess.run(["bash", "-c", _ROW], cwd=job, capture_output=True, timeout=60, check=True).stdout


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "nodes/algo-1/output").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/algo-1.log").write_text("2026-11-25T10:00:00Z first\n2026-11-25T10:00:01Z the last line\n")
    return tmp_path


def test_its_own_words_come_first_and_never_with_what_stands_between_answers(job: Path) -> None:
    assert said(job) == b"the last line\n"
    (job / "nodes/algo-1/output/failure").write_bytes(b"why\0 it failed" + bytes(5000))
    assert said(job) == b"why it failed"


@pytest.mark.parametrize("what", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(job: Path, what: object) -> None:
    assert callable(what)
    what(job / "nodes/algo-1/output/failure")
    assert said(job) == b"the last line\n"


def test_a_line_of_any_length_is_cut(job: Path) -> None:
    (job / "logs/algo-1.log").write_text("2026-11-25T10:00:00Z " + "x" * 1_000_000 + "\n")
    assert said(job) == b"x" * 4096
