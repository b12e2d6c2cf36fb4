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
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from smtrain.core.errors import CheckpointError
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dcp.state import DcpState
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.summary import verify
from smtrain.worker.checkpoint.targets import Dcp, HuggingFace, Native
from smtrain.worker.checkpoint.training_state import Kind
from smtrain.worker.engine.native.dcp_planner import ChunkPlanner, TensorChunk
from tests.worker.checkpoint.dcp.test_dcp import with_settings
from tests.worker.checkpoint.folders import LLAMA, NEOX, hf_folder, random_weights, same, weights_of

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
ACCELERATE = Dcp(form="accelerate")
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
    chunks, values = dict[str, TensorChunk](), dict[str, torch.Tensor]()
    for path, tensor in tensors.items():
        rows = [slice(0, cut), slice(cut, len(tensor))] if tensor.dim() else [slice(0)]
        for part in rows:
            offsets = (part.start, *(0 for _ in tensor.shape[1:])) if tensor.dim() else ()
            name = f"{path} {part}"
            chunks[name] = TensorChunk(path, offsets, tuple(tensor.shape))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_written_as_transformers_state_dict_and_comes_back(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = random_weights(CONFIG, dtype)
    convert(hf_folder(tmp_path / "hf", CONFIG, dtype), tmp_path / "dcp", to=ACCELERATE)
    dcp_to_torch_save(tmp_path / "dcp" / "pytorch_model_fsdp_0", tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt")["model"], stacked(weights))
    assert same(weights_of(open_weights(tmp_path / "dcp")), weights)
    assert verify(tmp_path / "dcp") == len(weights)


@pytest.mark.parametrize("family", ["mixtral", "gpt_neox"])
def test_names_of_modules_that_files_do_not_have_are_written_and_read(
    family: str, tmp_path: Path
) -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "mixtral" else {}
    config = {**(LLAMA if experts else NEOX), "model_type": family, **experts}
    weights = random_weights(config)
    convert(hf_folder(tmp_path / "hf", config), tmp_path / "dcp", to=ACCELERATE)
    dcp_to_torch_save(tmp_path / "dcp" / "pytorch_model_fsdp_0", tmp_path / "all.pt")
    names = torch.load(tmp_path / "all.pt")["model"].keys()
    module, file = {
        "mixtral": (
            "model.layers.0.mlp.gate.weight",
            "model.layers.0.block_sparse_moe.gate.weight",
        ),
        "gpt_neox": ("lm_head.weight", "embed_out.weight"),
    }[family]
    assert module in names
    assert file not in names
    assert same(weights_of(open_weights(tmp_path / "dcp")), weights)


def test_moments_of_a_run_are_written_and_come_back(folder: Path, tmp_path: Path) -> None:
    run, weights = with_settings(tmp_path / "run", folder), random_weights(CONFIG)
    convert(run, tmp_path / "dcp", to=ACCELERATE)
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        contents = []
        for at in (folder, tmp_path / "dcp"):
            dcp_to_torch_save(at / part, tmp_path / "all.pt")
            contents.append(torch.load(tmp_path / "all.pt"))
        if part == "optimizer_0":
            states = [content["optimizer"]["state"] for content in contents]
            assert states[0].keys() == states[1].keys()
            assert all(same(states[0][name], states[1][name]) for name in states[0])
        else:
            assert same(contents[0]["model"], contents[1]["model"])
    state = DcpState.present(open_weights(tmp_path / "dcp"))
    assert state is not None
    for name, tensor in weights.items():
        numbers = torch.from_numpy(state.window("exp_avg", name).view("<f4").copy())
        assert torch.equal(numbers, tensor * 2)


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
