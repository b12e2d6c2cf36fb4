"""A job's failure message is read safely from the shared folder, and what a launch copied there is
compared.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from smtrain.client.backends.slurm import copying
from smtrain.client.backends.slurm.backend import _ROW
from smtrain.client.backends.slurm.remote_shell import Head


def said(job: Path) -> bytes:
    return subprocess.run(
        ["bash", "-c", _ROW], cwd=job, capture_output=True, timeout=60, check=True
    ).stdout


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "nodes/algo-1/output").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/algo-1.log").write_text(
        "2026-11-25T10:00:00Z first\n2026-11-25T10:00:01Z the last line\n"
    )
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


def test_a_changed_byte_on_the_shared_folder_is_copied_again(tmp_path: Path) -> None:
    """The file with it only: files with the same bytes are left as they are, whatever is in their
    names.
    """
    names = ["a", "b\\c", "line\nend", "deeper/-d"]
    source, shared = tmp_path / "here", tmp_path / "shared/inputs/text/0123"
    (source / "deeper").mkdir(parents=True)
    for number, name in enumerate(names):
        (source / name).write_bytes(bytes([number]) * 1000)
    files: list[tuple[str, Path | bytes]] = [
        *((name, source / name) for name in names),
        ("bundle.tar.gz", b"code"),
    ]
    said: list[str] = []
    copying.send(Head(), str(tmp_path / "shared"), str(shared), files, said.append)
    for name, _ in files:
        os.utime(shared / name, (1, 1))
    for name in ("line\nend", "bundle.tar.gz"):
        (shared / name).write_bytes(b"x" + (shared / name).read_bytes()[1:])
    copying.send(Head(), str(tmp_path / "shared"), str(shared), files, said.append)
    right = [body if isinstance(body, bytes) else body.read_bytes() for _, body in files]
    assert [(shared / name).read_bytes() for name, _ in files] == right
    assert [name for name, _ in files if (shared / name).stat().st_mtime != 1] == [
        "line\nend",
        "bundle.tar.gz",
    ]
