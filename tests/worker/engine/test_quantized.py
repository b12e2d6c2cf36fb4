"""QLoRA: weights are those of bitsandbytes, and training is peft's with bitsandbytes in one
process.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.config.training import DpoSection
from smtrain.core.demo.inputs import save_tokenizer
from smtrain.core.model.layout import Shard
from smtrain.core.model.lora import another_adapter
from smtrain.core.model.quantized import cut_faults
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.adapter import QUANTIZED_KEY, quantized_header
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.nf4 import functional
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.engine.native import NativeEngine
from smtrain.worker.engine.native.quantized import QuantizedWeight
from smtrain.worker.generation.load import load
from tests.worker.engine import adapters, cases, preference
from tests.worker.engine.adapters import lora
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

CPU = torch.device("cpu")
LLAMA = cases.config("llama", hidden_size=128, head_dim=32, intermediate_size=256)
"""Each part of two tensor-parallel ranks has whole blocks."""
QWEN = cases.config(
    "qwen3", hidden_size=128, head_dim=32, intermediate_size=256, num_hidden_layers=2
)


def theirs(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    packed, state = functional().quantize_4bit(
        values, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return packed, state


def ours(values: torch.Tensor, shard: Shard | None = None) -> QuantizedWeight:
    out, into = values.shape
    weight = QuantizedWeight((out, into), (out, into), shard or Shard())
    weight.settle(weight.quantize(values), None, CPU)
    return weight


@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 130),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    zeros=st.booleans(),
    seed=st.integers(0, 9),
)
def test_weights_have_the_bits_of_bitsandbytes(
    rows: int, columns: int, scale: float, dtype: torch.dtype, zeros: bool, seed: int
) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    values[: rows // 2 + 1] *= not zeros
    values = values.to(dtype)
    weight, (packed, state) = ours(values), theirs(values)
    assert torch.equal(weight.packed, packed)
    assert torch.equal(weight.scales, state.absmax)
    assert torch.equal(weight.nested, state.state2.absmax)
    assert weight.offset == state.offset
    unpacked = weight.dequantize(dtype)
    state.shape = torch.Size(
        [1, rows * columns]
    )  # its CPU kernel misreads rows without a whole number of blocks
    assert torch.equal(unpacked, functional().dequantize_4bit(packed, state).view(rows, columns))
    widest = (
        0.16 * values.float().abs().amax()
    )  # half of the widest gap of NF4, and the rounding of scales
    assert bool(((unpacked.float() - values.float()).abs() <= widest).all())


@pytest.mark.parametrize(
    "shard",
    [
        Shard(0, ((0, 8), (24, 32))),
        Shard(0, ((5, 6),)),
        Shard(1, ((64, 192),)),
        Shard(1, ((0, 64), (192, 256))),
    ],
)
def test_a_part_of_a_matrix_has_the_weights_of_the_whole(shard: Shard) -> None:
    values = torch.randn(32, 256).bfloat16()
    whole = ours(values)
    cut = part(shard, values)
    weight = QuantizedWeight((cut.shape[0], cut.shape[1]), (32, 256), shard)
    scales, places = weight.quantize(cut), part(shard, torch.arange(128).view(32, 4), 64).flatten()
    assert torch.equal(
        scales, QuantizedWeight((32, 256), (32, 256), Shard()).quantize(values)[places]
    )
    weight.settle(scales, None, CPU)
    # The other ranks' scales come by a message.
    weight.nested, weight.offset, weight.scales = whole.nested, whole.offset, whole.scales[places]
    assert torch.equal(
        weight.dequantize(torch.bfloat16), part(shard, whole.dequantize(torch.bfloat16))
    )


def part(shard: Shard, matrix: torch.Tensor, size: int = 1) -> torch.Tensor:
    """The rows or columns of a shard; `size` columns of it are one of the matrix."""
    assert shard.dim is not None
    size = size if shard.dim == 1 else 1
    each = [matrix.narrow(shard.dim, a // size, (b - a) // size) for a, b in shard.ranges]
    return torch.cat(each, shard.dim)


@pytest.mark.parametrize(
    ("config", "text"),
    [(LLAMA, "111"), (LLAMA, "221"), (QWEN, "212 sp full"), (LLAMA, "122 m2")],
    ids=["one", "tp-pp", "tp-dp", "pp-dp"],
)
def test_training_is_that_of_peft_with_bitsandbytes(
    config: dict[str, Any], text: str, four: World, solo: World, tmp_path: Path
) -> None:
    adapter = lora(config, quantize="nf4")
    expected, factors = solo.run(adapters.peft, config, adapter)[0]
    ranks = (solo if text == "111" else four).run(
        adapters.train, config, mesh(text), adapter, tmp_path
    )
    np.testing.assert_allclose([r[0] for r in ranks[0]], [r[0] for r in expected], rtol=1e-6)
    np.testing.assert_allclose([r[1] for r in ranks[0]], [r[1] for r in expected], rtol=1e-5)
    trained = adapters.factors(tmp_path / "step_00000003")
    assert max(float(np.abs(trained[n].numpy() - factors[n]).max()) for n in trained) < 1e-6


def test_resuming_has_the_same_bits_on_the_same_base(four: World, tmp_path: Path) -> None:
    adapter = lora(LLAMA, quantize="nf4")
    four.run(adapters.train, LLAMA, mesh("221 bf16"), adapter, tmp_path / "a", 2)
    manifest = Manifest.read(tmp_path / "a/step_00000002")
    assert (manifest.precision, manifest.quantized_in) == ("fp32", "bf16")
    assert quantized_header(manifest) == {QUANTIZED_KEY: "nf4 bf16"}
    four.run(adapters.train, LLAMA, mesh("221 bf16"), adapter, tmp_path / "b", 4)
    four.run(
        adapters.resume,
        LLAMA,
        mesh("221 bf16"),
        adapter,
        tmp_path / "a/step_00000002",
        2,
        4,
        tmp_path / "c",
    )
    whole, resumed = (adapters.factors(tmp_path / f / "step_00000004") for f in ("b", "c"))
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)


@pytest.mark.full  # the gate has tests/worker/checkpoint/test_quantized_base.py
def test_the_merged_model_is_the_one_that_was_trained(solo: World, tmp_path: Path) -> None:
    adapter = lora(LLAMA, quantize="nf4")
    cases.transformers_model(LLAMA).save_pretrained(tmp_path / "base")
    save_tokenizer(["a text"], tmp_path / "base", vocabulary=300, end="<end>")
    solo.run(adapters.train, LLAMA, mesh("111"), adapter, tmp_path)
    checkpoint = tmp_path / "step_00000003"
    (expected,) = solo.run(adapters.logits, LLAMA, mesh("111"), adapter, checkpoint)
    base = BaseModel(tmp_path / "base")
    export(checkpoint, base, tmp_path / "merged", merge=True)
    (merged,) = solo.run(adapters.plain_logits, LLAMA, tmp_path / "merged")
    np.testing.assert_allclose(merged, expected[1], atol=2e-5)
    # The exported adapter names the form of its base, so that each reader gives it that base.
    export(checkpoint, base, tmp_path / "adapter")
    loaded = load(tmp_path / "base", adapter=tmp_path / "adapter")
    with torch.no_grad():
        logits = loaded.model(input_ids=cases.batch(LLAMA, 0)[0], use_cache=False).logits
    np.testing.assert_allclose(logits.numpy(), expected[1], atol=2e-5)
    export(checkpoint, base, tmp_path / "original", merge=True, merge_base="original")
    (original,) = solo.run(adapters.plain_logits, LLAMA, tmp_path / "original")
    assert float(np.abs(original - expected[1]).max()) > 1e-3


@pytest.mark.full
def test_twenty_steps_are_those_of_peft_with_bitsandbytes(solo: World, tmp_path: Path) -> None:
    adapter = lora(LLAMA, quantize="nf4", rank=16)
    expected, factors = solo.run(adapters.peft, LLAMA, adapter, 20)[0]
    (ours_,) = solo.run(adapters.train, LLAMA, mesh("111"), adapter, tmp_path, 20)
    np.testing.assert_allclose([r[0] for r in ours_], [r[0] for r in expected], rtol=1e-4)
    trained = adapters.factors(tmp_path / "step_00000020")
    assert max(float(np.abs(trained[n].numpy() - factors[n]).max()) for n in trained) < 1e-4


def first_preference(rank: int) -> float:
    """The first loss of DPO on a quantised base."""
    config = preference.described()
    adapter = lora(config, quantize="nf4")
    source = open_weights(preference.GOLDEN / "model", config)
    e = NativeEngine(config, mesh("111"), preference.OPTIMIZER, source, 0, adapter, DpoSection())
    references = preference.references_of(e, 2, preference.LIMIT * 4)
    return float(preference.stepped(e, 2, references, range(1))[0]["loss"])


def test_the_reference_of_dpo_is_the_quantised_base(solo: World) -> None:
    assert solo.run(first_preference) == [pytest.approx(math.log(2), abs=1e-6)]


def test_a_run_does_not_go_from_one_base_to_the_other() -> None:
    reason = another_adapter(lora(LLAMA, quantize="nf4"), lora(LLAMA))
    assert reason is not None
    assert "quantize nf4 there and None here" in reason


def test_linears_of_one_name_and_two_sizes_are_all_looked_at() -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "linear_value_head_dim": 64}
    experts = {"shared_expert_intermediate_size": 256, "intermediate_size": 64}
    shape = ModelShape.from_config({**CONFIGS["qwen3_next"], **sizes, **experts})
    faults = [fault for fault in cut_faults(shape, 2) if "down_proj" in fault]
    assert len(faults) == 1
    assert "would cut a block of 64 weights of down_proj (128 x 64) in two" in faults[0]


def test_a_mesh_that_cuts_blocks_is_refused_by_name() -> None:
    assert not [*cut_faults(ModelShape.from_config(LLAMA), 2)]
    first = next(cut_faults(ModelShape.from_config(CONFIGS["llama"]), 2))
    assert (
        first
        == "train.adapter.quantize: parallel.tp = 2 would cut a block of 64 weights of o_proj (64 x"
        " 64) in two; take a smaller parallel.tp"
    )
