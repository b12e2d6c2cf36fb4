from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.manifest import Manifest, step_folder, write_manifest
from smtrain.worker.checkpoint.native.files import model_file, write_safetensors
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.nxd.reader import NxDSource
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import inspect
from smtrain.worker.checkpoint.targets import Nxd
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of


def native(folder: Path, config: dict[str, Any], step: int, scale: float = 1.0) -> Path:
    """A native checkpoint of one rank, as the engine leaves it."""
    checkpoint = step_folder(folder, step)
    weights = {name: tensor * scale for name, tensor in random_weights(config).items()}
    table = Layout(ModelShape.from_config(config)).flat_table(0)
    write_manifest(
        checkpoint,
        Manifest(
            step=step,
            optimizer_steps=step,
            topology={"tp": 1, "pp": 1, "dp": 1},
            precision="fp32",
            config=config,
            flat=[[list(entry) for entry in table.entries]],
            shard=[table.size],
            files={model_file(0, 0): write_safetensors(checkpoint / model_file(0, 0), weights)},
            state={},
        ),
    )
    return checkpoint


def test_each_kind_is_known_by_what_lies_in_the_folder(tmp_path: Path) -> None:
    hf = hf_folder(tmp_path / "hf", LLAMA)
    convert(hf, tmp_path / "nxd", to=Nxd(tp=2, pp=2))
    native(tmp_path / "native", LLAMA, 9)
    kinds = {
        "hf": HFSource,
        "nxd": NxDSource,
        "native": NativeSource,
        "native/step_00000009": NativeSource,
    }
    for name, kind in kinds.items():
        source = open_weights(tmp_path / name)
        assert type(source) is kind
        assert same(weights_of(source), random_weights(LLAMA))
        assert source.config == LLAMA


def test_of_native_checkpoints_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        native(tmp_path, LLAMA, step, scale=step)
    (step_folder(tmp_path, 11) / "manifest.json").unlink()
    norm = random_weights(LLAMA)["model.norm.weight"]
    assert torch.equal(open_weights(tmp_path).read("model.norm.weight"), norm * 10)
    for step in (9, 10):
        (step_folder(tmp_path, step) / model_file(0, 0)).write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole one"):
        open_weights(tmp_path)


def test_of_nxd_tags_the_highest_step_that_is_done_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        hf = hf_folder(tmp_path / f"hf{step}", {**LLAMA, "vocab_size": 40 + step})
        convert(hf, tmp_path / "run" / f"step_{step}", to=Nxd(tp=1, pp=1))
        for name in ("manifest.json", "config.json"):
            (tmp_path / "run" / f"step_{step}" / name).unlink()
        if step < 11:
            (tmp_path / "run" / f"step_{step}" / "done").write_text("1")
    (tmp_path / "run" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 50}))
    assert open_weights(tmp_path / "run").shape("lm_head.weight") == (50, 16)


def test_anything_else_is_told_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds nothing, and no weights"):
        open_weights(tmp_path)
    for name in ("notes.txt", "model.weights"):
        (tmp_path / name).write_text("x")
    with pytest.raises(
        CheckpointError, match=r"holds model\.weights, notes\.txt, and no weights known here"
    ):
        open_weights(tmp_path)
    (tmp_path / "model.onnx").write_text("x")
    with pytest.raises(CheckpointError, match=r"holds an ONNX export \(model\.onnx\)"):
        open_weights(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        open_weights(tmp_path / "notes.txt")


def test_export_refuses_another_model_and_keeps_what_is_there(tmp_path: Path) -> None:
    native(tmp_path / "run", LLAMA, 1)
    model = hf_folder(tmp_path / "model", LLAMA)
    export(tmp_path / "run", BaseModel(model), tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert same(weights_of(HFSource(tmp_path / "out")), random_weights(LLAMA))
    other = hf_folder(tmp_path / "other", {**LLAMA, "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="describes another model than the weights"):
        export(tmp_path / "run", BaseModel(other), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    with pytest.raises(CheckpointError, match="overlap"):
        export(tmp_path / "run", BaseModel(model), model)
    assert same(weights_of(HFSource(model)), random_weights(LLAMA))


def test_conversions_do_without_torch(tmp_path: Path) -> None:
    """Importing it takes longer than converting a small model."""
    model = hf_folder(tmp_path / "hf", LLAMA)
    code = (
        "import sys; from smtrain import HuggingFace, Native, Nxd, convert\n"
        "from smtrain.worker.checkpoint import summary\n"
        "s, t = sys.argv[1:]\n"
        "convert(s, f'{t}/nxd', to=Nxd(tp=2, pp=2, dtype='bf16'))\n"
        "convert(f'{t}/nxd', f'{t}/xser', to=Nxd(tp=4, form='xser'))\n"
        "convert(f'{t}/xser', f'{t}/native', to=Native(tp=2))\n"
        "convert(f'{t}/native', f'{t}/hf', to=HuggingFace())\n"
        "assert not list(summary.diff(f'{t}/nxd', f'{t}/hf'))\n"
        "summary.verify(f'{t}/nxd'); summary.inspect(f'{t}/native')\n"
        "sys.exit(bool({'torch', 'transformers', 'safetensors'} & set(sys.modules)))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(model), str(tmp_path / "out")], check=True)


def test_of_a_run_the_newest_line_is_taken_wherever_it_lies(tmp_path: Path) -> None:
    """The line that began last counts, not the highest step, in a folder and in an object store."""
    native(tmp_path, LLAMA, 3)
    for job, at, steps in (("run-train-a", 3, (5, 9)), ("run-train-b", 5, (6, 7))):
        line = Lineage.of(tmp_path, job).after_resume(at)
        line.record()
        for step in steps:
            native(line.job_folder, LLAMA, step, scale=step)
    norm = random_weights(LLAMA)["model.norm.weight"]
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/of-a-run", recursive=True)
    try:
        for run in (tmp_path, "memory://of-a-run"):
            assert torch.equal(open_weights(run).read("model.norm.weight"), norm * 7)
        (tmp_path / "run-train-b/step_00000007/manifest.json").unlink()
        (tmp_path / "run-train-b/step_00000006" / model_file(0, 0)).unlink()
        assert torch.equal(open_weights(tmp_path).read("model.norm.weight"), norm * 5), (
            "the step it began from"
        )
        assert inspect(tmp_path).step == 5
    finally:
        store.rm("/of-a-run", recursive=True)
