"""Adapters written by engine nxd in its cut are read like other native checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Layout, Shard
from smtrain.core.model.lora import AdapterShape, Lora, linears, lora_settings
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.manifest import Manifest, write_manifest
from smtrain.worker.checkpoint.native.files import (
    model_file,
    optimizer_file,
    read_by,
    write_safetensors,
)
from smtrain.worker.checkpoint.native.reader import NativeSource, StateReader

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 16,
}
SHAPE = ModelShape.from_config(CONFIG)
LORA = Lora(2, 4.0, targets=linears(SHAPE))


def part_of(factor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """A rank's part of a factor."""
    dim = shard.dim
    if dim is None:
        return factor
    return torch.cat(
        [factor.narrow(dim, start, stop - start) for start, stop in shard.ranges], dim
    ).contiguous()


def written(folder: Path, layout: Layout) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a tp 4 x pp 2 checkpoint with distinct numbers (moments: +100, +200); returns it and
    the whole factors.
    """
    checkpoint, at = folder / "step_00000003", 0
    whole = {}
    for spec in layout.shape.specs:
        numel = spec.shape[0] * spec.shape[1]
        whole[spec.name] = torch.arange(at, at + numel, dtype=torch.float32).view(spec.shape)
        at += numel
    files = {}
    tables = [layout.flat_table(stage) for stage in range(layout.pp)]
    for stage, table in enumerate(tables):
        for tp in range(layout.tp):
            parts = {}
            for name, _, _ in table.entries:
                parts[name] = part_of(whole[name], layout.shard(name, tp))
            flat = torch.cat([parts[name].reshape(-1) for name, _, _ in table.entries])
            moments = {"exp_avg": flat + 100, "exp_avg_sq": flat + 200}
            for file, tensors in (
                (model_file(tp, stage), parts),
                (optimizer_file(0, tp, stage), moments),
            ):
                files[file] = write_safetensors(checkpoint / file, tensors)
    manifest = Manifest(
        3,
        3,
        {"tp": 4, "pp": 2, "dp": 1},
        "fp32",
        CONFIG,
        [[list(e) for e in t.entries] for t in tables],
        [t.size for t in tables],
        files,
        {},
        {s.name: list(s.shape) for s in layout.shape.specs},
        adapter=lora_settings(LORA),
        cut={"kv_order": "tiled", "pipeline_cuts": [0]},
    )
    write_manifest(checkpoint, manifest)
    return checkpoint, whole


def test_trn1s_order_of_repeated_heads_and_uneven_stages_are_read_whole_and_cut_anew(
    tmp_path: Path,
) -> None:
    checkpoint, whole = written(tmp_path, Layout(AdapterShape.of(SHAPE, LORA), 4, 2, "tiled", (0,)))
    source, reader = NativeSource(checkpoint), StateReader(checkpoint)
    other = Layout(AdapterShape.of(SHAPE, LORA), 2)
    for name, factor in whole.items():
        assert torch.equal(source.read(name), factor)
        part = part_of(factor, other.shard(name, 1))
        for kind, more in (("master", 0), ("exp_avg", 100), ("exp_avg_sq", 200)):
            assert torch.equal(reader.read(kind, name, other, 1), part + more)  # type: ignore[arg-type]
    mine = read_by(reader.manifest, (4, 2, 1), 0)
    assert mine == set(reader.manifest.files), (
        "a rank of engine native needs parts of other ranks' files"
    )


@pytest.mark.parametrize(
    "cut", [{"kv_order": "upwards"}, {"pipeline_cuts": [-1]}, {"stages": 2}, []]
)
def test_a_cut_that_nobody_writes_is_damage(tmp_path: Path, cut: object) -> None:
    checkpoint, _ = written(tmp_path, Layout(AdapterShape.of(SHAPE, LORA), 4, 2, "tiled", (0,)))
    changed = replace(Manifest.read(checkpoint), cut=cut)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"is damaged \(cut\)"):
        Manifest.parse(changed.to_json(), "here")
