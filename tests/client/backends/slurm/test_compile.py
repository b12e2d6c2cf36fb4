"""Stage compile on a cluster, with a stand-in for Neuron's program: graphs first, by one node, on
the shared disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.choose import backend_of
from smtrain.client.launch import compiled_graphs
from smtrain.client.planner.resolve import load_config
from smtrain.stages import stages_of
from tests.client.backends.slurm.conftest import Bench
from tests.client.launch.test_compile import PATH


def config(bench: Bench, raw: dict[str, Any], prepared: Path) -> dict[str, Any]:
    # sbatch passes on the caller's PATH, and srun is found through it before compute.environment is
    # set.
    tools = ":".join(dict.fromkeys([*PATH.split(":"), "/usr/local/bin", "/usr/sbin"]))
    return {
        **raw,
        "target": "slurm",
        "cluster": {
            "shared": str(bench.shared),
            "venv": sys.prefix,
            "setup": [f"export PATH={PATH}:$PATH"],
        },
        "data": {"prepared": f"file://{prepared}"},
        "parallel": {"tp": 2, "sequence_parallel": True},
        "train": {
            "engine": "nxd",
            "steps": 4,
            "global_batch_size": 4,
            "seq_len": 32,
            "precision": "fp32",
        },
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
            "compile_ahead": True,
            "environment": {"PATH": tools},
        },
    }


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The files that stage compile checks before it starts Neuron's program."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def test_graphs_are_compiled_on_one_node_and_every_later_job_knows(
    bench: Bench, raw: dict[str, Any], prepared: Path
) -> None:
    settings = config(bench, raw, prepared)
    loaded = load_config(settings)
    assert stages_of(loaded) == ["convert", "compile", "train", "export", "generate"]
    job = smtrain.launch(settings, stage="compile", check=False, say=lambda _: None)
    description = job.describe()
    assert description["ResourceConfig"]["InstanceCount"] == 1
    assert {one["MetricName"]: one["Value"] for one in description["FinalMetricDataList"]} == {
        "compile:graphs": 3,
        "compile:compiled": 3,
        "compile:failed": 0,
        "compile:cached": 0,
    }
    result = json.loads(job.read("compilation.json"))
    kept = sorted(path.name for path in Path(result["cache"]).rglob("*") if path.is_file())
    assert kept.count("model.neff") == 3
    assert Path(result["cache"]).parent == bench.shared / "neuron-cache"
    assert not any(name.endswith(".part") for name in kept)
    held = compiled_graphs.read_marker(backend_of(loaded), f"file://{result['cache']}")
    assert held is not None
    assert held["graphs"] == 3
    again = smtrain.launch(settings, stage="compile", again=True, check=False, say=lambda _: None)
    assert json.loads(again.read("compilation.json"))["cached"] == 3
