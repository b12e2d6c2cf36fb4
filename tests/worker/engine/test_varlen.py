"""Attention by documents, the path of CUDA, has the numbers of masks, and no tensor of a row's
length squared.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from smtrain.core.model import footprint
from smtrain.worker.engine.native import attention_chunks, attention_flash, attention_sinks, varlen
from smtrain.worker.engine.native.attention import AttentionContext, positions_within
from smtrain.worker.engine.native.varlen import DocumentBounds, find_bounds
from tests.worker.engine import context_parallel_runs
from tests.worker.engine import varlen as runs
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.test_context_parallel import agree
from tests.worker.engine.world import World

SEGMENTS = torch.tensor([[0] * 5 + [1] + [2] * 7, [0] * 13])
"""Two rows of 13 tokens."""


def dense(positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[B, 1, S, S]: whether each query sees each key."""
    number, index = (positions == 0).cumsum(1), torch.arange(positions.shape[1])
    back = index[:, None] - index
    seen = (
        (number[:, :, None] == number[:, None])
        & (back >= 0)
        & (back < (window or positions.shape[1]))
    )
    return seen[:, None]


def attention(heads: int = 4, kv: int = 2, size: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(*SEGMENTS.shape, h, size, generator=generator).transpose(1, 2).requires_grad_()
        for h in (heads, kv, kv)
    ] + [torch.randn(heads, generator=generator).requires_grad_()]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_chunks_and_the_algebra_of_sinks_are_a_softmax_over_a_mask(
    window: int | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(footprint.QUERIES, "cpu", 4)
    positions = positions_within(SEGMENTS)
    documents = DocumentBounds.of(find_bounds(positions), torch.device("cpu"), False)._replace(
        window=window
    )
    q, k, v, column = attention()
    given = (q, k, v, column) if with_sinks else (q, k, v)
    ours = varlen.attend(q, k, v, documents, 0.3, column if with_sinks else None)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    nothing = torch.full_like(column, float("-inf"))
    theirs = attention_sinks.attend_block(
        q, keys, values, column if with_sinks else nothing, dense(positions, window), 0.3
    )
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-6, rtol=1e-6)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    for mine, other in zip(
        *(torch.autograd.grad((out * grad).sum(), given) for out in (ours, theirs.transpose(1, 2))),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_queries_of_a_part_of_a_row_see_the_keys_before_it(window: int | None) -> None:
    positions = positions_within(SEGMENTS)
    documents = DocumentBounds.of(
        find_bounds(positions, 4, 0, 9), torch.device("cpu"), False
    )._replace(window=window)
    assert documents.host.tolist() == [[0, 1, 2, 5, 10], [0, 5, 6, 9, 18]]
    q, k, v, _ = attention()
    ours = varlen.attend(q[:, :, 4:9], k[:, :, :9], v[:, :, :9], documents, None)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense(positions, window), enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs[:, :, 4:9].transpose(1, 2), atol=1e-6, rtol=1e-6)
    assert find_bounds(positions, 6, 2, 9).tolist() == [
        [0, 0, 0, 3, 6],
        [0, 3, 4, 7, 14],
    ]  # no query of the first two


def test_scores_of_a_chunk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_chunks, "CHUNK_SCORES", 2 * 128 * 1000)
    q = torch.zeros(1000, 2, 8, requires_grad=True)
    bounds = torch.tensor([[0, 1000], [0, 1000]], dtype=torch.int32)
    with runs.LargestSquare() as seen:
        out, lse = attention_chunks.forward(
            q.detach(), q.detach(), q.detach(), bounds, bounds, None, 1.0
        )
        attention_chunks.backward(
            out, q.detach(), q.detach(), q.detach(), out, lse, bounds, bounds, None, 1.0
        )
    assert seen.largest <= 128 * 1000


@pytest.mark.parametrize("size", [16, 20])
def test_the_kernel_of_flash_attention_takes_our_arguments(size: int) -> None:
    """torch's own shape functions of the operators, which know their signature."""
    bounds = torch.tensor([[0, 3, 6], [0, 3, 6]], dtype=torch.int32)
    q, k = (torch.empty(6, heads, size, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    for window in (None, 2):
        out, lse = attention_flash.forward(q, k, k, bounds.to("meta"), bounds, window, 0.5)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 6), torch.float32)
        made = attention_flash.backward(
            out, q, k, k, out, lse, bounds.to("meta"), bounds, window, 0.5
        )
        assert [x.shape for x in made] == [q.shape, k.shape, k.shape]


