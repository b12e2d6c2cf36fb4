"""Gated delta nets: documents of a row stay apart, and the numbers are those of transformers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from smtrain.core.model.shape import ModelShape
from smtrain.worker.engine.initial_weights import RandomWeights
from smtrain.worker.engine.native import gated_delta
from smtrain.worker.engine.native.gated_delta import CHUNK, RowDocuments, keep_apart

pytestmark = pytest.mark.skipif("qwen3_5_text" not in CONFIG_MAPPING, reason="of transformers 5")
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "intermediate_size": 16,
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


def net() -> Any:
    """A net of transformers with weights that are far from 0, and decays from 0.3 to 1 a token.

    With stronger ones both lose digits, as the norm of the output enlarges what is nearly 0.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_5_text", **SIZES), dtype=torch.float32
    )
    made = model.model.layers[0].linear_attn
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        made.A_log.copy_(torch.tensor([-4.0, -2.0, -1.0, 0.0]))
    return made


LENGTHS = [[1, 2, 70, 1, CHUNK, 62], [3 * CHUNK + 8], [CHUNK, CHUNK, 72]]
"""Lengths of the documents of three rows: within a chunk, over several, and up to its end."""


def test_documents_of_a_row_have_the_numbers_of_transformers_run_on_each() -> None:
    theirs, ours = net(), net()
    keep_apart(ours)
    x = torch.randn(3, sum(LENGTHS[0]), SIZES["hidden_size"])
    weight = torch.randn_like(x)
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    number = torch.stack(
        [torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in LENGTHS]
    ).int()
    out = ours(hidden_states=here, attention_mask=RowDocuments(number, None))
    rows = [
        torch.cat([theirs(part[None])[0] for part in row.split(n)])
        for row, n in zip(there, LENGTHS, strict=True)
    ]
    expected = torch.stack(rows)
    for made in (out, expected):
        (made * weight).sum().backward()
    pairs: list[tuple[Any, Any]] = [(out, expected), (here.grad, there.grad)]
    pairs += [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    assert (out - expected).abs().mean() <= 1e-6 * expected.abs().mean()
    for made, wanted in pairs:
        assert (made - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def token_by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, None]:
    """The rule as the kernel of flash-linear-attention computes it, with its arguments; [B, T, heads,
    D].
    """
    assert use_qk_l2norm_in_kernel
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if cu_seqlens is not None:
        assert len(q) == 1
    first = {0} if cu_seqlens is None else {*cu_seqlens.tolist()}
    out, state = [], torch.zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    for at in range(q.shape[1]):
        state = state * (0.0 if at in first else g[:, at].exp()[..., None, None])
        old = (state * k[:, at, ..., None]).sum(-2)
        new = (v[:, at] - old) * beta[:, at, :, None]
        state = state + k[:, at, ..., None] * new[..., None, :]
        out.append((state * q[:, at, ..., None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), None


@pytest.mark.parametrize("apart", [False, True])
def test_the_kernel_gets_what_the_rule_in_torch_gets(
    apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel itself agreed under Triton's interpreter (docs/verified.md)."""
    module: Any = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = token_by_token
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made, lengths = net(), LENGTHS
    keep_apart(made)
    x = torch.randn(len(lengths), sum(lengths[0]), SIZES["hidden_size"])
    number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    bounds = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0)
    documents = RowDocuments(number, bounds) if apart else None
    torch_out = made(x, attention_mask=documents)
    monkeypatch.setattr(gated_delta, "_uses_kernels", lambda x, documents: True)
    torch.testing.assert_close(made(x, attention_mask=documents), torch_out, rtol=1e-4, atol=1e-4)


def test_a_row_of_one_document_and_one_without_numbers_are_the_same() -> None:
    ours = net()
    keep_apart(ours)
    x = torch.randn(2, 100, SIZES["hidden_size"])
    one = RowDocuments(torch.full((2, 100), 7, dtype=torch.int32), None)
    with torch.no_grad():
        assert torch.equal(ours(hidden_states=x), ours(hidden_states=x, attention_mask=one))
        assert ours(hidden_states=x[:, :1]).shape == (2, 1, SIZES["hidden_size"])


def test_new_weights_are_distributed_as_transformers_makes_them() -> None:
    config = AutoConfig.for_model(
        "qwen3_5_text", **{**SIZES, "linear_num_value_heads": 400}
    ).to_dict()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    shape = ModelShape.from_config(config)
    ours = RandomWeights(config, shape, 0)
    for name, theirs in model.named_parameters():
        made, wanted = ours.read(shape.file_name(name)), theirs.detach()
        assert abs(made.mean() - wanted.mean()) <= 0.2 * wanted.std(), name
        assert abs(made.std() - wanted.std()) <= 0.3 * wanted.std(), name
