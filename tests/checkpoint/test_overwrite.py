"""A conversion replaces nothing unasked, and does nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from smtrain.checkpoint import execute, uploading
from smtrain.checkpoint.convert import convert
from smtrain.errors import CheckpointError, ConfigError
from tests.checkpoint.folders import hf_folder
from tests.conftest import LLAMA


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("how", [{"to": "hf"}, {"to": "nxd", "tp": 2}, {"to": "native"}])
def test_other_files_stay_unless_asked(tmp_path: Path, how: dict[str, Any]) -> None:
    source, other = hf_folder(tmp_path / "hf", LLAMA), hf_folder(tmp_path / "other", LLAMA, torch.bfloat16)
    convert(other, tmp_path / "out", **how)
    (tmp_path / "out/mine").write_text("kept")
    before = tree(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds other files of the same names \(.*--overwrite"):
        convert(source, tmp_path / "out", **how)
    assert tree(tmp_path / "out") == before
    convert(source, tmp_path / "out", overwrite=True, **how)
    after = tree(tmp_path / "out")
    assert after != before
    assert after["mine"] == b"kept"


def test_files_of_others_beside_it_are_no_obstacle(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("kept")
    convert(source, tmp_path / "out")
    assert (tmp_path / "out/notes.txt").read_text() == "kept"


@pytest.mark.parametrize("where", ["folder", "store"])
def test_the_same_again_is_not_done_again(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    target = str(tmp_path / "out") if where == "folder" else f"memory://bucket/{tmp_path.name}"
    convert(source, target, tp=2)
    for module in (execute, uploading):
        monkeypatch.setattr(module, "run", None)
    convert(source, target, tp=2)
    with pytest.raises(CheckpointError, match="other files"):
        convert(source, target, tp=4)
    if where == "store":
        fsspec.filesystem("memory").rm(f"/bucket/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize(("source", "target"), [("", "out"), ("hf", ""), ("hf", " ")])
def test_an_empty_name_is_no_folder(tmp_path: Path, source: str, target: str) -> None:
    with pytest.raises(ConfigError, match="is an empty name"):
        convert(source, target)