def test_one_rule_chooses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert attention_flash.flash_fault(gpu, bf16, 256) is None
    assert "not float32" in str(attention_flash.flash_fault(gpu, torch.float32, 64))
    assert "at most 256 numbers, and this model has 512" in str(
        attention_flash.flash_fault(gpu, bf16, 512)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "Ampere" in str(attention_flash.flash_fault(gpu, torch.float16, 64))
    assert attention_flash.flash_fault(torch.device("cpu"), bf16, 64) is not None


def test_a_job_says_once_that_attention_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cuda"), cp=1)
    AttentionContext({}, (None, 4), torch.float32, mesh, [64, 64], False)
    assert [record.message for record in caplog.records] == [
        "attention of 2 of 2 layers runs in chunks of plain torch, which is slower: FlashAttention"
        " cannot compute it, because it takes bfloat16 and float16 (train.precision), not float32"
    ]


CASES = [("gpt_oss", "documents"), ("gemma4", "lora"), ("llama", "dpo")]
"""Sinks with windows; windows of whole rows, and two head sizes; pairs of answers."""


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        *CASES,
        *(
            pytest.param(name, one, marks=pytest.mark.full)
            for name in CONFIGS
            for one in ("documents", "text")
        ),
    ],
)
def test_steps_have_the_numbers_of_masks(name: str, objective: Any, solo: World) -> None:
    ours, theirs = (
        solo.run(runs.steps, CONFIGS[name], mesh("111"), objective, on)[0] for on in (True, False)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "text", "objective"),
    [
        ("llama", "211 cp2 sp", "dpo"),
        ("mistral-window", "221 sp full", "documents"),
        ("gpt_oss", "122", "text"),
        ("gemma3", "211 cp2 sp", "lora"),
        ("qwen3_5", "212 selective m1", "documents"),
    ],
)
def test_meshes_have_the_numbers_of_masks(
    name: str, text: str, objective: Any, four: World
) -> None:
    ours, theirs = (
        four.run(runs.steps, CONFIGS[name], mesh(text), objective, on) for on in (True, False)
    )
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "text", "apart"),
    [
        ("gpt_oss", "111 cp4", True),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("gpt_oss", "111 cp4", False),
                ("qwen3_5", "211 cp2 sp", True),
                ("gemma4", "121 cp2 full", True),
                ("gemma4", "211 cp2 selective", False),
                ("mistral-window", "112 cp2 m2", True),
                ("gpt2", "121 cp2", False),
            )
        ),
    ],
)
def test_every_gradient_of_cut_rows_is_that_of_whole_rows_with_masks(
    name: str, text: str, apart: bool, solo: World, four: World, tmp_path: Path
) -> None:
    (one,) = solo.run(
        context_parallel_runs.gradients, CONFIGS[name], mesh("111"), tmp_path / "one", apart
    )
    ranks = four.run(
        context_parallel_runs.gradients,
        CONFIGS[name],
        mesh(text),
        tmp_path / "cut",
        apart,
        32,
        True,
    )
    agree(ranks, one, tmp_path / "cut", tmp_path / "one")


LENGTH = 160
SMALL = {"vocab_size": 48, "hidden_size": 64, "sliding_window": 24}


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("gpt_oss", "text"),
        ("mistral-window", "text"),
        ("mistral-window", "documents"),
        ("llama", "dpo"),
    ],
)
def test_no_tensor_has_a_row_s_length_squared(name: str, objective: Any, solo: World) -> None:
    config = {**CONFIGS[name], **SMALL, "max_position_embeddings": LENGTH}
    length = (
        LENGTH if objective != "dpo" else 700
    )  # of the golden model, which has a larger vocabulary
    largest, operator, calls = solo.run(
        runs.largest_square, config, mesh("111 m1"), objective, length
    )[0]
    assert largest < length**2, operator
    assert calls > 4, "attention did not take documents"
    if name == "mistral-window":  # the measure sees masks
        masked = solo.run(runs.largest_square, config, mesh("111 m1"), objective, length, False)[0]
        assert masked[0] == length**2


def test_no_tensor_of_cut_rows_has_a_row_s_length_squared(four: World) -> None:
    config = {**CONFIGS["mistral-window"], **SMALL, "max_position_embeddings": LENGTH}
    for largest, operator, calls in four.run(
        runs.largest_square, config, mesh("111 cp4 m1"), "documents", LENGTH
    ):
        assert largest < LENGTH**2, operator
        assert calls > 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_other_documents_make_no_other_graph(backend: str, solo: World) -> None:
    config = {**CONFIGS["mistral-window"], "num_hidden_layers": 1}
    plain = solo.run(runs.recompilations, config, mesh("111"), "none")[0][2]
    graphs, breaks, numbers = solo.run(runs.recompilations, config, mesh("111"), backend)[0]
    np.testing.assert_allclose(numbers, plain, rtol=1e-5)
    assert graphs[0] > 0
    assert graphs[2:] == graphs[2:3] * 4, graphs
    assert breaks == 0
