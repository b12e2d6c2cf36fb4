"""Files next to the weights: every target copies each of them, or names it with a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smtrain.client.launch.inputs import is_model_file
from smtrain.core.model.hf_folder import folder_of, needed_files
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora, lora_settings
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.manifest import Manifest, step_folder, write_manifest
from smtrain.worker.checkpoint.native.files import model_file, write_safetensors
from smtrain.worker.checkpoint.native.writer import write_native
from smtrain.worker.checkpoint.summary import diff, verify
from smtrain.worker.checkpoint.targets import HuggingFace, Native, Nxd, Peft, make_target
from tests.worker.checkpoint.folders import LLAMA, hf_folder

ALONG = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "qwen.tiktoken",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tools.jinja",
    "additional_chat_templates/deep/er.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "modeling_own.py",
    "configuration_own.py",
    "LICENSE",
    "NOTICE.txt",
    "USE_POLICY.md",
    "notes.md",
    "source.json",
    "assets/figure.png",
    "1_Pooling/config.json",
    "a name with [brackets] and ü.txt",
    "params.json",
)
LEFT_OUT = {
    "pytorch_model.bin": "weights of another form",
    "model-q4.gguf": "weights of another form",
    "model-00009-of-00009.bin": "weights of another form",
    "onnx/": "weights of another form",
    "original/": "weights of another form",
    "checkpoint-500/": "weights of another form",
    "optimizer.pt": "the state of an earlier training",
    "trainer_state.json": "the state of an earlier training",
    "training_args.bin": "the state of an earlier training",
    "adapter_config.json": "an adapter",
    ".gitattributes": "hidden",
    ".cache/": "hidden",
    "__pycache__/": "a cache",
    "tokenizer.json.lock": "a cache",
    "id_rsa": "a secret",
    "credentials.txt": "a secret",
    "elsewhere": "a link to a folder",
    "broken": "a link to nothing",
}
IN_FOLDERS = (
    "onnx/model.onnx",
    "onnx/config.json",
    "original/consolidated.00.pth",
    "original/params.json",
)
INSIDE = (
    *IN_FOLDERS,
    "checkpoint-500/optimizer.pt",
    "checkpoint-500/tokenizer.json",
    ".cache/x",
    "__pycache__/x.pyc",
)


def full_folder(folder: Path, config: dict[str, Any] = LLAMA) -> Path:
    hf_folder(folder, config)
    plain = [
        name for name in LEFT_OUT if not name.endswith("/") and name not in ("elsewhere", "broken")
    ]
    for name in (*ALONG, *plain, *INSIDE, "README.md", "generation_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"of": name}))
    (folder.parent / "linked").mkdir()
    (folder.parent / "linked" / "secret").write_text("x")
    os.symlink(folder.parent / "linked", folder / "elsewhere")
    os.symlink(folder / "nothing", folder / "broken")
    return folder


def adapter_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint of one rank that trains an adapter, as the native engine leaves it."""
    lora = Lora(2, 4.0, targets=("q_proj",))
    shape = AdapterShape.of(ModelShape.from_config(config), lora)
    table, step = Layout(shape).flat_table(0), step_folder(folder, 1)
    tensors = {spec.name: torch.ones(spec.shape) for spec in shape.specs}
    files = {model_file(0, 0): write_safetensors(step / model_file(0, 0), tensors)}
    write_manifest(
        step,
        Manifest(
            step=1,
            optimizer_steps=1,
            topology={"tp": 1, "pp": 1, "dp": 1},
            precision="fp32",
            config=config,
            flat=[[list(entry) for entry in table.entries]],
            shard=[table.size],
            files=files,
            state={},
            adapter=lora_settings(lora),
        ),
    )


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def of_the_same(a: Path, b: Path, names: tuple[str, ...]) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


def is_told_once(said: list[str], left_out: dict[str, str]) -> bool:
    """Whether each file is named, in a line with its reason."""
    return all(
        any(reason in line and name in line for line in said) for name, reason in left_out.items()
    )


@pytest.mark.parametrize("kind", ["hf", "nxd", "native", "megatron", "nemo-megatron"])
def test_each_file_goes_along_or_is_named_and_comes_back(tmp_path: Path, kind: str) -> None:
    model = full_folder(tmp_path / "model")
    said: list[str] = []
    convert(model, tmp_path / "there", to=make_target(kind), say=said.append)
    where = tmp_path / "there" / ("step_00000000" if kind == "native" else "")
    along = (*ALONG, "README.md", "generation_config.json")
    assert of_the_same(where, model, along)
    assert not {name for name in files_of(where) if name in INSIDE or name in LEFT_OUT}
    assert is_told_once(said, LEFT_OUT)
    said.clear()
    convert(tmp_path / "there", tmp_path / "back", to=HuggingFace(), say=said.append)
    assert of_the_same(tmp_path / "back", model, along)
    assert not said
    assert not list(diff(tmp_path / "back", model))
    verify(tmp_path / "back")


