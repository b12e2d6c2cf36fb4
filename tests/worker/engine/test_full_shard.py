"""Full sharding (FSDP2): the numbers of one process and of ZeRO-1, and the same checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smtrain.core.model.shape import ModelShape
from tests import tiers
from tests.worker.engine import adapters, cases, full_shard_runs, preference
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.test_parity import apart
from tests.worker.engine.test_persist import whole_state
from tests.worker.engine.test_preference import off
from tests.worker.engine.world import World

MESHES = {
    "llama-tied-509": ["122 m2", "212 sp", "122 full m1", "114"],
    "llama": ["114 m1", "212", "114 selective", "112 cp2", "111 cp4", "121 cp2"],
    "llama-kv1": ["212"],
    "qwen3": ["114", "212 sp", "122", "112 cp2"],
    "gemma3": ["212 sp", "122 full", "122 m1", "112 cp2", "114"],
    "gemma4": ["122 m1"],
    "qwen3_moe": [
        *("212", "122", "114 m2", "112 cp2"),
        *("114 ep2 m2", "212 ep2 sp", "122 ep2 m2 full", "114 ep4 m2", "112 cp2 ep2"),
    ],
    "gpt_oss": ["212", "122", "212 ep2 sp", "114 ep2 m2"],
    "deepseek_v3": ["212", "122 u0.05", "114 ep2 m2 u0.05", "212 ep2", "122 ep2 m1", "114 ep4 m2"],
    "gemma4_moe": ["114 ep2 m2"],
    "qwen3_next": ["122"],
    "qwen3_5": ["212"],
    "gpt2-509": ["212", "122"],
    "olmo2": ["212"],
    "phi3": ["212"],
}
"""Config -> meshes as in test_parity."""
GATE = "llama-tied-509", "122 m2"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(name, text, marks=[] if (name, text) == GATE else pytest.mark.full)
        for name, texts in MESHES.items()
        for text in texts
        if name in CONFIGS
    ],
)
def test_losses_and_norms_agree(name: str, text: str, four: World, solo: World) -> None:
    config, count = CONFIGS[name], 6 if tiers.full() else 3
    options = mesh(text)
    sharded = four.run(cases.train, config, replace(options, shard="full"), count)
    assert all(r == sharded[0] for r in sharded), "every rank must tell the same numbers"
    one = replace(options, tp=1, pp=1, dp=1, cp=1, ep=1, sequence_parallel=False)
    single = solo.run(cases.train, config, one, count)[0]
    zero1 = four.run(cases.train, config, options, count)[0]
    # An auxiliary loss is a mean over micro-batches, and cp cuts those of one process.
    if (name, options.cp) != ("qwen3_moe", 2):
        assert max(apart(sharded[0], single)) < 1e-5
    assert max(apart(sharded[0], zero1)) < 1e-6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-tied-509", "122 m2 bf16"),
        pytest.param("llama", "212", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "122", marks=pytest.mark.full),
        pytest.param("gemma4", "212 sp bf16", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "122 bf16 u0.05", marks=pytest.mark.full),
        pytest.param("llama", "112 cp2 bf16", marks=pytest.mark.full),
        pytest.param("qwen3_moe", "114 ep2 bf16", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "122 ep2 u0.05", marks=pytest.mark.full),
        pytest.param("gpt_oss", "212 ep2 sp", marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_a_checkpoint_continues_fully_sharded_or_not(
    name: str, text: str, four: World, tmp_path: Path
) -> None:
    config, zero1 = CONFIGS[name], mesh(text)
    sharded = replace(zero1, shard="full")
    unbroken = four.run(cases.train_and_save, config, sharded, tmp_path / "full", 2, 4)[0]
    checkpoint = tmp_path / "full" / "step_00000002"
    for state, resumed in four.run(cases.resume, config, sharded, checkpoint, 2, 4):
        assert state == {"consumed": 16}
        assert resumed == unbroken, "bit for bit"
    # ZeRO-1 reads and writes the same bits.
    four.run(cases.save_again, config, zero1, checkpoint, tmp_path / "zero1", 2)
    again = tmp_path / "zero1" / "step_00000002"
    left, right = whole_state(checkpoint), whole_state(again)
    assert all(np.array_equal(left[key], right[key]) for key in left)
    weights, rewritten = cases.read_all(checkpoint), cases.read_all(again)
    assert all(torch.equal(weights[key], rewritten[key]) for key in rewritten)
    # And the other way, also from another mesh.
    sources = [again]
    if tiers.full():
        options = text[3:].replace("cp2", "").replace("ep2", "")
        stages = "141" if config["num_hidden_layers"] >= 4 else "122"
        other = mesh(f"{'411' if text[0] == '1' else stages} {options}")
        four.run(cases.save_again, config, other, checkpoint, tmp_path / "other", 2)
        sources.append(tmp_path / "other" / "step_00000002")
    for source in sources:
        _, resumed = four.run(cases.resume, config, sharded, source, 2, 4)[0]
        assert resumed == unbroken, "bit for bit"


@pytest.mark.full
@pytest.mark.parametrize("text", ["114 bf16", "212 bf16", "122 bf16 m2"])
def test_forward_passes_use_the_rounded_masters(text: str, four: World) -> None:
    """The first losses have the bits of ZeRO-1's."""
    config, options = CONFIGS["llama"], mesh(text)
    sharded = four.run(cases.train, config, replace(options, shard="full"), 1)[0]
    assert sharded[0][0] == four.run(cases.train, config, options, 1)[0][0][0]


