"""The parts of a trial that measure speed, at toy size on the CPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from smtrain.tools.doctor.task import SizedModel, Task, llama
from tests.worker.engine.world import World

TOY = SizedModel(llama(32, 2, 4, 2, 64, 128), 2, 16, 2)


def parts(rank: int, folder: Path, names: list[str], compiler: str) -> list[dict[str, Any]]:
    from smtrain.tools.doctor.trial import TrialProcess

    os.environ["CXX"] = compiler
    task = Task("cpu", "cpu", 1, (), str(folder), TOY, TOY, "fp32", 0.01, os.getpid())
    trial = TrialProcess(task)
    return [getattr(trial, name)() for name in names]


@pytest.fixture(scope="module")
def solo() -> Any:
    with World(1) as world:
        yield world


@pytest.mark.full
def test_settings_and_the_plain_loop_are_measured(solo: World, tmp_path: Path) -> None:
    settings, plain = solo.run(parts, tmp_path, ["settings", "plain_speed"], "no-compiler")[0]
    assert "no-compiler" in settings["uncompiled"]
    assert [(row["compile"], row["deterministic"]) for row in settings["rows"]] == [
        (False, True),
        (False, False),
    ]
    assert all(row["tokens_per_s"] > 0 and row["first_step_s"] > 0 for row in settings["rows"])
    assert plain["tokens_per_s"] > 0
    assert plain["peak_bytes"] > 16 * TOY.shape.parameters(), (
        "fp32 weights, gradients and the two moments"
    )


@pytest.mark.full  # a compiler takes half a minute; the gate measures the settings without it
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_settings_are_measured_too(solo: World, tmp_path: Path) -> None:
    (settings,) = solo.run(parts, tmp_path, ["settings"], "g++")[0]
    assert settings["uncompiled"] is None
    assert [row["compile"] for row in settings["rows"]] == [False, False, True, True]
    assert settings["rows"][2]["first_step_s"] > settings["rows"][0]["first_step_s"]
