"""`train.profile` in a training of real processes: a trace that viewers open, and parts that make
up a step.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain import load_config
from smtrain.core.config import JobConfig
from smtrain.core.config.training import Profile
from smtrain.core.errors import ConfigError
from smtrain.worker.engine.step_timing import PARTS, part
from smtrain.worker.train.profile import StepProfiler, summary
from tests.worker.engine.world import World
from tests.worker.train import running
from tests.worker.train.launched import lay_out
from tests.worker.train.test_shell import Shell


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with World(4) as world:
        yield world


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Shell:
    """A shell with model and prepared data."""
    return lay_out(tmp_path_factory.mktemp("ml"), trained_inputs)


def config(**train: Any) -> Any:
    return {
        "model": {"path": "s3://unused"},
        "train": {
            "steps": 4,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 1e-3,
            "save_interval": 20,
            **train,
        },
        "parallel": {"tp": 2, "pp": 2},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 4},
    }


ABSENT = {"router", "sorting rows", "experts", "expert parallel", "context parallel"}
"""Parts of experts (tests/worker/engine/test_experts.py) and of cut rows, which this run has not.
"""


def records(root: Path) -> list[tuple[float, float]]:
    lines = (root / "output/data/metrics.jsonl").read_text().splitlines()
    return [(record["loss"], record["grad_norm"]) for record in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.full
def test_steps_are_traced_and_their_parts_add_up(
    four: World, prepared: Shell, tmp_path: Path
) -> None:
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    for root in (plain, profiled):
        shutil.copytree(prepared.root, root, symlinks=True)
    four.run(running.run, plain, config())
    four.run(running.run, profiled, config(profile={"steps": 2, "skip": 0}))
    assert records(profiled) == records(plain)
    assert not (plain / "output/data/profile").exists()

    folder = profiled / "output/data/profile"
    traces = sorted(folder.glob("*.gz"))
    assert [path.name for path in traces] == ["stage0.pt.trace.json.gz", "stage1.pt.trace.json.gz"]
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        ranges = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
        assert ranges["smtrain: step"] == ranges["smtrain: forward and backward"] == 2
        assert {f"smtrain: {name}" for name in PARTS if name not in ABSENT} <= ranges.keys()
        assert any("aten::" in e.get("name", "") for e in events)

    record = json.loads((folder / "parts.json").read_text())
    assert record["steps"] == 2
    assert len(record["ranks"]) == 4
    for rank in record["ranks"]:
        assert all((value > 0) != (name in ABSENT) for name, value in rank["parts"].items())
        assert 0.95 * rank["step"] <= sum(rank["parts"].values()) <= rank["step"], (
            "a step is its parts within 5 %"
        )


def profiled(folder: Path, done: int, **options: int) -> list[str]:
    """The lines of a profiler around so many steps."""
    said: list[str] = []
    profiler = StepProfiler(Profile(**options), folder, 0, 0, lambda value: [value], said.append)
    for _ in range(done):
        with profiler.step(), part("forward and backward"):
            torch.ones(4).sum()
    profiler.close()
    return said


def test_a_run_that_ends_before_the_profile_says_so(tmp_path: Path) -> None:
    for steps in range(10):
        assert profiled(tmp_path, steps, steps=4, skip=2) == [
            f"train.profile: the run ended after {steps} of the 10 steps that it takes; no profile"
        ]
    (line,) = profiled(tmp_path, 10, steps=4, skip=2)
    assert line.startswith("profile: a step takes")


def test_a_folder_that_refuses_is_reported_once_and_training_continues(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.write_text("in the way")
    refused, line = profiled(folder, 2, steps=1, skip=0)
    assert refused == f"train.profile: {folder} cannot be written (File exists); training continues"
    assert line.startswith("profile: a step takes")


def test_the_line_has_means_and_a_range_if_ranks_differ() -> None:
    ranks = [
        {"step": 1.0, "parts": {**dict.fromkeys(PARTS, 0.0), "data": 0.5, "pipeline": wait}}
        for wait in (0.1, 0.3)
    ]
    assert (
        summary(ranks) == "profile: a step takes 1 s: data 50 %, pipeline 20 % (10 to 30 % by rank)"
    )


def test_engine_nxd_says_what_to_use_instead() -> None:
    with pytest.raises(ConfigError, match=r"train\.profile: .*neuron-profile"):
        load_config(
            {
                "model": {"path": "hf://a/b"},
                "data": {"path": "s3://b/t"},
                "train": {"engine": "nxd", "profile": {}},
                "compute": {"instance_type": "ml.trn1.32xlarge"},
            }
        )


def test_the_default_is_none() -> None:
    assert JobConfig.model_validate({"model": {"path": "x"}}).train.profile is None
