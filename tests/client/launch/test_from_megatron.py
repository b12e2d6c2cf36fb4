"""A run that starts from Megatron's checkpoint, and a folder whose optimizer files are not
uploaded.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.inputs import is_model_file, is_weights_file
from smtrain.worker.checkpoint.open import open_weights
from tests.worker.checkpoint.folders import same, weights_of


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("latest_checkpointed_iteration.txt", True),
        ("iter_0000001/mp_rank_00_001/model_optim_rng.pt", True),
        ("iter_0000001/mp_rank_00_001/distrib_optim.pt", False),
        ("iter_0000001/.metadata", True),
        ("iter_0000001/__0_0.distcp", True),
        ("tp_rank_00_pp_rank_001/llama--step=3.ckpt", True),
        ("tp_rank_00_pp_rank_001/llama--step=3.ckpt.tensors/tensor_4.pt", True),
        ("tp_rank_00_pp_rank_001/optim/dp_rank_000/llama-optimizer_states.ckpt", False),
        ("optimizer.pt", False),
        ("other/.metadata", False),
    ],
)
def test_what_of_a_checkpoint_goes_along(name: str, goes: bool) -> None:
    assert is_model_file(name) == goes


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("mp_rank_00_001/model_optim_rng.pt", True),
        (".metadata", True),
        ("__0_0.distcp", True),
        ("model/dp_rank_00_tp_rank_00_pp_rank_00.pt", True),
        ("mp_rank_00_001/distrib_optim.pt", False),
        ("mp_rank_01/optim/dp_rank_000/llama-optimizer_states.ckpt", False),
        (".git/config", False),
    ],
)
def test_what_goes_along_from_a_folder_of_weights(name: str, goes: bool) -> None:
    assert is_weights_file(name) == goes


EXAMPLE = Path(__file__).parents[3] / "examples/migrate-from-neuronx-nemo-megatron.yaml"
MEGATRON: dict[str, Any] = {"name": "from-megatron", "compute": {"processes_per_instance": 1}}


def in_s3(folder: Path, prefix: str) -> str:
    s3 = SageMakerBackend("local").s3
    for path in folder.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), "smtrain-local", f"{prefix}/{path.relative_to(folder)}")
    return f"s3://smtrain-local/{prefix}"


def without_weights(inputs: dict[str, Path], folder: Path) -> Path:
    """The model's folder when its weights are named apart."""
    folder.mkdir()
    for file in (*inputs["model"].glob("*token*.json"), inputs["model"] / "config.json"):
        shutil.copy(file, folder)
    return folder


def test_stage_convert_reads_one_iteration(
    trained_inputs: dict[str, Path], local_home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    smtrain.convert(trained_inputs["model"], run, to=smtrain.Megatron(tp=1))
    (run / "manifest.json").unlink()  # as theirs have none
    model = {
        "path": without_weights(trained_inputs, tmp_path / "model"),
        "weights": run / "iter_0000001",
    }
    config = {
        **MEGATRON,
        "target": "local",
        "model": model,
        "data": {"path": trained_inputs["text"]},
    }
    job = smtrain.launch(config, stage="convert", say=lambda _: None)
    converted = job.download(tmp_path / "converted")
    assert same(
        weights_of(open_weights(converted)), weights_of(open_weights(trained_inputs["model"]))
    )


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "megatron",
        pytest.param(
            "nemo-megatron",
            marks=pytest.mark.skipif(
                "SMTRAIN_WALKTHROUGHS" not in os.environ,
                reason="a second whole run of a minute; SMTRAIN_WALKTHROUGHS=1 does it",
            ),
        ),
    ],
)
def test_a_run_starts_from_it(
    kind: Any, trained_inputs: dict[str, Path], local_home: Path, tmp_path: Path
) -> None:
    """From one iteration of a run of Megatron's; and the example of neuronx-nemo-megatron, all in
    S3, here.
    """
    model, run = tmp_path / "model", tmp_path / "run"
    smtrain.convert(
        trained_inputs["model"],
        run,
        to=smtrain.Megatron() if kind == "megatron" else smtrain.NemoMegatron(tp=2),
    )
    (run / "manifest.json").unlink()  # as theirs have none
    without_weights(trained_inputs, model)
    small: dict[str, Any] = {
        "model": {"path": model, "weights": run / "iter_0000001"},
        "data": {"path": trained_inputs["text"]},
        "train": {
            "seq_len": 32,
            "steps": 1,
            "global_batch_size": 2,
            "precision": "fp32",
            "lr": 1e-9,
        },
    }
    if kind == "megatron":
        config = smtrain.load_config(MEGATRON, **small, export={"megatron": True})
    else:
        small["model"] = {
            "path": in_s3(model, "a-llama"),
            "weights": in_s3(run, "megatron_llama/checkpoints"),
        }
        small["train"] |= {"engine": "native", "min_lr": 0, "warmup_steps": 0, "save_interval": 1}
        small["parallel"] = {"tp": 2, "activation_checkpointing": "none"}
        here = {
            "instance_type": "ml.m5.xlarge",
            "instance_count": 1,
            "processes_per_instance": 2,
            "role": None,
        }
        config = smtrain.load_config(
            EXAMPLE, **small, target="local", compute={**here, "region": None}
        )
    folder = smtrain.run(config, say=lambda _: None).download(tmp_path / "exported")
    if kind == "megatron":
        trained = open_weights(folder)
        assert same(weights_of(open_weights(folder / "megatron")), weights_of(trained))
    began = load_file(trained_inputs["model"] / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert (tensor - began[name]).abs().max() < 1e-6, name
