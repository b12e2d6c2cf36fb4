"""Weights saved by torch.save: pytorch_model.bin, one file or sharded, in both of torch's
containers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.targets import HuggingFace
from tests.worker.checkpoint.folders import LLAMA, NEOX, random_weights, same, weights_of

Config = dict[str, Any]


def bin_folder(folder: Path, config: Config, *, shards: int = 1, zipped: bool = True) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, torch.bfloat16)
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for n in range(shards):
        file = (
            "pytorch_model.bin" if shards == 1 else f"pytorch_model-{n + 1:05d}-of-{shards:05d}.bin"
        )
        part = {name: weights[name] for name in names[n::shards]}
        if n == 0 and config.get("tie_word_embeddings"):
            part["lm_head.weight"] = weights["model.embed_tokens.weight"]
        torch.save(part, folder / file, _use_new_zipfile_serialization=zipped)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    return folder


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, NEOX])
def test_weights_are_those_of_torch(
    tmp_path: Path, config: Config, shards: int, zipped: bool
) -> None:
    folder = bin_folder(tmp_path / "model", config, shards=shards, zipped=zipped)
    assert same(weights_of(HFSource(folder)), random_weights(config, torch.bfloat16))
    convert(folder, tmp_path / "out", to=HuggingFace())
    assert same(
        load_file(tmp_path / "out/model.safetensors"), random_weights(config, torch.bfloat16)
    )


def test_safetensors_beside_count(tmp_path: Path) -> None:
    folder = bin_folder(tmp_path / "model", LLAMA)
    convert(folder, tmp_path / "out", to=HuggingFace())
    (tmp_path / "out/pytorch_model.bin").write_bytes(b"not read")
    assert same(weights_of(HFSource(tmp_path / "out")), random_weights(LLAMA, torch.bfloat16))


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_the_file_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = bin_folder(tmp_path / "model", LLAMA)
    evil = {**random_weights(LLAMA), "model.norm.weight": Hostile()}
    torch.save(evil, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"it would call posix\.mkdir"):
        HFSource(folder)
    assert not Path("was-here").exists()


@pytest.mark.parametrize(
    "change", [lambda data: data[:-9], lambda data: data + b"more", lambda data: data[:70]]
)
def test_an_old_file_that_is_not_whole_is_named(tmp_path: Path, change: Any) -> None:
    folder = bin_folder(tmp_path / "model", LLAMA, zipped=False)
    file = folder / "pytorch_model.bin"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin is not a complete torch checkpoint"
    ):
        HFSource(folder)
