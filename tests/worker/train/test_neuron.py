"""Stage train on the imitated device: the CPU's run, and a report of its calls to the device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.config import JobConfig
from smtrain.stages import keys_of
from smtrain.worker.train import operators
from tests.ports import free_port
from tests.worker.engine.world import World
from tests.worker.train import running
from tests.worker.train.launched import lay_out
from tests.worker.train.test_shell import REPO, Shell


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.fixture(scope="module")
def two_cores() -> Iterator[World]:
    with World(2, "neuron") as world:
        yield world


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Shell:
    """A shell with model and prepared data."""
    return lay_out(tmp_path_factory.mktemp("ml"), trained_inputs)


def config(steps: int = 4, **train: Any) -> dict[str, Any]:
    return {
        "model": {"path": "s3://unused"},
        "train": {
            "steps": steps,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 1e-3,
            "save_interval": 2,
            "schedule": "constant",
            **train,
        },
        "parallel": {"tp": 2, "micro_batch_size": 2},
        "checkpoint": {"keep": 5},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 2},
    }


def records(root: Path) -> list[tuple[int, float, float]]:
    lines = (root / "output/data/metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, lines)]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="whole"),
        pytest.param({"adapter": {"rank": 4, "dropout": 0.1}}, id="lora", marks=pytest.mark.full),
    ],
)
def test_a_run_and_its_resume_are_the_cpu_s(
    more: dict[str, Any], two: World, two_cores: World, prepared: Shell, tmp_path: Path
) -> None:
    roots = [tmp_path / "cpu", tmp_path / "neuron"]
    for root, world in zip(roots, (two, two_cores), strict=True):
        shutil.copytree(prepared.root, root, symlinks=True)
        world.run(running.run, root, config(2, **more))
        world.run(running.run, root, config(4, **more))
    cpu, neuron = map(records, roots)
    assert cpu == neuron
    assert [step for step, _, _ in neuron] == [1, 2, 3, 4]
    saved, expected = (
        {
            p.relative_to(root / "checkpoints"): p.read_bytes()
            for p in root.rglob("*.safetensors")
            if p.is_relative_to(root / "checkpoints")
        }
        for root in roots
    )
    assert saved == expected
    report = json.loads((roots[1] / "output/data" / operators.RECORD).read_text())
    assert report["device"] == "neuron"
    assert report["peak_bytes"] > 0
    assert report["fallback"] is None, "torch_neuronx is not here to say so"
    assert {"aten.mm", "aten._fused_adamw_"} <= {name for name, _, _ in report["operators"]}
    assert not (roots[0] / "output/data" / operators.RECORD).exists(), "the CPU is no accelerator"


LIBRARY = """
from tests.worker.engine.neuron import imitation
def _autoload(): imitation.start(imitation.Limits(visible=1, early_touch=False, integer_sums=False, generators=False))
def get_fallback_ops(): return ["aten::_cummax_helper", "aten::erfinv"]
"""


# the gate trains on the device above, and joins a group in engine/neuron/test_engine.py
@pytest.mark.full
def test_a_job_that_torchrun_starts_joins_trains_and_reports(
    prepared: Shell, tmp_path: Path
) -> None:
    """torch loads the device by itself, as it loads torch_neuronx: by an entry point of the
    installed package.
    """
    root, site = tmp_path / "ml", tmp_path / "site"
    shutil.copytree(prepared.root, root, symlinks=True)
    installed = site / "torch_neuronx-2.14.3.dist-info"
    installed.mkdir(parents=True)
    (site / "torch_neuronx.py").write_text(LIBRARY)
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch-neuronx\nVersion: 2.14.3\n"
    )
    (installed / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_neuronx = torch_neuronx:_autoload\n"
    )
    (root / "input/data/config").mkdir(parents=True, exist_ok=True)
    job = keys_of(JobConfig.model_validate(config(3)), "train")
    (root / "input/data/config/config.json").write_text(json.dumps(job))
    path = os.pathsep.join([str(site), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "PYTHONPATH": path,
        "SMTRAIN_ML_ROOT": str(root),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    done = subprocess.run(
        [*command, REPO / "entrypoints/train.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_neuronx 2.14.3" in done.stdout
    assert (
        "left to the CPU, with a copy each way: aten::_cummax_helper, aten::erfinv" in done.stdout
    )
    assert "device memory: " in done.stdout
    assert [step for step, _, _ in records(root)] == [1, 2, 3]
