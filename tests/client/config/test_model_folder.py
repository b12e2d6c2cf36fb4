"""Faults of a model's folder when a config is loaded: each says what the file is, and its remedy is
enough.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smtrain import ConfigError, load_config
from smtrain.client.planner.workload import shape_of

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9085657\n"
Change = Callable[[Path], object]


def with_keys(**keys: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return change


def written(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def instead(*names: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_text("x")

    return change


def adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            written("config.json", LFS),
            r"config\.json is a Git LFS pointer of a file of 9,085,657 bytes.*git lfs pull",
        ),
        (written("config.json", ""), r"config\.json is empty; copy this file again"),
        (written("config.json", "<!DOCTYPE html>"), r"config\.json is a web page"),
        (written("model.safetensors", LFS), r"model\.safetensors is a Git LFS pointer"),
        (written("model.safetensors", ""), r"model\.safetensors is empty"),
        (written("model.safetensors", "Entry not found"), r"a server's answer \(Entry not found\)"),
        (written("tokenizer.json", LFS), r"tokenizer\.json is a Git LFS pointer"),
        (written("tokenizer_config.json", "<html>"), r"tokenizer_config\.json is a web page"),
        (
            with_keys(quantization_config={"quant_method": "awq"}),
            r"quantized \(AWQ\).*take quantization_config out",
        ),
        (with_keys(quantization_config={"load_in_8bit": True}), r"quantized \(bitsandbytes\)"),
        (
            instead("model-00002-of-00003.safetensors"),
            r"lacks 2 of its 3 files of weights \(model-00001-of-00003",
        ),
        (instead("model.gguf"), r"holds a GGUF file of llama\.cpp"),
        (instead("consolidated.00.pth"), "Meta's original form"),
        (
            adapter,
            r"holds an adapter, not a model; merge it into its base with `smtrain convert BASE",
        ),
        (with_keys(hidden_size=None), "config.json has no hidden_size, which a llama model needs"),
    ],
)
def test_a_fault_of_the_folder_says_what_it_is(
    raw: dict[str, Any], tmp_path: Path, change: Change, says: str
) -> None:
    folder = Path(raw["model"]["path"])
    shutil.copytree(folder, tmp_path / "whole")
    change(folder)
    with pytest.raises(ConfigError, match=says) as error:
        load_config(raw)
    assert len(error.value.faults) == 1
    assert "again" not in str(error.value) or "this file again" in str(error.value)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "whole", folder)
    load_config(raw)


@pytest.mark.parametrize(
    "keys",
    [
        {
            "num_experts": None,
            "num_local_experts": None,
            "quantization_config": None,
            "rope_scaling": None,
        },
        {"sliding_window": None, "num_experts": 0, "num_local_experts": 1},
    ],
)
def test_keys_without_a_value_change_nothing(raw: dict[str, Any], keys: dict[str, Any]) -> None:
    before = shape_of(load_config(raw))
    with_keys(**keys)(Path(raw["model"]["path"]))
    assert shape_of(load_config(raw)) == before


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_the_folder_stands_for_the_folder(raw: dict[str, Any], file: str) -> None:
    folder = raw["model"]["path"]
    config = load_config({**raw, "model": {"path": f"{folder}/{file}"}})
    assert config == load_config(raw)
    assert (
        load_config({**raw, "model": {"path": f"s3://bucket/model/{file}"}}).model.path
        == "s3://bucket/model"
    )


def test_the_manifest_of_a_dataset_stands_for_its_folder(raw: dict[str, Any]) -> None:
    data = {"prepared": "s3://bucket/prepared/manifest.json"}
    assert load_config({**raw, "data": data}).data.prepared == "s3://bucket/prepared"
