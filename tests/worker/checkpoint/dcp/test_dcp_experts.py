"""Experts in folders of torch.distributed.checkpoint: transformers 5 has one tensor of all experts
of a layer, which FSDP cuts between experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dcp.state import DcpState
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.targets import HuggingFace, Native
from smtrain.worker.checkpoint.training_state import Kind
from smtrain.worker.engine.native.dcp_planner import Chunk, ChunkPlanner
from tests.worker.checkpoint.folders import LLAMA, random_weights, same, weights_of

# It has no process group, and needs none.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EXPERTS, INNER = 4, 6
CONFIG: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
STACKS = "model.layers.0.mlp.experts"


def stacked(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of transformers 5."""
    out = {name: tensor for name, tensor in weights.items() if ".experts." not in name}

    def of(part: str) -> torch.Tensor:
        return torch.stack([weights[f"{STACKS}.{i}.{part}.weight"] for i in range(EXPERTS)])

    gate_up = torch.cat([of("gate_proj"), of("up_proj")], 1)
    return {**out, f"{STACKS}.gate_up_proj": gate_up, f"{STACKS}.down_proj": of("down_proj")}


def write(folder: Path, tensors: dict[tuple[str, ...], torch.Tensor], cut: int) -> None:
    """Write tensors in two chunks each, as two ranks of FSDP2 do."""
    chunks, values = dict[str, Chunk](), dict[str, torch.Tensor]()
    for path, tensor in tensors.items():
        rows = [slice(0, cut), slice(cut, len(tensor))] if tensor.dim() else [slice(0)]
        for part in rows:
            offsets = (part.start, *(0 for _ in tensor.shape[1:])) if tensor.dim() else ()
            name = f"{path} {part}"
            chunks[name] = Chunk(path, offsets, tuple(tensor.shape))
            values[name] = tensor[part] if tensor.dim() else tensor
    save({}, storage_writer=FileSystemWriter(folder), planner=ChunkPlanner(chunks, values, {}))


@pytest.fixture(params=[1, 3])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of accelerate's layout, with the cut between its two chunks after that expert."""
    shape = ModelShape.from_config(CONFIG)
    weights, out = random_weights(CONFIG), tmp_path / "from"
    model: dict[tuple[str, ...], torch.Tensor] = {
        ("model", name): tensor for name, tensor in stacked(weights).items()
    }
    write(out / "pytorch_model_fsdp_0", model, request.param)
    state: dict[tuple[str, ...], torch.Tensor] = {}
    for kind, factor in (("exp_avg", 2.0), ("exp_avg_sq", 3.0)):
        moments = stacked({spec.name: weights[spec.name] * factor for spec in shape.specs})
        state |= {("optimizer", "state", name, kind): value for name, value in moments.items()}
        state |= {("optimizer", "state", name, "step"): torch.tensor(7.0) for name in moments}
    write(out / "optimizer_0", state, request.param)
    (out / "config.json").write_text(json.dumps(CONFIG))
    return out


def test_stacks_in_chunks_are_read_as_single_experts(folder: Path, tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    source = open_weights(folder)
    assert same(weights_of(source), weights)
    state = DcpState.present(source)
    assert state is not None
    assert state.optimizer_steps == 7
    for name, tensor in weights.items():
        window = tuple((n // 3, n) for n in tensor.shape)
        area = tuple(slice(*span) for span in window)
        assert torch.equal(source.window(name, window), tensor[area])
        factors: dict[Kind, float] = {"exp_avg": 2.0, "exp_avg_sq": 3.0}
        for kind, factor in factors.items():
            numbers = torch.from_numpy(state.window(kind, name, window).view("<f4").copy())
            assert torch.equal(numbers, tensor[area] * factor)
    for target in (HuggingFace(), Native()):
        convert(folder, tmp_path / type(target).__name__, to=target)
        assert same(weights_of(open_weights(tmp_path / type(target).__name__)), weights)


def test_a_flipped_bit_in_a_stack_is_found(folder: Path) -> None:
    file = folder / "pytorch_model_fsdp_0" / "__0_0.distcp"
    weight = stacked(random_weights(CONFIG))[f"{STACKS}.down_proj"][-1].numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(weight) + 5] ^= 1
    file.write_bytes(data)
    source = open_weights(folder)
    # The first part of a stack checks all of it.
    source.check(f"{STACKS}.0.gate_proj.weight")
    with pytest.raises(CheckpointError, match="crc32 differs"):
        source.check(f"{STACKS}.0.down_proj.weight")
