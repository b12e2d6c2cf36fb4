from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.summary import diff, inspect, verify
from smtrain.worker.checkpoint.targets import HuggingFace, Native, Nxd, Target, make_target
from tests.typed import typed as smtrain
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf", LLAMA)


def test_inspect_says_what_a_checkpoint_is(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "step_7", to=Nxd(tp=4, pp=3, dtype="bf16", cuts=[0, 1]))
    convert(tmp_path / "step_7", tmp_path / "native", to=Native(tp=2, pp=2))
    about = inspect(tmp_path / "step_7")
    assert (about.kind, about.topology, about.step) == ("nxd", {"tp": 4, "pp": 3}, 7)
    assert (about.qkv, about.kv_multiplier, about.dtype) == ("grouped", 2, "bfloat16")
    assert about.bytes == sum(
        p.stat().st_size for p in (tmp_path / "step_7").rglob("*") if p.is_file()
    )
    about = inspect(tmp_path / "native")
    assert (about.kind, about.topology, about.step) == ("native", {"tp": 2, "pp": 2, "dp": 1}, 0)
    about = inspect(model)
    assert (about.kind, about.family, about.hashes, about.step) == ("hf", "llama", False, None)
    assert about.parameters == sum(t.numel() for t in random_weights(LLAMA).values())


@pytest.mark.parametrize(
    ("name", "step"), [("global_step120", 120), ("llama-2-70b", None), ("tp8_pp4", None)]
)
def test_a_step_is_read_from_a_name_that_says_so_and_from_no_other(
    model: Path, tmp_path: Path, name: str, step: int | None
) -> None:
    convert(model, tmp_path / name, to=Nxd(tp=2))
    assert inspect(tmp_path / name).step == step


def test_diff_names_what_differs_and_by_how_much(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "nxd", to=Nxd(tp=2, pp=2, form="xser"))
    assert list(diff(model, tmp_path / "nxd")) == []
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.5
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    save_file(weights, model / "model.safetensors")
    differences = list(diff(model, tmp_path / "nxd"))
    assert [d.name for d in differences] == [
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    assert differences[0].max_abs == pytest.approx(0.5)
    assert "bfloat16 and float32" in differences[1].reason


@pytest.mark.parametrize("how", [HuggingFace(), Nxd(tp=2), Native(tp=2)])
def test_verify_finds_one_flipped_bit(model: Path, tmp_path: Path, how: Target) -> None:
    convert(model, tmp_path / "out", to=how)
    assert verify(tmp_path / "out") > 0
    file = max(
        (p for p in (tmp_path / "out").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name}"):
        verify(tmp_path / "out")
    for to in ("hf", "nxd", "native"):
        with pytest.raises(CheckpointError, match=f"{file.name}"):
            convert(tmp_path / "out", tmp_path / "none", to=make_target(to))
        assert not (tmp_path / "none").exists()


def test_verify_needs_something_to_compare_with(model: Path) -> None:
    with pytest.raises(CheckpointError, match="no hash to compare with"):
        verify(model)


def test_types_are_converted_on_the_way(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "out", to=HuggingFace(dtype="bf16"))
    wanted = {name: tensor.bfloat16() for name, tensor in random_weights(LLAMA).items()}
    assert same(load_file(tmp_path / "out/model.safetensors"), wanted)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights[
        "model.layers.0.mlp.up_proj.weight"
    ].bfloat16()
    save_file(weights, model / "model.safetensors")
    with pytest.raises(CheckpointError, match="become one tensor and have different types"):
        convert(model, tmp_path / "nxd", to=Nxd())
    with pytest.raises(CheckpointError, match="all bf16, all fp32, all fp16; the source is not"):
        convert(model, tmp_path / "native", to=Native())


def test_every_wrong_option_is_said_at_once(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(model, tmp_path / "out", to=make_target("nxt", tp=0, dtype="int4", qkv="joined"))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["to", "qkv", "dtype", "tp"]


def test_the_command_line(model: Path, tmp_path: Path) -> None:
    nxd, hf = str(tmp_path / "nxd"), str(tmp_path / "back")
    assert (
        smtrain(
            "convert", str(model), nxd, "--to", "nxd", "--tp", "2", "--format", "xser"
        ).returncode
        == 0
    )
    assert smtrain("convert", nxd, hf, "--to", "hf", "--max-shard-size", "6KB").returncode == 0
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    assert json.loads(smtrain("checkpoint", "inspect", nxd).stdout)["kind"] == "nxd"
    output = smtrain("checkpoint", "diff", nxd, hf)
    assert (output.returncode, output.stdout) == (0, "the same, bit for bit\n")
    weights = {name: torch.zeros_like(t) for name, t in random_weights(LLAMA).items()}
    save_file(weights, model / "model.safetensors")
    output = smtrain("checkpoint", "diff", str(model), hf)
    assert output.returncode == 1
    assert output.stdout.startswith("first: model.embed_tokens.weight: values, by at most")
    output = smtrain("convert", nxd, hf, "--to", "hf", "--max-shard-size", "much")
    assert (output.returncode, output.stderr) == (
        2,
        "smtrain: --max-shard-size much: must be a size like 5GB or 500MB\n",
    )
