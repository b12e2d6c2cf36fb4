"""A stage that fails ends: one sentence in output/failure, a traceback in the log, and no secret in
either.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.nthwrite import ALWAYS, FailingDisk
from tests.worker.train.test_shell import REPO

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz" + "AbCdEfGh"
STAGE = """
from smtrain.worker.entry import main

def stage(config, container):
    raise {error}("the hub said no to {token}")

main(stage)
"""


def failed(root: Path, error: str) -> tuple[str, str]:
    """What a stage that raises `error` leaves in its log and in output/failure."""
    channel = root / "input/data/config"
    channel.mkdir(parents=True)
    (channel / "config.json").write_text('{"model": {"path": "hf://org/model"}}')
    script = root / "stage.py"
    script.write_text(
        "from smtrain.core.errors import SmtrainError\n" + STAGE.format(error=error, token=TOKEN)
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"SMTRAIN_ML_ROOT": str(root), "PYTHONPATH": str(REPO), "RANK": "3"},
    )
    assert done.returncode == 1
    return done.stderr, (root / "output/failure").read_text()


def test_a_defect_shows_its_traceback_and_no_secret(tmp_path: Path) -> None:
    log, failure = failed(tmp_path, "KeyError")
    assert "[rank3]: Traceback (most recent call last)" in log
    assert failure.startswith("algo-1, rank 3: KeyError: 'the hub said no to <hidden")
    assert "in stage" in log
    assert TOKEN not in log, "also not in the lines of source that a traceback shows"
    assert TOKEN not in failure


def test_a_sentence_of_ours_has_no_traceback_and_no_secret(tmp_path: Path) -> None:
    log, failure = failed(tmp_path, "SmtrainError")
    assert log == f"{failure}\n"
    assert failure == "algo-1, rank 3: the hub said no to <hidden: looks like a secret>"


FULL_PIPE = """
import os
fd = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK)
try:
    while True:
        os.write(fd, b"x" * 4096)
except BlockingIOError:
    pass
"""
STALLED = """
import time
from smtrain.worker.train import health
from smtrain.worker.output import fail
from smtrain.core.protocol.container import Container

container = Container.from_files()
watch = health.StallWatch(0.5 / 60, lambda message: fail(container, message))
watch.beat("step 3")
{meanwhile}
"""
STUCK = """
health.AFTER_SECONDS = 0.5
health.StallWatch._run = lambda self: None  # as if the interpreter were stuck too
watch = health.StallWatch(0.5 / 60, print)
watch.beat("step 4")
time.sleep(300)
"""
FAILED = """
from smtrain.worker.entry import main

def stage(config, container):
    raise KeyError("what it was")

main(stage)
"""


def ended(tmp_path: Path, program: str, **environment: str) -> tuple[int, Path]:
    """Exit status of a program whose standard error is a full pipe, and its /opt/ml."""
    root = tmp_path / "ml"
    (root / "input/data/config").mkdir(parents=True, exist_ok=True)
    (root / "input/data/config/config.json").write_text('{"model": {"path": "hf://org/model"}}')
    reader, writer = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", FULL_PIPE + program],
            stderr=writer,
            timeout=100,
            check=False,
            env={"SMTRAIN_ML_ROOT": str(root), "PYTHONPATH": str(REPO), "RANK": "0", **environment},
        )
    finally:
        os.close(reader)
        os.close(writer)
    return done.returncode, root


@pytest.mark.slow
@pytest.mark.parametrize(
    "meanwhile",
    [pytest.param("time.sleep(300)", marks=pytest.mark.full), "os.write(2, b'a step')", STUCK],
)
def test_a_stall_ends_even_if_the_log_is_not_read(tmp_path: Path, meanwhile: str) -> None:
    status, root = ended(tmp_path, STALLED.format(meanwhile=meanwhile))
    assert status == 1
    if meanwhile is not STUCK:
        assert "train.stall_minutes: nothing was done for" in (root / "output/failure").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.full)])
def test_a_failure_ends_the_process_even_if_log_and_disk_refuse_it(
    tmp_path: Path, error: int
) -> None:
    disk = FailingDisk(tmp_path / "shim", [tmp_path / "ml"])
    disk.fail(error, 1, ALWAYS)
    status, root = ended(tmp_path, FAILED, **disk.environment())
    assert status == 1
    assert disk.failed, "the report was tried"
    assert not (root / "output/failure").exists()


def test_a_full_disk_leaves_the_cause_as_the_last_line(tmp_path: Path) -> None:
    root = tmp_path / "ml"
    (root / "input/data/config").mkdir(parents=True)
    (root / "input/data/config/config.json").write_text('{"model": {"path": "hf://org/model"}}')
    disk = FailingDisk(tmp_path / "shim", [root])
    disk.fail(errno.ENOSPC, 2, ALWAYS)  # the file is made, nothing goes into it
    done = subprocess.run(
        [sys.executable, "-c", FAILED],
        capture_output=True,
        text=True,
        check=False,
        env={
            "SMTRAIN_ML_ROOT": str(root),
            "PYTHONPATH": str(REPO),
            "RANK": "0",
            **disk.environment(),
        },
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "algo-1, rank 0: KeyError: 'what it was'"
    assert not (root / "output/failure").exists(), "an empty one would hide that line"
