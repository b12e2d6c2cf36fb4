"""A run that starts from Megatron's checkpoint, and a folder whose optimizer files stay where they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import smtrain
from smtrain.job.model_files import is_model_file, is_weights_file


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


@pytest.mark.slow
def test_a_run_starts_from_it(trained_inputs: dict[str, Path], local_home: Path, tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    smtrain.convert(trained_inputs["model"], run, to="megatron")
    model.mkdir()  # without weights: they are named apart, as one iteration of a run of Megatron's
    for file in (*trained_inputs["model"].glob("*token*.json"), trained_inputs["model"] / "config.json"):
        shutil.copy(file, model)
    raw: dict[str, Any] = {
        "name": "from-megatron",
        "model": {"path": model, "weights": run / "iter_0000001"},
        "data": {"path": trained_inputs["text"]},
        "train": {"seq_len": 32, "steps": 1, "global_batch_size": 2, "precision": "fp32", "lr": 1e-9},
        "compute": {"processes_per_instance": 1},
    }
    folder = smtrain.run(raw, say=lambda _: None).download(tmp_path / "exported")
    began = load_file(trained_inputs["model"] / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert (tensor - began[name]).abs().max() < 1e-6, name
