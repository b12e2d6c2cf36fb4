"""Linears that are stored in fp8 with a factor for each block: read as bf16, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError
from smtrain.core.model.hf_config import remarks
from smtrain.core.model.remedies import unreadable_quantization
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource, read_config
from smtrain.worker.checkpoint.targets import HuggingFace, Native
from tests.worker.checkpoint.folders import random_weights, same
from tests.worker.checkpoint.test_latent_models import KIMI

BLOCK = (5, 4)
"""Sizes of the model are not multiples of it, like the 576 rows of DeepSeek-V3 of 128."""
CONFIG: dict[str, Any] = {
    **KIMI,
    "num_nextn_predict_layers": 0,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [*BLOCK],
    },
}


def fp8_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model whose linears are in fp8; returns the bf16 weights that it stands for."""
    stored, plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in random_weights(CONFIG).items():
        if ".weight" not in name or tensor.ndim == 1 or "embed" in name or "gate.w" in name:
            kind = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
            stored[name] = plain[name] = tensor.to(kind)
            continue
        blocks = [-(-n // size) for n, size in zip(tensor.shape, BLOCK, strict=True)]
        scales = torch.rand(blocks, generator=generator) + 0.01
        codes = (tensor * 100).to(torch.float8_e4m3fn)
        wide = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        wide = wide[: tensor.shape[0], : tensor.shape[1]]
        stored |= {name: codes, f"{name}_scale_inv": scales}
        plain[name] = (codes.float() * wide).bfloat16()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return plain


def test_fp8_is_read_as_bf16_in_any_cut(tmp_path: Path) -> None:
    plain = fp8_folder(tmp_path / "hf")
    assert unreadable_quantization(CONFIG) is None
    assert "stored in fp8 with a factor for each block" in "".join(remarks(CONFIG, 8))
    source = HFSource(tmp_path / "hf")
    assert {*source.widened.values()} == {"fp8"}
    assert source.renamed, "or transformers would load it in fp8"
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert torch.equal(source.read(name, 0, 3, 9), plain[name][3:9])
    assert torch.equal(source.read(name, 1, 3, 4), plain[name][:, 3:4])
    said: list[str] = []
    convert(tmp_path / "hf", tmp_path / "native", to=Native(tp=2, pp=2, ep=2), say=said.append)
    assert "tensors are fp8 in" in said[0]
    convert(tmp_path / "native", tmp_path / "again", to=HuggingFace())
    assert same(load_file(tmp_path / "again/model.safetensors"), plain)
    assert "quantization_config" not in read_config(tmp_path / "again")


def test_every_code_is_the_number_of_torch() -> None:
    from smtrain.worker.checkpoint.huggingface.fp8_tensors import _numbers

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.from_numpy(_numbers()).nan_to_num(7777), codes.nan_to_num(7777))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_block_size": None}, "config.json names fp8, and"),
        ({"weight_block_size": [4, 4]}, r"fp8 of \[\d+, \d+\] with float32 factors"),
        ({"fmt": "e5m2"}, r"FineGrainedFP8Config\(dequantize=True\)"),
    ],
)
def test_other_forms_of_fp8_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    fp8_folder(tmp_path / "hf")
    settings = {**CONFIG["quantization_config"], **change}
    (tmp_path / "hf/config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": settings})
    )
    with pytest.raises(CheckpointError, match=words):
        HFSource(tmp_path / "hf")


def test_a_matrix_without_its_factors_is_refused(tmp_path: Path) -> None:
    fp8_folder(tmp_path / "hf")
    file, name = tmp_path / "hf/model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    stored = load_file(file)
    save_file({n: t for n, t in stored.items() if n != f"{name}_scale_inv"}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj\.weight is float8_e4m3fn"):
        HFSource(tmp_path / "hf")
    save_file({n: t for n, t in stored.items() if n != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale_inv and no"):
        HFSource(tmp_path / "hf")
