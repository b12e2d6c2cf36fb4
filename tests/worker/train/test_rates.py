"""The rates of steps whose numbers the host reads late: two of them at once before a save or a
validation.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.config import JobConfig
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.engine.base import StepResult
from smtrain.worker.engine.native.comm import Numbers
from smtrain.worker.train import loop, metrics, pending_steps
from smtrain.worker.train.health import LossWatch, StallWatch
from smtrain.worker.train.pending_steps import ready_time
from smtrain.worker.train.validation import ValidationResult

TOKENS = 8 * 16
COPY, JUDGED = 0.5, 3.0  # seconds of a save's copy, and of a validation


@dataclass
class Device:
    """A clock, and an engine whose steps take the host and the device so long; the loader of its
    batches.
    """

    launches: Sequence[float]
    works: Sequence[float]
    says: bool
    """Whether the engine knows when numbers were ready."""
    steps_ahead: int = 1
    now: float = 0.0
    done: list[float] = field(default_factory=lambda: [0.0])
    rank: int = 0
    waited: float = 0.0
    padding = None

    def begin_step(self, *args: Any) -> Callable[[], StepResult]:
        number = len(self.done) - 1
        begun = max(self.now, self.done[-1])
        self.now += self.launches[number % len(self.launches)]
        done = max(begun + self.works[number % len(self.works)], self.now)
        self.done.append(done)

        def numbers() -> StepResult:
            self.now = max(self.now, done) + 1e-6
            return StepResult(1.0, 1.0, ready=done if self.says else None)

        return numbers

    def begin_save(self, *args: Any) -> None:
        self.now += COPY

    def end_save(self, wait: bool) -> None:
        pass

    def prune(self, *args: Any) -> None:
        pass

    def is_any_set(self, flag: bool) -> bool:
        return False

    def batch(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.now += 0.01
        self.waited += 0.01
        return torch.zeros(8, 16), torch.zeros(8, 16)

    # A validator's part

    best = None
    retained_checkpoints: frozenset[str] = frozenset()

    def due(self, step: int) -> bool:
        return step % 4 == 0

    def checkpoint_state(self, *args: Any) -> None:
        pass

    def judge(self, *args: Any) -> ValidationResult:
        self.now += JUDGED
        return ValidationResult(1.0, 1, None, JUDGED)

    def at(self, *args: Any) -> dict[str, Any]:
        return {}


def records(
    device: Device, root: Path, *, steps: int, save: int, interval: int = 1, validates: bool = False
) -> Any:
    """Train by the real loop with the real log; returns the lines of metrics.jsonl."""
    folder = Path(tempfile.mkdtemp(dir=root))
    clock = SimpleNamespace(
        perf_counter=lambda: device.now, monotonic=lambda: device.now, time=lambda: device.now
    )
    options = {
        "steps": steps,
        "global_batch_size": 8,
        "seq_len": 16,
        "save_interval": save,
        "log_interval": interval,
    }
    config = JobConfig.model_validate({"model": {"path": "s3://unused"}, "train": options})
    stop: Any = SimpleNamespace(is_agreed=lambda engine: False)
    each: Any = device
    with pytest.MonkeyPatch.context() as patched:
        for module in (loop, metrics, pending_steps):
            patched.setattr(module, "time", clock)
        log = metrics.MetricsLog(
            folder,
            total_steps=steps,
            first_step=1,
            samples=0,
            seq_len=16,
            ramp=False,
            flops_per_token=1.0,
            peak=1.0,
        )
        loop.Trainer(
            config,
            each,
            each,
            Lineage.of(folder, ""),
            each,
            stop,
            StallWatch(0, lambda _: None),
            LossWatch(),
            log=log,
            validator=each if validates else None,
        ).run()
        log.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rates")


SECONDS = st.lists(st.floats(0.05, 2.0), min_size=1, max_size=4)


@given(SECONDS, SECONDS, st.integers(1, 6), st.integers(1, 3), st.booleans(), st.booleans())
def test_the_times_of_all_records_are_the_time_of_the_run(
    folder: Path,
    launches: list[float],
    works: list[float],
    save: int,
    interval: int,
    validates: bool,
    says: bool,
) -> None:
    device = Device(launches, works, says)
    took, last, validated = 0.0, 0, 0.0
    for line in records(device, folder, steps=9, save=save, interval=interval, validates=validates):
        if "tokens_per_s" in line:
            seconds = TOKENS * (line["step"] - last) / line["tokens_per_s"]
            assert seconds > 0
            if says:
                assert seconds == pytest.approx(
                    device.done[line["step"]] - device.done[last] - validated
                )
            took, last, validated = took + seconds + validated, line["step"], 0.0
        validated += JUDGED * ("val_loss" in line)
    assert last == 9
    assert took == pytest.approx(
        device.done[last], abs=1e-5 if says else 2 * pending_steps.MIN_WAIT
    )


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(("launch", "work"), [(0.84, 0.8), (0.1, 0.85)])
def test_steps_around_a_save_take_as_long_as_any_other(
    launch: float, work: float, says: bool, folder: Path
) -> None:
    """Before a save two steps are read at once, microseconds apart if the host is slower than the
    device.
    """
    lines = records(Device([launch], [work], says), folder, steps=12, save=4)
    seconds = [TOKENS / line["tokens_per_s"] for line in lines]
    after_a_save = seconds[4::4]
    assert seconds[1:4] + seconds[5:8] + seconds[9:] == pytest.approx([0.85] * 9, abs=0.02)
    assert after_a_save == pytest.approx([0.85 + COPY] * 2, abs=0.12)


@pytest.mark.parametrize(
    ("before", "read", "wanted"),
    [(0.5, 3.0, 3.0), (0.5, 2.0005, 1.0), (1.5, 2.0005, 2.0)],
    ids=["waited", "host", "device"],
)
def test_an_engine_that_does_not_say_when_numbers_were_ready(
    before: float, read: float, wanted: float
) -> None:
    assert ready_time(before, 1.0, 2.0, read) == wanted


class Happened:
    """An event of a device, at a time of its clock; it has happened already, or does once it is
    waited for.
    """

    def __init__(self, at: float, already: bool) -> None:
        self.at, self.already = at, already

    def query(self) -> bool:
        return self.already

    def synchronize(self) -> None:
        self.already = True

    def elapsed_time(self, later: Happened) -> float:
        return 1e3 * (later.at - self.at)


def test_numbers_that_were_there_before_they_were_read_are_as_old_as_the_devices_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([10.0, 30.0])
    monkeypatch.setattr(
        "smtrain.worker.engine.native.comm.time", SimpleNamespace(perf_counter=lambda: next(now))
    )
    before, readies = None, []
    for event in (
        Happened(1.0, False),
        Happened(3.5, True),
        Happened(5.0, True),
        Happened(9.0, False),
    ):
        numbers = Numbers([torch.ones(1)], before)
        numbers._event = event  # type: ignore[assignment]
        assert numbers.read() == [1.0]
        readies.append(numbers.ready)
        before = numbers
    assert readies == [10.0, 12.5, 14.0, 30.0]
    unknown = Numbers([torch.ones(1)])
    unknown._event = Happened(1.0, True)  # type: ignore[assignment]
    unknown.read()
    assert unknown.ready is None, "no step before it"
