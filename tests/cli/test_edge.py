"""Readers that go away, full disks and missing packages end in a sentence each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.cli.dispatch import run_guarded

SMTRAIN = [sys.executable, "-c", "from smtrain.cli import main; main()"]


@pytest.mark.parametrize("command", [["--help"], ["help", "slurm"]])
def test_a_reader_that_goes_away_ends_it_in_silence(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*SMTRAIN, *command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.returncode in (0, 1)  # click's own word for it is 1
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["--help"], ["help", "slurm"]])
def test_a_full_disk_below_the_output_is_said(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*SMTRAIN, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert "no space left on device" in done.stderr.lower()
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            "/x/y: no space left on device; free space there",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "no space left on device; free space on the disks of SMTRAIN_HOME (",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/x"),
            "/x: read-only file system; choose a folder",
        ),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", "/x"),
            "/x: is a directory; name another",
        ),
        (
            ModuleNotFoundError("no", name="moto.server"),
            "the package moto, which is not installed; run `pip install ",
        ),
        (ModuleNotFoundError("no", name="unheard_of"), "`pip install unheard_of`"),
    ],
)
def test_errors_of_the_system_are_one_sentence(
    error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        raise error

    assert run_guarded(command) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_fault_of_ours_is_a_traceback() -> None:
    def command() -> None:
        raise ModuleNotFoundError("no", name="smtrain.nowhere")

    with pytest.raises(ModuleNotFoundError):
        run_guarded(command)
