"""Compilation and activation checkpointing change memory and speed, not the results."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from smtrain.worker.engine.native.layers import compiler_fault
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [("llama-tied-509", "221 sp"), ("qwen3", "212"), ("gpt_neox", "122 bf16"), ("gpt2", "411 sp")],
)
def test_attention_computed_again_gives_the_same_bits(name: str, text: str, four: World) -> None:
    kept, again = (
        four.run(cases.train, CONFIGS[name], mesh(t), 3)[0] for t in (text, f"{text} selective")
    )
    assert again == kept


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("SMTRAIN_COMPILED"),
    reason="compiles for minutes; SMTRAIN_COMPILED=1 runs it",
)
@pytest.mark.parametrize(
    ("name", "text"),
    [("llama", "221 sp selective"), ("gpt_neox", "221 sp selective"), ("mixtral", "212 ep2")],
)
def test_compiled_layers_give_the_same_numbers_but_for_rounding(
    name: str, text: str, four: World
) -> None:
    options = mesh(text)
    (plain, no_graphs), (compiled, graphs) = (
        four.run(cases.train_and_count_graphs, CONFIGS[name], replace(options, compile=on), 3)[0]
        for on in (False, True)
    )
    np.testing.assert_allclose(compiled, plain, rtol=1e-5)
    assert (no_graphs, graphs > 0) == (0, True)


def test_a_machine_without_a_compiler_trains_uncompiled_and_says_so(
    solo: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    plain = solo.run(cases.train, CONFIGS["llama"], mesh("111"), 1)[0]
    numbers, said = solo.run(
        cases.train_without_compiler, CONFIGS["llama"], replace(mesh("111"), compile=True)
    )[0]
    assert said == [
        "train.compile: the layers run uncompiled: torch.compile needs the C++ compiler"
        " no-compiler, which is not there"
    ]
    assert numbers == plain
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "g++" in (compiler_fault("cpu") or "")