def test_an_export_has_them_and_a_card_of_its_own(tmp_path: Path) -> None:
    model = full_folder(tmp_path / "model")
    write_native(HFSource(model), tmp_path / "run", Native(tp=1, pp=1))
    said: list[str] = []
    export(tmp_path / "run", BaseModel(model), tmp_path / "out", say=said.append)
    assert of_the_same(tmp_path / "out", model, (*ALONG, "generation_config.json"))
    assert "by smtrain" in (tmp_path / "out" / "README.md").read_text()
    assert is_told_once(said, {**LEFT_OUT, "README.md": "a new one"})


def test_the_card_names_the_run_that_the_training_started_from(tmp_path: Path) -> None:
    write_native(
        HFSource(hf_folder(tmp_path / "base", LLAMA)), tmp_path / "checkpoint", Native(tp=1, pp=1)
    )
    parent = "s3://bucket/smtrain/first/jobs/first-export-0123abcd-2/output/model/"
    export(
        tmp_path / "checkpoint",
        BaseModel(tmp_path / "base", parent),
        tmp_path / "out",
        say=lambda _: None,
    )
    said = (tmp_path / "out/README.md").read_text()
    assert (
        "Trained from the model that run first exported (job first-export-0123abcd-2), by smtrain."
        in said
    )


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_and_what_it_is_merged_into_have_them(tmp_path: Path, merge: bool) -> None:
    model = full_folder(tmp_path / "model")
    adapter_checkpoint(tmp_path / "run", LLAMA)
    said: list[str] = []
    export(tmp_path / "run", BaseModel(model), tmp_path / "out", merge=merge, say=said.append)
    assert of_the_same(
        tmp_path / "out", model, (*ALONG, *(["generation_config.json"] if merge else []))
    )
    assert is_told_once(
        said,
        {
            name: reason
            for name, reason in LEFT_OUT.items()
            if merge or name != "adapter_config.json"
        },
    )
    assert (tmp_path / "out" / "adapter_config.json").exists() is not merge
    if not merge:
        convert(tmp_path / "run", tmp_path / "peft", to=Peft(), config=model, say=said.append)
        assert of_the_same(tmp_path / "peft", model, (*ALONG, "README.md"))


def test_a_file_that_no_tokenizer_has_the_size_of_is_named(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "model", LLAMA)
    with (model / "film.mp4").open("wb") as file:
        file.truncate(3 << 30)
    said: list[str] = []
    convert(model, tmp_path / "out", to=HuggingFace(), say=said.append)
    assert is_told_once(said, {"film.mp4": "3,221 MB"})
    assert any("has no tokenizer" in line and "--config" in line for line in said)


def test_a_linked_file_as_in_the_hubs_cache_is_copied(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "model", LLAMA)
    (tmp_path / "blob").write_text("{}")
    os.symlink(tmp_path / "blob", model / "tokenizer.json")
    convert(model, tmp_path / "out", to=HuggingFace())
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


def test_with_config_they_are_those_of_the_folder_named(tmp_path: Path) -> None:
    model = full_folder(tmp_path / "model")
    bare = hf_folder(tmp_path / "bare", LLAMA)
    convert(bare, tmp_path / "nxd", to=Nxd(), config=model / "config.json")
    assert of_the_same(tmp_path / "nxd", model, ALONG)
    assert load_file(bare / "model.safetensors").keys()


def test_what_is_uploaded_and_fetched_has_them_too() -> None:
    needed = [
        name for name in ALONG if name.endswith((".json", ".jinja", ".model", ".py", ".tiktoken"))
    ]
    assert all(map(is_model_file, needed))
    listed = [*ALONG, *INSIDE, "config.json", "model.safetensors", "id_rsa", ".gitattributes"]
    fetched = set(needed_files(listed))
    assert {*needed, "config.json", "model.safetensors", "LICENSE", "merges.txt"} <= fetched
    assert not fetched & {*INSIDE, "id_rsa", ".gitattributes", "assets/figure.png"}


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("s3://b/m/config.json", "s3://b/m"),
        ("s3://b/m/model-00001-of-00002.safetensors", "s3://b/m"),
        ("s3://b/m/adapter_config.json", "s3://b/m"),
        ("s3://b/m", "s3://b/m"),
        ("hf://org/model", "hf://org/model"),
        ("/no/such/config.json", "/no/such/config.json"),
    ],
)
def test_a_path_of_a_known_file_is_its_folder(path: str, folder: str) -> None:
    assert folder_of(path) == folder


def test_a_folder_that_is_called_like_a_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").mkdir()
    assert folder_of(str(tmp_path / "config.json")) == str(tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert folder_of("tokenizer.json") == "."
