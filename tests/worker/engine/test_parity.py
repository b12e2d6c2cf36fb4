"""The same numbers on every mesh, and those of plain transformers with torch's AdamW."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from smtrain.core.model.shape import LAYER, ModelShape
from tests import tiers
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World

# Config -> meshes (tp pp dp) and options; m2: micro-batches of two samples.
MESHES = {
    "llama": ["221", "221 l1-3", "122", "212", "411 sp", "141 m1", "114"],
    "llama-kv4": ["212 sp", "221 full"],
    "llama-kv1": ["221", "411"],
    "llama-tied-509": ["221 sp", "122"],
    "qwen2": ["221 sp full", "212"],
    "qwen2-window": ["122 m2"],
    "qwen3": ["221", "212 sp"],
    "mistral-window": ["122 full", "221 sp m2"],
    "smollm3": ["221 sp"],
    "smollm3-window": ["122 m2"],
    "granite": ["221 sp full", "122", "411"],
    "phi3": ["221 sp", "212"],
    "phi3-partial": ["411 sp full"],
    "phi3-long": ["221 sp", "122 m2"],
    "ministral": ["221 sp"],
    "seed_oss": ["212 sp"],
    "phi3-short": ["212"],
    "ministral3": ["221 sp"],
    "olmo2": ["221 sp", "411 sp full"],
    "olmo2-kv1": ["411", "212"],
    "olmo3": ["221 sp", "122 m2"],
    "gemma3": ["221 sp", "122 full", "212", "221 l3-1"],
    "gemma4": ["221 sp", "122 full", "411"],
    "gemma4-values": ["411 sp full", "212", "141 m1", "221 selective", "122 l1-3"],
    "gemma4_moe": ["212 ep2 sp", "221 sp", "122 ep2 full", "411", "114 ep4 m1"],
    "qwen3_5": ["221 sp", "122 full", "411", "122 l3-1"],
    "qwen3_5-tied": ["411 sp full", "212", "122 selective"],
    "deepseek_v3": ["212 sp ep2", "122 full l1-2", "411 sp", "211 cp2", "112 cp2 m2"],
    "deepseek_v3-sparse": ["411 sp full", "122 ep2", "221 selective"],
    "glm4_moe_lite": ["122 ep2 l2-1", "221 sp", "114 ep4"],
    "glm4_moe": ["212 sp ep2", "411", "122 full"],
    "minimax_m2": ["212 sp ep2", "411", "122 full"],
    "gpt_neox": ["221 sp full", "122"],
    "gpt_neox-sequential": ["212"],
    "gpt2": ["221 sp full", "122", "411 sp"],
    "gpt2-509": ["212", "141 m1"],
}
STEPS = {
    "llama": 20
}  # the rest, one family's names and parts each, tells as much in 6; the gate trains 3 of each
ALL = {"llama"}
"""Configs that the gate trains on all of their meshes; the rest on the first one."""
VARIANTS = {
    "deepseek_v3",  # test_router_bias.py
    "deepseek_v3-sparse",
    "glm4_moe_lite",
    "glm4_moe",
    "minimax_m2",  # its router is DeepSeek-V3's, its norms OLMoE's
    "llama-kv4",
    "qwen2-window",
    "smollm3-window",
    "olmo2-kv1",
    "olmo3",
    "gemma4-values",
    "qwen3_5-tied",
    "phi3-partial",
    "phi3-long",
    "ministral",
    "seed_oss",
    "phi3-short",
    "gpt_neox-sequential",
    "gpt2",
}
"""Configs whose family the gate trains in another one."""


def apart(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> tuple[float, float]:
    """Largest relative difference of loss and of grad norm."""
    a, b = np.array(left), np.array(right)
    loss, norm = np.abs(a - b).max(0) / np.abs(b).min(0)
    return float(loss), float(norm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if name in VARIANTS else [])
        for name in MESHES
        if name in CONFIGS
    ],
)
def test_losses_and_norms_agree(
    name: str,
    four: World,
    solo: World,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    config, count = CONFIGS[name], STEPS.get(name, 6) if tiers.full() else 3
    plain = solo.run(cases.plain, config, count)[0]
    single = solo.run(cases.train, config, mesh("111"), count)[0]
    rows = [("111", "transformers + AdamW", *apart(single, plain))]
    for text in MESHES[name] if tiers.full() or name in ALL else MESHES[name][:1]:
        ranks = four.run(cases.train, config, mesh(text), count)
        assert all(r == ranks[0] for r in ranks), "every rank must tell the same numbers"
        rows.append((text, "single process", *apart(ranks[0], single)))
    lines = [f"{name}: {count} steps, fp32, loss {single[0][0]:.4f} -> {single[-1][0]:.4f}"]
    lines += [
        f"  tp pp dp {m:12s} against {against:20s} loss {dl:.1e}  grad norm {dn:.1e}"
        for m, against, dl, dn in rows
    ]
    table = "\n".join(lines)
    (request.config.cache.mkdir("smtrain") / f"parity-{name}.txt").write_text(table + "\n")
    with capsys.disabled():
        print(f"\n{table}", file=sys.stderr)
    assert all(dl < 1e-5 and dn < 1e-5 for _, _, dl, dn in rows), table


@pytest.mark.sample(5)  # every family, every mesh
@pytest.mark.parametrize("name", ["llama-tied-509", "qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("text", ["221 sp", "122", "411"])
def test_logits_are_those_of_transformers(name: str, text: str, four: World, solo: World) -> None:
    config = CONFIGS[name]
    theirs = solo.run(cases.plain_logits, config)[0]
    answers = four.run(cases.look, config, mesh(text))
    tp, pp, dp = (int(c) for c in text[:3])
    has_logits = [i // (tp * dp) == pp - 1 for i in range(4)]
    assert [logits is not None for _, logits in answers] == has_logits
    for _, ours in answers:
        if ours is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("text", ["221", "122", "212 sp"])
def test_evaluation_is_the_loss_of_a_step(text: str, four: World) -> None:
    config: dict[str, Any] = CONFIGS["llama"]
    first = four.run(cases.train, config, mesh(text), 1)[0][0][0]
    losses = [loss for loss, _ in four.run(cases.look, config, mesh(text))]
    assert losses == pytest.approx([first] * 4, rel=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["llama-tied-509", "gemma4-values", "llama-kv1", "qwen3_5", "gpt2", "mixtral"]
)
def test_norms_of_parameters_count_each_number_once(name: str, four: World, solo: World) -> None:
    if name not in CONFIGS:
        pytest.skip("transformers lacks the family")
    config = CONFIGS[name]
    _, own = solo.run(cases.parameter_norms, config, mesh("111 norms"))[0]
    shape = ModelShape.from_config(config)
    whole, count = sum(norm**2 for norm in own.values()) ** 0.5, shape.layers
    layers = [
        [n**2 for name, n in own.items() if (m := LAYER.search(name)) and int(m[1]) == i]
        for i in range(count)
    ]
    expected = {f"layer_{i:02d}": sum(squares) ** 0.5 for i, squares in enumerate(layers)}
    meshes = ["221 norms", "122 norms l1-3", "212 sp norms bf16", "411 norms"]
    meshes = ["221 norms", "212 ep2 norms"] if name == "mixtral" else meshes
    for text in meshes if tiers.full() else meshes[:2]:
        told, _ = four.run(cases.parameter_norms, config, mesh(text))[0]
        assert told.total == pytest.approx(whole, rel=1e-5 if "bf16" not in text else 1e-3), text
        assert sum(norm**2 for norm in told.parts.values()) == pytest.approx(told.total**2)
        assert {part: told.parts[part] for part in expected} == pytest.approx(expected, rel=1e-3), (
            text
        )
        assert ("head" in told.parts) == (not shape.tied)


@pytest.mark.full
def test_halves_train(four: World, solo: World) -> None:
    bf16, fp16, fp32 = (
        four.run(cases.fit_one_batch, CONFIGS["llama"], mesh(m), 8)[0]
        for m in ("212 sp bf16", "212 sp fp16", "212")
    )
    assert fp32[-1] < fp32[0] - 0.2
    np.testing.assert_allclose(bf16, fp32, rtol=0.01)
    np.testing.assert_allclose(fp16, fp32, rtol=0.002)  # its numbers have 3 bits more
