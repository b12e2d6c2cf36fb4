"""Attention by documents (varlen): rows lie end to end, and the bounds of their documents take the
place of a mask.

`attention_flash` computes them on a GPU, `attention_chunks` in plain torch for all other cases, and
for tests.

Sinks (gpt-oss) need no other kernel. A sink adds exp(sink) to the sum of each softmax. With lse' =
logaddexp(lse, sink) the output is out exp(lse - lse'), and a backward pass that gets this output
and lse' is exact, because it computes P = exp(S - lse') and delta = rowsum(dO O) from them. The
sink's gradient is the sum over its queries of -exp(sink - lse') delta, as its value is zero.

Both passes are operators of torch.library, so torch.compile does not look into the kernels, or at
numbers on the host.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from smtrain.worker.engine.native import attention_chunks, attention_flash
from smtrain.worker.engine.native.comm import to_device


class DocumentBounds(NamedTuple):
    """The documents of rows that lie end to end; it stands in the place of an attention mask.

    The last query of a document is that of its last key, and a query sees no later keys. A document
    without queries is legal, and its keys get the gradient 0.
    """

    cu_seqlens: torch.Tensor
    """int32 [2, documents + 1] on the device: the first query and the first key of each document,
    and the totals.
    """
    host: torch.Tensor
    """The same on the host, for kernels that need numbers from it; reading them does not wait for
    the device.
    """
    window: int | None = None
    """The last keys that a query sees, itself included; None: all."""

    @classmethod
    def of(cls, host: torch.Tensor, device: torch.device, is_compiled: bool) -> DocumentBounds:
        """From bounds on the host; `is_compiled`: torch.compile must not make a graph for each
        number of documents.
        """
        device_bounds = to_device(host, device)
        for bounds in (device_bounds, host) if is_compiled else ():
            torch._dynamo.maybe_mark_dynamic(bounds, 1)
        return cls(device_bounds, host)


def find_bounds(
    positions: torch.Tensor, at: int = 0, low: int = 0, end: int | None = None
) -> torch.Tensor:
    """`DocumentBounds.host` of the queries [at, end) of each row, whose keys are the row's [low,
    end).

    `positions` [B, S] on the host count from each document's first token.
    """
    begins = positions[:, low:end] == 0
    # The first key of a piece may lie within a document, whose position there is not 0.
    begins[:, 0] = True
    rows, first = begins.nonzero(as_tuple=True)
    batch, keys = begins.shape
    queries = keys - (at - low)
    # `clamp`: a document that ends before `at` begins at the query of the next one, so it has 0.
    bounds = torch.stack([rows * queries + (first + low - at).clamp(min=0), rows * keys + first])
    return torch.cat([bounds, bounds.new_tensor([[batch * queries], [batch * keys]])], 1).int()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: DocumentBounds,
    scaling: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, n, heads, D] of q [B, heads, n, D] to k and v [B, kv heads, L, D]; `sinks`
    [heads].
    """
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    padded_qkv = pad_heads(query, key, value)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in padded_qkv)
    out, _ = _varlen(q, k, v, sinks, documents.cu_seqlens, documents.host, documents.window, scale)
    result: torch.Tensor = out.view(query.shape[0], query.shape[2], *out.shape[1:])
    return result[..., :width]


def pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values [..., D] of one size, which fused kernels need: the narrower ones
    get zeros behind, which change no score and add zeros to the output. Scores must have a scale.
    """
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def _kernel(query: torch.Tensor) -> ModuleType:
    fault = attention_flash.flash_fault(query.device, query.dtype, query.shape[-1])
    return attention_flash if fault is None else attention_chunks


_SIGHT = "Tensor cu_seqlens, Tensor host, int? window, float scale"


@torch.library.custom_op(
    "smtrain::varlen",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, Tensor? sinks, {_SIGHT}) -> (Tensor, Tensor)",
)
def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    host: torch.Tensor,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [queries, heads, D], and the logarithm of each softmax's sum, fp32 [heads,
    queries].
    """
    out, lse = _kernel(query).forward(query, key, value, cu_seqlens, host, window, scale)
    if sinks is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sinks.float()[:, None])
    return out.float().mul_((lse - with_sink).exp_().T[..., None]).to(out.dtype), with_sink


@torch.library.custom_op(
    "smtrain::varlen_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {_SIGHT}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)
def _varlen_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor,
    host: torch.Tensor,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _kernel(query).backward(
        grad.contiguous(), query, key, value, out, lse, cu_seqlens, host, window, scale
    )
    return gradients


@_varlen.register_fake
def _(query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(
        (query.shape[1], query.shape[0]), dtype=torch.float32
    )


@_varlen_backward.register_fake
def _(grad: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(
    ctx: Any, grad: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    query, key, value, sinks, cu_seqlens, host, out, lse = ctx.saved_tensors
    of_sinks = None
    if sinks is not None:
        delta = (grad.float() * out.float()).sum(-1).T
        # dS = P (dP - delta) for the sink's column, whose dP is 0 because its value is 0.
        of_sinks = -((sinks.float()[:, None] - lse).exp() * delta).sum(1).to(sinks.dtype)
    gradients = _varlen_backward(
        grad, query, key, value, out, lse, cu_seqlens, host, ctx.window, ctx.scale
    )
    return *gradients, of_sinks, None, None, None, None


_varlen.register_autograd(_differentiate, setup_context=_save)
