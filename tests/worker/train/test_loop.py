"""The loop around a real engine: the time at which a step's numbers are read, and an early stop."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.config import JobConfig
from smtrain.core.errors import SmtrainError
from tests.worker.engine import cases
from tests.worker.engine.world import World

MORE = 2**31 - 1  # rounds of a function that lets no signal handler run until it ends: many minutes


class Batches:
    """The loader's part of a tiny run."""

    waited = 0.0
    padding = None

    def batch(self, samples_consumed: int) -> Any:
        return cases.batch(cases.CONFIGS["llama"], samples_consumed // cases.BATCH)


class StubPosition:
    """Makes a small state for checkpoints."""

    def at(self, step: int, samples: int, losses: Any, proven: bool = True) -> dict[str, Any]:
        return {"samples": samples, "losses": len(losses)}


class Late:
    """The native engine with numbers that come a step late; records its calls, and can spoil a
    step.
    """

    steps_ahead = 1

    def __init__(self, engine: Any, spoilt: int | None, overflows: Collection[int] = ()) -> None:
        self._engine, self._spoilt, self._overflows, self._begun = engine, spoilt, overflows, 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin_step(self, *args: Any) -> Any:
        self._begun += 1
        number = self._begun
        self.calls.append(f"begin {number}")
        if number == self._spoilt:
            self._engine.optimizer.dense.master[0] = math.nan
            self._engine.optimizer.dense.publish()
        with (
            cases.overflowing(self._engine)
            if number in self._overflows
            else contextlib.nullcontext()
        ):
            numbers = self._engine.begin_step(*args)

        def read() -> Any:
            self.calls.append(f"read {number}")
            return numbers()

        return read

    def begin_save(
        self, folder: Path, step: int, state: dict[str, Any], read_back: bool = True
    ) -> None:
        self.calls.append(f"save {step}")
        self._engine.begin_save(folder, step, state, read_back)

    def end_save(self, wait: bool = True) -> int | None:
        whole: int | None = self._engine.end_save(wait=True)  # the disk is as fast as can be
        if whole is not None:
            self.calls.append(f"whole {whole}")
        return whole


def go(
    rank: int, folder: Path, stopped: bool, spoilt: int | None, overflows: Collection[int] = ()
) -> tuple[list[str], Any, list[str]]:
    """Run the loop with a `Late` engine; returns its calls, the result or error, and the
    checkpoints left.
    """
    from smtrain.core.protocol.lineage import Lineage
    from smtrain.worker.train.health import LossWatch, StallWatch
    from smtrain.worker.train.loop import Trainer
    from smtrain.worker.train.stop import StopRequest

    options = {
        "steps": 5,
        "global_batch_size": cases.BATCH,
        "seq_len": cases.SEQ_LEN,
        "precision": "fp32",
    }
    config = JobConfig.model_validate(
        {"model": {"path": "s3://unused"}, "train": {**options, "save_interval": 3, "lr": 1e-3}}
    )
    precision = "fp16" if overflows else "fp32"
    engine = Late(
        cases.engine(cases.CONFIGS["llama"], cases.mesh(f"111 {precision}")), spoilt, overflows
    )
    stop = StopRequest()
    position: Any = StubPosition()
    if stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        stall = StallWatch(0, lambda _: None)
        trainer = Trainer(
            config, engine, Batches(), Lineage.of(folder, ""), position, stop, stall, LossWatch()
        )
        ended: Any = trainer.run()
    except SmtrainError as error:
        ended = str(error)
    return engine.calls, ended, sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def solo() -> Iterator[World]:
    world = World(1)
    yield world
    world.stop()


def test_numbers_are_read_a_step_late_and_all_of_them_before_a_save(
    solo: World, tmp_path: Path
) -> None:
    calls, ended, left = solo.run(go, tmp_path, False, None)[0]
    assert ended == 5
    assert calls == [
        "begin 1",
        "begin 2",
        "read 1",
        "begin 3",
        "read 2",
        "read 3",
        "save 3",
        "begin 4",
        "begin 5",
        "read 4",
        "whole 3",
        "read 5",
        "save 5",
        "begin 6",
        "read 6",
        "whole 5",
    ]
    assert left == ["step_00000003", "step_00000005"]


def test_a_save_whose_next_step_is_no_number_is_not_kept_however_late_that_is_seen(
    solo: World, tmp_path: Path
) -> None:
    calls, ended, left = solo.run(go, tmp_path, False, 4)[0]
    assert "loss nan" in ended
    assert "at step 4" in ended
    assert calls[-3:] == ["begin 4", "begin 5", "read 4"]
    assert "whole 3" not in calls
    assert left == []


def said_of_overflows(
    rank: int, folder: Path, overflows: Collection[int]
) -> tuple[str, tuple[list[str], Any, list[str]]]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        ended = go(rank, folder, False, None, overflows)
    return output.getvalue(), ended


def test_a_step_that_overflows_fp16_is_said_and_skipped_and_the_next_one_shows_the_save_before_it(
    solo: World, tmp_path: Path
) -> None:
    output, (calls, ended, left) = solo.run(said_of_overflows, tmp_path, [4])[0]
    assert "step 4 skipped: gradients overflowed fp16; loss scale 65536 -> 32768\n" in output
    assert output.count("skipped") == 1
    assert ended == 5
    assert left == ["step_00000003", "step_00000005"]
    assert calls.index("read 4") < calls.index("read 5") < calls.index("whole 3"), (
        "a skipped step shows nothing"
    )


def test_the_last_save_is_shown_by_a_step_that_is_not_skipped(solo: World, tmp_path: Path) -> None:
    _, (calls, ended, left) = solo.run(said_of_overflows, tmp_path, [6, 7])[0]
    assert (ended, left) == (5, ["step_00000003", "step_00000005"])
    assert calls[-7:] == ["begin 6", "read 6", "begin 7", "read 7", "begin 8", "read 8", "whole 5"]


def test_a_save_that_no_step_has_shown_gives_way_to_the_next_whose_weights_are_the_same(
    solo: World, tmp_path: Path
) -> None:
    _, (calls, ended, left) = solo.run(said_of_overflows, tmp_path, [4, 5])[0]
    assert (ended, left) == (5, ["step_00000005"])
    assert "whole 3" not in calls


def refused_here(rank: int) -> str:
    from smtrain.worker.train.engines import join

    config = JobConfig.model_validate(
        {"model": {"path": "s3://unused"}, "train": {"precision": "fp16"}}
    )
    try:
        join(config)
    except SmtrainError as error:
        return str(error)
    return "joined"


def test_fp16_is_refused_where_the_device_is_a_cpu(solo: World) -> None:
    assert (
        "train.precision: fp16 is for GPUs, and this machine has none" in solo.run(refused_here)[0]
    )


def test_a_stop_before_the_first_step_begins_none(solo: World, tmp_path: Path) -> None:
    assert solo.run(go, tmp_path, True, None)[0] == ([], 0, [])


STUCK = f"""
import hashlib, signal, sys
from smtrain.worker.train.stop import FirstStep
signal.signal(signal.SIGTERM, lambda *_: None)
first = FirstStep(grace=0.2)
if sys.argv[1] == "done":
    first.mark_done()
print("begun", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000 if sys.argv[1] == "done" else {MORE})
print("resumed", flush=True)
"""


@pytest.mark.parametrize("when", ["compiling", "done"])
def test_a_stop_during_the_first_step_does_not_wait_for_it(when: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, when],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "RANK": "0"},
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0
    if when == "done":
        assert said == "resumed\n"
    else:
        assert said.endswith("asked to stop before the first step was done: nothing to save\n")
        assert "resumed" not in said