@pytest.mark.full
def test_a_rank_keeps_its_rows_only(four: World) -> None:
    config = CONFIGS["llama"]
    total = ModelShape.from_config(config).parameters()
    counted = four.run(full_shard_runs.numbers, config, mesh("114 shards"))
    assert sum(own for own, _, _ in counted) == total
    for own, padding, gathered in counted:
        assert own + padding == pytest.approx(total / 4, rel=1e-3)
        assert gathered == 0


@pytest.mark.full
@pytest.mark.parametrize("text", ["114 shards", "212 sp shards", "122 m1 shards"])
def test_an_evaluation_has_the_weights_of_the_last_step(text: str, four: World) -> None:
    for evaluated, stepped in four.run(
        full_shard_runs.after_an_evaluation, CONFIGS["llama-tied-509"], mesh(text)
    ):
        assert evaluated == pytest.approx(stepped, rel=1e-6)
        assert stepped[2] < stepped[1] < stepped[0]


@pytest.mark.full
@pytest.mark.parametrize("text", ["221", "122 m2"])
def test_logits_and_norms_of_parameters_are_those_of_zero_1(text: str, four: World) -> None:
    config, options = CONFIGS["llama-tied-509"], mesh(f"{text} norms")
    sharded: Any = replace(mesh("122 m2 norms"), shard="full")
    ours, theirs = (four.run(cases.parameter_norms, config, o)[0][0] for o in (sharded, options))
    assert ours.total == pytest.approx(theirs.total, rel=1e-6)
    assert ours.parts == pytest.approx(theirs.parts, rel=1e-6)
    looks = zip(
        four.run(cases.look, config, sharded),
        four.run(cases.look, config, mesh("122 m2")),
        strict=True,
    )
    for (loss, logits), (expected_loss, expected_logits) in looks:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        if logits is not None:
            np.testing.assert_allclose(logits, expected_logits, atol=1e-5, rtol=0)


@pytest.mark.full
def test_a_step_that_overflows_changes_nothing(four: World) -> None:
    for skipped, is_same, updates in four.run(
        full_shard_runs.overflow, CONFIGS["llama-tied-509"], mesh("122 fp16 m2 shards")
    ):
        assert skipped.scaling == (2.0**60, 2.0**59, True)
        assert is_same
        assert updates == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "kind", "packed"),
    [("114 m1", "sigmoid_sft", 1), ("212 m1", "ipo", 2), ("122 m2", "sigmoid", 1)],
)
def test_pairs_have_trl_s_numbers(text: str, kind: str, packed: int, four: World) -> None:
    for ours in four.run(preference.steps, mesh(f"{text} shards"), kind, packed):
        assert off(ours, kind) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-tied-509", "122 m2"),
        ("qwen3", "212 sp bf16"),
        ("qwen3_moe", "114 m2"),
        ("qwen3_moe", "114 ep2 m2 bf16"),
        ("gpt_oss", "212 ep2"),
    ],
)
def test_adapters_have_the_bits_of_zero_1(
    name: str, text: str, four: World, tmp_path: Path
) -> None:
    """Only their frozen base is cut."""
    config, options = CONFIGS[name], mesh(text)
    adapter = adapters.lora(config, dropout=0.1)
    sharded, zero1 = (
        four.run(adapters.train, config, replace(options, shard=shard), adapter, tmp_path / shard)
        for shard in ("full", "optimizer")
    )
    assert sharded == zero1


@pytest.mark.full
def test_compiled_layers_have_the_same_numbers(four: World) -> None:
    config, options = CONFIGS["llama"], mesh("122 shards m2")
    plain = four.run(cases.train, config, options, 3)[0]
    losses, graphs = four.run(full_shard_runs.train_compiled, config, options)[0]
    assert graphs.count("training") == 1, "layers of one kind must share a graph"
    assert max(apart(losses, plain)) < 1e-5


@pytest.mark.full
def test_full_experts_leave_out_the_same_tokens(four: World) -> None:
    """With a capacity, which needs static shapes."""
    config, options = CONFIGS["deepseek_v3"], mesh("114 ep2 c1 m2")
    sharded = four.run(cases.train, config, replace(options, shard="full"), 3)[0]
    assert max(apart(sharded, four.run(cases.train, config, options, 3)[0])) < 1e-6
