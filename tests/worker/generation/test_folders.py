"""Folders that a model is loaded from to generate: the same weights are found, and what lacks is
told with a remedy.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import smtrain
from smtrain.core.errors import CheckpointError
from smtrain.tools.chat.resolve_model import find
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import refuse_renamed
from smtrain.worker.checkpoint.targets import HuggingFace, Nxd, make_target
from smtrain.worker.generation.load import load
from smtrain.worker.generation.stage import generate
from tests.core.model.test_generate import make

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9085657\n"


@pytest.mark.parametrize("before", ["_orig_mod.", "module.", "model."])
@pytest.mark.parametrize("name", ["llama tied", "gpt_neox"])
def test_names_with_words_in_front_give_the_same_texts(
    tmp_path: Path, name: str, before: str
) -> None:
    folder = make(tmp_path / "model", name)
    texts = generate(folder, ["ab", "cd"], max_new_tokens=5)
    tensors = {
        before + key: tensor.clone()
        for key, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    assert generate(folder, ["ab", "cd"], max_new_tokens=5) == texts
    with pytest.raises(
        CheckpointError, match=r"smtrain convert \S+ NEW --to hf"
    ) as error:  # for vLLM and lm-eval
        refuse_renamed(folder)
    convert(folder, tmp_path / "new", to=HuggingFace())
    assert "NEW" in str(error.value)
    refuse_renamed(tmp_path / "new")
    assert generate(tmp_path / "new", ["ab", "cd"], max_new_tokens=5) == texts


def test_a_state_dict_under_a_key_gives_the_same_texts(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "llama")
    texts = generate(folder, ["ab"], max_new_tokens=5)
    torch.save(
        {"state_dict": load_file(folder / "model.safetensors"), "epoch": 1},
        folder / "pytorch_model.bin",
    )
    (folder / "model.safetensors").unlink()
    assert generate(folder, ["ab"], max_new_tokens=5) == texts


def test_a_converted_checkpoint_generates_with_the_tokenizer_that_it_was_made_with(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path / "model", "llama")
    texts = generate(folder, ["ab"], max_new_tokens=5)
    for kind in ("nxd", "native"):
        convert(folder, tmp_path / kind, to=make_target(kind))  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match="makes one of a checkpoint") as error:
            find(str(tmp_path / kind))
        command = re.search(r"`smtrain convert (\S+) FOLDER --to hf`", str(error.value))
        assert command
        convert(command[1], tmp_path / f"{kind}-back", to=HuggingFace())
        assert generate(tmp_path / f"{kind}-back", ["ab"], max_new_tokens=5) == texts


def test_without_a_tokenizer_the_advice_leads_to_one(tmp_path: Path) -> None:
    folder, bare = make(tmp_path / "model", "llama"), tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / name, bare / name)
    convert(bare, tmp_path / "nxd", to=Nxd())
    with pytest.raises(
        CheckpointError, match=r"has no tokenizer; name the model .* with --config MODEL"
    ):
        smtrain.generate(str(tmp_path / "nxd"), ["ab"], max_new_tokens=2)
    convert(tmp_path / "nxd", tmp_path / "hf", to=HuggingFace(), config=folder)
    assert generate(tmp_path / "hf", ["ab"], max_new_tokens=2)
    with pytest.raises(
        CheckpointError, match=r"has no tokenizer; copy the tokenizer's files"
    ) as error:
        smtrain.generate(str(bare), ["ab"], max_new_tokens=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert name in str(error.value)
        shutil.copyfile(folder / name, bare / name)
    assert smtrain.generate(str(bare), ["ab"], max_new_tokens=2)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "tokenizer.json",
            LFS,
            r"tokenizer\.json is a Git LFS pointer of a file of 9,085,657 bytes.*git lfs pull",
        ),
        ("tokenizer.json", "<html>", r"tokenizer\.json is a web page"),
        ("tokenizer_config.json", LFS, r"tokenizer_config\.json is a Git LFS pointer"),
        ("tokenizer.json", '{"version": ', r"tokenizer\.json is not JSON .* copy this file again"),
        ("model.safetensors", LFS, r"model\.safetensors is a Git LFS pointer"),
        ("config.json", LFS, r"config\.json is a Git LFS pointer"),
        ("config.json", "", r"config\.json is empty"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, file: str, content: str, says: str) -> None:
    folder = make(tmp_path / "model", "llama")
    whole = (folder / file).read_bytes()
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=says):
        load(find(str(folder)).folder)
    (folder / file).write_bytes(whole)
    assert load(folder).tokenizer


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_the_folder_stands_for_the_folder(tmp_path: Path, file: str) -> None:
    folder = make(tmp_path / "model", "llama")
    assert find(str(folder / file)).folder == folder


def test_an_adapter_file_stands_for_its_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    assert find(str(tmp_path / "adapter_config.json")).is_adapter


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("config.json", "model.gguf"), "holds a GGUF file of llama.cpp"),
        (("model_index.json", "unet/x.bin"), "a pipeline of diffusers"),
        (("optimizer.pt",), "the state of a trainer without the model"),
        (("config.json", "consolidated.00.pth"), "Meta's original form"),
    ],
)
def test_another_kind_of_folder_is_named(tmp_path: Path, names: tuple[str, ...], says: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        find(str(tmp_path))
