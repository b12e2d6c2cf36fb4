"""A conversion replaces files only with `overwrite`, and does no work twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.worker.checkpoint import execute, uploading
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.staging import Staging
from smtrain.worker.checkpoint.targets import (
    HuggingFace,
    Megatron,
    Native,
    NemoMegatron,
    Nxd,
    Target,
)
from tests.conftest import LLAMA
from tests.worker.checkpoint.folders import hf_folder


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.mark.parametrize("how", [HuggingFace(), Nxd(tp=2), Native()])
def test_other_files_stay_unless_asked(tmp_path: Path, how: Target) -> None:
    source, other = (
        hf_folder(tmp_path / "hf", LLAMA),
        hf_folder(tmp_path / "other", LLAMA, torch.bfloat16),
    )
    convert(other, tmp_path / "out", to=how)
    (tmp_path / "out/mine").write_text("kept")
    before = tree(tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"holds other files of the same names \(.*--overwrite"
    ):
        convert(source, tmp_path / "out", to=how)
    assert tree(tmp_path / "out") == before
    convert(source, tmp_path / "out", to=how, overwrite=True)
    after = tree(tmp_path / "out")
    assert after != before
    assert after["mine"] == b"kept"


def test_files_of_others_beside_it_are_no_obstacle(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("kept")
    convert(source, tmp_path / "out", to=Nxd())
    assert (tmp_path / "out/notes.txt").read_text() == "kept"


KINDS: list[Target] = [
    HuggingFace(),
    Nxd(tp=2),
    Nxd(form="xser"),
    Megatron(form="torch"),
    NemoMegatron(),
]


@pytest.mark.parametrize("where", ["folder", "store"])
@pytest.mark.parametrize("first", KINDS, ids=str)
def test_nothing_of_another_kind_stays(tmp_path: Path, first: Target, where: str) -> None:
    config = {**LLAMA, "torch_dtype": "float32"}
    source, other = (
        hf_folder(tmp_path / "hf", config),
        hf_folder(tmp_path / "other", config, torch.bfloat16),
    )
    store, bucket = fsspec.filesystem("memory"), f"/bucket/{tmp_path.name}"

    def names(of: str) -> set[str]:
        if where == "folder":
            return set(tree(tmp_path / of))
        return {path.removeprefix(f"{bucket}/{of}/") for path in store.find(f"{bucket}/{of}")}

    def at(name: str) -> str:
        return str(tmp_path / name) if where == "folder" else f"memory:/{bucket}/{name}"

    for n, second in enumerate(kind for kind in KINDS if kind != first):
        convert(other, at(f"both{n}"), to=first)
        convert(source, at(f"both{n}"), to=second, overwrite=True)
        convert(source, at(f"alone{n}"), to=second)
        assert names(f"both{n}") == names(f"alone{n}"), (first, second)
    if where == "store":
        store.rm(bucket, recursive=True)


def test_nor_after_a_conversion_that_was_killed_half_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    convert(source, tmp_path / "both", to=HuggingFace())

    def killed(self: Staging, files: dict[str, int], replaces: Any) -> None:
        (self.target / MANIFEST).unlink()
        raise KeyboardInterrupt

    move = Staging._move
    monkeypatch.setattr(Staging, "_move", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "both", to=Nxd(tp=2), overwrite=True)
    monkeypatch.setattr(Staging, "_move", move)
    convert(source, tmp_path / "both", to=Nxd(tp=2), overwrite=True)
    convert(source, tmp_path / "alone", to=Nxd(tp=2))
    assert set(tree(tmp_path / "both")) == set(tree(tmp_path / "alone"))


@pytest.mark.parametrize("asked", [False, True])
def test_checkpoints_and_a_converted_model_do_not_share_a_folder(
    tmp_path: Path, asked: bool
) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    convert(source, tmp_path / "run", to=Native())
    convert(source, tmp_path / "model", to=Nxd())
    before = tree(tmp_path / "run"), tree(tmp_path / "model")
    with pytest.raises(
        CheckpointError, match=r"holds checkpoints of a run \(step_00000000.*name another folder"
    ):
        convert(source, tmp_path / "run", to=HuggingFace(), overwrite=asked)
    with pytest.raises(
        CheckpointError, match=r"holds a model of another kind.*name another folder"
    ):
        convert(source, tmp_path / "model", to=Native(), overwrite=asked)
    assert (tree(tmp_path / "run"), tree(tmp_path / "model")) == before


@pytest.mark.parametrize("where", ["folder", "store"])
def test_the_same_again_is_not_done_again(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    target = str(tmp_path / "out") if where == "folder" else f"memory://bucket/{tmp_path.name}"
    convert(source, target, to=Nxd(tp=2))
    for module in (execute, uploading):
        monkeypatch.setattr(module, "run", None)
    convert(source, target, to=Nxd(tp=2))
    with pytest.raises(CheckpointError, match="other files"):
        convert(source, target, to=Nxd(tp=4))
    if where == "store":
        fsspec.filesystem("memory").rm(f"/bucket/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize(("source", "target"), [("", "out"), ("hf", ""), ("hf", " ")])
def test_an_empty_name_is_no_folder(tmp_path: Path, source: str, target: str) -> None:
    with pytest.raises(ConfigError, match="is an empty name"):
        convert(source, target, to=Nxd())
