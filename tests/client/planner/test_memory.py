"""Predicted against measured peaks of the native engine, in real processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from smtrain.client.planner.machines import GIB, Machine, Mesh, Work, named_shape
from smtrain.client.planner.memory import (
    TENSORS_SAVED_BY,
    checkpoint_bytes,
    core_memory,
    host_memory,
    saved_per_token,
    worst_core,
)
from smtrain.core.model.footprint import CHUNK_SCORES
from smtrain.core.model.hf_config import ACTIVATIONS
from smtrain.core.model.lora import Lora, targets_of
from smtrain.core.model.shape import ModelShape
from tests.client.planner.peaks import (
    ADAPTED,
    COMBINATIONS,
    CUT,
    LONG,
    MIXED,
    PAIRED,
    SHARDED_BASE,
    compare,
)
from tests.worker.engine.world import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    made = {size: World(size) for size in (1, 2, 4)}
    yield made
    for world in made.values():
        world.stop()


# In the gate: each precision and way to recompute, and each direction of the mesh.
GATE = {
    ("llama", "221 m1 bf16 sp"),
    ("mistral", "121 m1 full"),
    ("qwen3", "211 m2 selective"),
    ("gpt_neox", "112 m2 bf16"),
    ("qwen3_5_text", "111 m2 full bf16"),
    ("qwen3_moe", "112 m2 ep2 bf16"),
    ("gpt2", "111 m2 bf16"),
}
ADAPTED_GATE = {("gpt_neox", "111 m2 bf16")}


def gate(combinations: list[tuple[str, str]], kept: set[tuple[str, str]]) -> list[Any]:
    assert kept <= set(combinations)
    return [
        pytest.param(*one, marks=[] if one in kept else [pytest.mark.full]) for one in combinations
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), gate(COMBINATIONS, GATE))
def test_the_predicted_peak_is_within_a_tenth_of_the_measured(
    family: str, mesh: str, worlds: dict[int, World]
) -> None:
    """A tenth is what docs promise.

    All are within 2 % today, so a prediction a tenth too low fails.
    """
    for stage, measured, predicted in compare(family, mesh, worlds):
        assert predicted == pytest.approx(measured, rel=0.05), f"stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), gate(ADAPTED, ADAPTED_GATE))
def test_so_it_is_with_lora(family: str, mesh: str, worlds: dict[int, World]) -> None:
    for stage, measured, predicted in compare(family, mesh, worlds, adapted=True):
        assert predicted == pytest.approx(measured, rel=0.05), f"stage {stage}"


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh"), SHARDED_BASE)
def test_so_it_is_with_a_sharded_base(family: str, mesh: str, worlds: dict[int, World]) -> None:
    for stage, measured, predicted in compare(family, mesh, worlds, adapted=True):
        assert predicted == pytest.approx(measured, rel=0.08), f"stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize(
    # In fp32, which no one takes for it, full recomputation is planned 6 % too high.
    "mesh",
    ["111 m2 bf16", pytest.param("111 m4 full bf16", marks=[pytest.mark.full])],
)
def test_so_it_is_with_a_base_in_4_bits(mesh: str, worlds: dict[int, World]) -> None:
    for stage, measured, predicted in compare("llama", mesh, worlds, adapted=True, quantized=True):
        assert predicted == pytest.approx(measured, rel=0.05), f"stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), gate(PAIRED, {("llama", "221 m1 bf16 sp")}))
def test_so_it_is_with_pairs_and_the_reference_s_pass(
    family: str, mesh: str, worlds: dict[int, World]
) -> None:
    for stage, measured, predicted in compare(family, mesh, worlds, paired=True):
        assert predicted == pytest.approx(measured, rel=0.03), f"stage {stage}"


@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh"), CUT)
def test_so_it_is_with_rows_cut_over_ranks(
    family: str, mesh: str, worlds: dict[int, World]
) -> None:
    for stage, measured, predicted in compare(family, mesh, worlds, seq_len=LONG, batch=4):
        assert predicted == pytest.approx(measured, rel=0.03), f"stage {stage}"


@pytest.mark.full  # the next tests find a mask or scores that are counted
@pytest.mark.parametrize(
    ("family", "mesh", "packed"),
    [
        ("llama", "111 m2 bf16", True),
        ("mistral", "111 m2 bf16", False),
        ("gpt_oss", "111 m2 bf16", False),
        ("llama", "111 cp2 m2 bf16", True),
    ],
)
def test_so_it_is_with_documents_in_place_of_masks(
    family: str, mesh: str, packed: bool, worlds: dict[int, World]
) -> None:
    for stage, measured, predicted in compare(
        family, mesh, worlds, seq_len=256, batch=4, packed=packed, varlen=True
    ):
        assert predicted == pytest.approx(measured, rel=0.03), f"stage {stage}"


# the next test finds an uncounted mask, tests/worker/engine/test_experts.py runs the rows
@pytest.mark.full
@pytest.mark.parametrize(("family", "mesh", "tokens", "packed"), MIXED)
def test_so_it_is_with_experts_and_packed_rows(
    family: str, mesh: str, tokens: int, packed: bool, worlds: dict[int, World]
) -> None:
    for stage, measured, predicted in compare(
        family, mesh, worlds, seq_len=tokens, batch=4, packed=packed
    ):
        assert predicted == pytest.approx(measured, rel=0.03), f"stage {stage}"


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_what_an_activation_keeps_is_what_torch_saves_of_it(name: str) -> None:
    import torch
    from transformers.activations import ACT2FN

    inner = torch.randn(64, requires_grad=True) * 1.0
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        output = ACT2FN[name](inner)
    places = {
        tensor.untyped_storage().data_ptr() for tensor in saved if tensor.numel() == inner.numel()
    }
    assert TENSORS_SAVED_BY.get(name, 1) == len(places - {output.untyped_storage().data_ptr()})


@pytest.mark.full  # the gate's combinations have the same moments with one piece
@pytest.mark.parametrize(
    ("family", "mesh", "adapted", "paired"),
    [
        ("llama", "111 m4 full bf16", False, False),
        ("gemma3_text", "111 m4 full bf16", False, False),
        ("llama", "111 m4 full bf16", True, False),
        ("llama", "111 m4 full bf16", False, True),
    ],
)
def test_so_it_is_with_a_loss_of_several_pieces(
    family: str, mesh: str, adapted: bool, paired: bool, worlds: dict[int, World]
) -> None:
    for stage, measured, predicted in compare(
        family, mesh, worlds, adapted, paired, seq_len=LONG, batch=4
    ):
        assert predicted == pytest.approx(measured, rel=0.03), f"stage {stage}"


def test_a_row_of_64k_tokens_is_not_bound_by_its_logits() -> None:
    """1B of Llama 3.2 on one GPU, computed again in the backward pass: 119.7 GiB with whole logits,
    as was measured.
    """
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    sizes |= {
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    }
    shape = ModelShape.from_config(
        {"model_type": "llama", "max_position_embeddings": 1 << 17, **sizes}
    )
    need = core_memory(
        Work(shape, 1 << 16, 1), Machine.of("ml.p5e.48xlarge", 1), Mesh(1, 1, 1, 1, "full"), 0
    )
    assert need.logits == 0  # at the peak, which is a layer's backward pass
    assert need.total / GIB - 1 < 34  # the runtime's reserve apart


def test_every_layer_keeps_the_mask_of_packed_rows_but_on_gpus() -> None:
    shape = named_shape(
        "llama-2-7b"
    )  # as many heads of keys as of queries, which a mask does not multiply
    assert shape is not None
    for name, masks in (("ml.trn2.48xlarge", 1), ("ml.p5.48xlarge", 0)):
        machine, mesh = Machine.of(name, 1), Mesh(1, 1, 8, 2)
        packed, plain = (
            core_memory(Work(shape, 4096, 16, separates_documents=apart), machine, mesh, 0)
            for apart in (True, False)
        )
        assert packed.activations - plain.activations == pytest.approx(
            masks * 32 * 2 * 4096**2 * 2
        ), name
        assert packed.buffers - plain.buffers == pytest.approx(masks * 2 * 4096**2, abs=1), name


def test_gpus_keep_no_scores_of_sinks() -> None:
    sinks = named_shape("gpt-oss-20b")
    assert sinks is not None
    masked, by_documents = (
        saved_per_token(Work(sinks, 1024, 8, varlen=on), Mesh(8, 1, 1)) for on in (False, True)
    )
    assert masked - by_documents > 6 * sinks.heads / 8 * 1024


def test_gpus_hold_the_scores_of_a_chunk_that_flash_attention_does_not_take() -> None:
    small, gpu = named_shape("llama-3.1-8b"), Machine.of("ml.p5.48xlarge", 1)
    assert small is not None
    mesh, wide = Mesh(8, 1, 1, recompute="full"), replace(small, head_dim=512)
    lora = Lora(
        8, 16.0, targets=targets_of(small, ("all-linear",))
    )  # whose optimizer needs no buffers to speak of
    works = (
        Work(small, 8192, 8, lora=lora),
        Work(small, 8192, 8, "fp32", lora=lora),
        Work(wide, 8192, 8, lora=lora),
    )
    half, single, large = (core_memory(work, gpu, mesh, 0) for work in works)
    scores = 4 * 1024 * 8192
    assert scores < CHUNK_SCORES
    assert single.buffers > 16 * scores
    assert large.buffers > 12 * scores > half.buffers


def test_there_are_combinations_of_everything() -> None:
    text = " ".join(f"{f} {m}" for f, m in COMBINATIONS)
    assert len(COMBINATIONS) >= 12
    for word in (
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gpt_neox",
        "full",
        "sp",
        "bf16",
        "m1",
        "m2",
        "m4",
    ):
        assert word in text.split()


TRN1 = 16 * GIB


def total(
    name: str, hosts: int, mesh: Mesh, seq_len: int = 4096, batch: int = 1024, again: bool = True
) -> float:
    shape = named_shape(name)
    assert shape is not None
    machine = Machine.of("ml.trn1.32xlarge", hosts)
    return worst_core(Work(shape, seq_len, batch, gathers_again=again), machine, mesh)[1].total


@pytest.mark.parametrize(
    ("name", "hosts", "mesh", "seq_len"),
    [
        ("llama-2-70b", 32, Mesh(32, 4, 8, 1, "selective", True), 4096),
        ("llama-2-70b", 32, Mesh(32, 8, 4, 1, "selective", True), 4096),
        ("llama-3.1-70b", 32, Mesh(32, 8, 4, 1, "selective", True), 8192),
        ("gpt-neox-20b", 4, Mesh(8, 4, 4, 1, "full", True), 2048),
        ("llama-2-13b", 32, Mesh(8, 4, 32, 1, "selective", True), 4096),
        ("llama-3.1-8b", 32, Mesh(32, 1, 32, 1, "selective", True), 8192),
        ("pythia-6.9b", 1, Mesh(8, 1, 4, 2, "full", True), 2048),
    ],
)
def test_what_was_published_fits(name: str, hosts: int, mesh: Mesh, seq_len: int) -> None:
    assert total(name, hosts, mesh, seq_len) < TRN1


def test_a_70b_over_eight_cores_does_not_fit_however_much_is_recomputed() -> None:
    assert total("llama-3-70b", 32, Mesh(8, 1, 128, 1, "full", True), 8192) > 3 * TRN1


def test_the_first_stage_holds_most_micro_batches_and_the_last_the_logits() -> None:
    shape = named_shape("llama-2-70b")
    assert shape is not None
    machine, mesh = Machine.of("ml.trn1.32xlarge", 32), Mesh(8, 4, 32, 1, "none", True)
    stages = [core_memory(Work(shape, 4096, 1024), machine, mesh, s) for s in range(4)]
    kept = [s.activations for s in stages]
    assert kept == sorted(kept, reverse=True)
    assert [s.logits > 0 for s in stages] == [False, False, False, True]


def test_a_snapshot_doubles_the_state_on_the_host() -> None:
    shape = named_shape("llama-2-70b")
    assert shape is not None
    machine, mesh = Machine.of("ml.trn1.32xlarge", 16), Mesh(32, 8, 2, 1, "full", True)
    work = Work(shape, 4096, 1024, gathers_again=True)
    host = host_memory(work, machine, mesh)
    assert host_memory(replace(work, gathers_again=False), machine, mesh).async_save == host.save
    assert host.async_save - host.save == pytest.approx(host.save - 32 * 8 * GIB)
    assert 270e9 < host.async_save < 482e9  # what was reported of 70B on hosts of 512 GiB
    assert checkpoint_bytes(Work(shape, 4096, 1024)) == 14 * shape.parameters()
