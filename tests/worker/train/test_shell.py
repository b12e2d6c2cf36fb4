"""The entry scripts in a shell, without a control plane: they need only a folder laid out as
/opt/ml.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from smtrain.core.config import JobConfig, Stage
from smtrain.stages import keys_of
from tests import warm

REPO = Path(__file__).resolve().parents[3]

CONFIG: dict[str, Any] = {
    "model": {"path": "s3://unused"},
    "train": {
        "steps": 3,
        "global_batch_size": 4,
        "seq_len": 32,
        "precision": "fp32",
        "lr": 1e-3,
        "save_interval": 2,
    },
    "parallel": {"micro_batch_size": 2},
    "compute": {"instance_type": "ml.m5.xlarge", "processes_per_instance": 1},
    "generate": {"prompts": ["the red", "a"], "max_new_tokens": 4},
}


class Shell:
    """A folder laid out as /opt/ml."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "input/config").mkdir(parents=True)
        hosts = {"hosts": ["algo-1"], "current_host": "algo-1", "network_interface_name": "lo"}
        (root / "input/config/resourceconfig.json").write_text(json.dumps(hosts))

    def channel(self, name: str, source: Path) -> None:
        target = self.root / "input/data" / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)

    def run(
        self, stage: Stage, changes: dict[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        changes = changes or {}
        raw = {
            key: {**CONFIG.get(key, {}), **changes.get(key, {})} for key in {**CONFIG, **changes}
        }
        folder = self.root / "input/data/config"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps(keys_of(JobConfig.model_validate(raw), stage))
        )
        (self.root / "output").mkdir(exist_ok=True)
        (self.root / "output/failure").unlink(missing_ok=True)
        environment = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")
        }
        environment |= {"SMTRAIN_ML_ROOT": str(self.root), "OMP_NUM_THREADS": "1"}
        return warm.run([REPO / "entrypoints" / f"{stage}.py"], environment)

    def result(self, name: str) -> Path:
        """Move the results of a stage out of the way of the next."""
        target = self.root / "results" / name
        target.parent.mkdir(exist_ok=True)
        (self.root / "model").rename(target)
        return target

    @property
    def failure(self) -> str:
        return (self.root / "output/failure").read_text()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Shell:
    """A shell with text, model and prepared data."""
    shell = Shell(tmp_path_factory.mktemp("ml"))
    shell.channel("text", trained_inputs["text"])
    shell.channel("model", trained_inputs["model"])
    done = shell.run("prepare")
    assert done.returncode == 0, done.stderr
    shell.channel("data", shell.result("prepared"))
    return shell


def like(prepared: Shell, root: Path) -> Shell:
    """Another /opt/ml with the same model and data, for one test alone."""
    shell = Shell(root)
    for name in ("data", "model"):
        shell.channel(name, prepared.root / "input/data" / name)
    return shell


@pytest.fixture
def shell(prepared: Shell, tmp_path: Path) -> Shell:
    return like(prepared, tmp_path / "ml")


def bits(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_after_no_steps_the_export_is_the_input_bit_for_bit(
    shell: Shell, trained_inputs: dict[str, Path]
) -> None:
    import torch

    trained = shell.run("train", {"train": {"steps": 0}})
    assert trained.returncode == 0, trained.stderr
    shell.channel("checkpoint", shell.root / "checkpoints")
    done = shell.run("export")
    assert done.returncode == 0, done.stderr
    before, after = bits(trained_inputs["model"]), bits(shell.result("untrained"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_from_scratch_it_trains_resumes_exports_and_writes(shell: Shell) -> None:
    changes: dict[str, Any] = {"model": {"init": "scratch"}, "train": {"steps": 3}}
    first = shell.run("train", changes)
    assert first.returncode == 0, first.stderr
    assert "step=3 loss=" in first.stdout
    again = shell.run("train", {**changes, "train": {"steps": 5}})
    assert "from checkpoint step_00000003" in again.stdout
    assert "step=4 loss=" in again.stdout
    assert "step=3 loss=" not in again.stdout
    records = (shell.root / "output/data/metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["step"] for record in records] == [1, 2, 3, 4, 5]
    assert list((shell.root / "output/data/tensorboard").glob("events*"))
    used = [
        json.loads(text)
        for text in (shell.root / "output/data/machine-algo-1.jsonl").read_text().splitlines()
    ]
    assert len(used) >= 2, "each job's last reading"
    assert all(0 <= reading[name] <= 1 for reading in used for name in ("cpu", "memory", "disk"))
    assert re.search(r"^machine: cpu=[0-9.]+ memory=[0-9.]+ ", again.stdout, re.M)
    shell.channel("checkpoint", shell.root / "checkpoints")
    assert shell.run("export").returncode == 0
    model = shell.result("scratch")
    shell.channel("model", model)
    written = shell.run("generate")
    assert written.returncode == 0, written.stderr
    pairs = json.loads((shell.result("texts") / "generation.json").read_text())
    assert [pair["prompt"] for pair in pairs] == ["the red", "a"]


@pytest.fixture(scope="module")
def begun(prepared: Shell, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell with the checkpoints of one run from the model's weights."""
    shell = like(prepared, tmp_path_factory.mktemp("begun") / "ml")
    assert shell.run("train").returncode == 0
    return shell


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"seq_len": 64}}, "seq_len"),
        ({"train": {"seed": 9, "steps": 9}}, "another value of train.seed (0 there, 9 here)"),
        (
            {"checkpoint": {"resume": False}},
            "checkpoint.resume: is false, but the run has checkpoints",
        ),
        ({"train": {"lr": 1e18, "steps": 9, "save_interval": 100}}, "grad norm nan at step"),
        (
            {"train": {"lr": 1e18, "steps": 9, "save_interval": 1}},
            "grad norm nan at step",
        ),  # of weights to be saved
        (
            {"train": {"lr": 1e18, "steps": 4, "schedule": "constant"}},
            "grad norm nan at step 4",
        ),  # after the last one
    ],
)
def test_a_run_that_cannot_continue_fails_in_one_sentence(
    begun: Shell, changes: dict[str, Any], sentence: str
) -> None:
    before = sorted(path.name for path in (begun.root / "checkpoints").iterdir())
    done = begun.run("train", changes)
    assert done.returncode == 1
    assert sentence in begun.failure
    assert begun.failure.startswith("algo-1: ")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in (begun.root / "checkpoints").iterdir()) == before


def test_a_missing_channel_names_itself(shell: Shell) -> None:
    done = shell.run("export")
    assert done.returncode == 1
    assert "the job has no input channel named 'checkpoint'" in shell.failure


def test_documents_are_kept_apart_on_request(prepared: Shell, tmp_path: Path) -> None:
    losses = []
    for mask in (False, True):
        own = like(prepared, tmp_path / str(mask))
        done = own.run(
            "train",
            {"model": {"init": "scratch"}, "data": {"document_mask": mask}, "train": {"steps": 1}},
        )
        assert done.returncode == 0, done.stderr
        losses.append(done.stdout.split("step=1 loss=")[1].split()[0])
    assert losses[0] != losses[1]
