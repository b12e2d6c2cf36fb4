"""Gated delta nets: documents of a row stay apart, and the numbers are those of transformers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
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


def convolve_documents(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    activation: str | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """The convolution as the kernel of flash-linear-attention computes it, with its arguments."""
    if cu_seqlens is not None:
        assert len(x) == 1
    lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    taps, channels = weight.shape[1], x.shape[2]
    out = torch.cat(
        [
            F.conv1d(
                F.pad(part.transpose(1, 2), (taps - 1, 0)), weight[:, None], groups=channels
            ).transpose(1, 2)
            for part in x.split(lengths, 1)
        ],
        1,
    )
    return (out if activation is None else F.silu(out)), None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules of flash-linear-attention that the engine imports."""
    names = ("fla.ops", "fla.modules", "fla.ops.gated_delta_rule", "fla.modules.causal_conv1d")
    modules: dict[str, Any] = {name: ModuleType(name) for name in ("fla", *names)}
    modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = token_by_token
    modules["fla.modules.causal_conv1d"].causal_conv1d = convolve_documents
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.usefixtures("kernels")
def test_the_kernel_gets_what_the_rule_in_torch_gets(
    apart: bool, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels themselves agreed under Triton's interpreter (docs/verified.md)."""
    made, lengths = net(), LENGTHS
    made.activation = activation
    keep_apart(made)
    x = torch.randn(len(lengths), sum(lengths[0]), SIZES["hidden_size"])
    number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    bounds = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0)
    documents = RowDocuments(number, bounds) if apart else None
    torch_out = made(x, attention_mask=documents)
    monkeypatch.setattr(gated_delta, "_uses_kernels", lambda *_: True)
    torch.testing.assert_close(made(x, attention_mask=documents), torch_out, rtol=1e-4, atol=1e-4)


class Spoilt(torch.autograd.Function):
    """The identity, whose gradient is `times` the right one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: float) -> torch.Tensor:
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.times, None


def spoil_gradient(times: float) -> Any:
    def rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **named: Any,
    ) -> tuple[torch.Tensor, None]:
        return token_by_token(q, k, v, g, Spoilt.apply(beta, times), **named)

    return rule


def raise_as_triton(*_: Any, **__: Any) -> None:
    raise RuntimeError("Please upgrade Triton to >= 3.7.1")


WRONG_RULES = {
    "Please upgrade Triton": raise_as_triton,
    "0.5 apart from plain torch": spoil_gradient(0.5),
    "nan apart from plain torch": spoil_gradient(torch.nan),
}


@pytest.mark.parametrize("reason", ["", *WRONG_RULES])
def test_kernels_that_are_wrong_on_a_machine_are_not_used(
    reason: str, kernels: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if reason:
        kernels["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = WRONG_RULES[reason]
    gated_delta.are_kernels_right.cache_clear()
    sizes = gated_delta._Sizes(2, 4, 8, 8, "silu")
    is_right = gated_delta.are_kernels_right(sizes, 4, torch.float32, torch.device("cpu"), 70)
    assert is_right == (not reason)
    assert reason in caplog.text
    assert bool(reason) == bool(caplog.text)


def test_a_triangular_solver_finds_the_inverse_that_halves_find() -> None:
    x = torch.randn(3, 2, CHUNK, CHUNK) / 8
    inverse = gated_delta._inverse(x)
    torch.testing.assert_close(gated_delta._inverse_by_solver(x), inverse, rtol=1e-4, atol=1e-4)
    identity = (x.tril(-1) + torch.eye(CHUNK)) @ inverse
    torch.testing.assert_close(identity, torch.eye(CHUNK).expand_as(x), rtol=0, atol=1e-4)


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
