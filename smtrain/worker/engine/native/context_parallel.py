"""Context parallelism: every row is cut over a group of ranks, which have pieces of it as
`ProcessMesh.by_rank` says.

What computes each token by itself needs nothing else. Attention gathers the keys and values of
whole rows, one layer at a time, as Llama 3 was trained (arXiv 2407.21783, section 3.3.2), so that
each softmax is over the same numbers as with one rank. Queries are taken in chunks, each with its
own piece of the mask and only the keys that it can see, and the backward pass gathers and computes
again: no rank holds a mask, scores or the keys of whole rows for longer than one chunk or layer. On
CUDA a chunk has documents in place of a mask (`varlen`), and is a whole piece. A state that runs
along the row (`gated_delta`) trades tokens for heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from smtrain.core.model.footprint import QUERIES
from smtrain.worker.engine.native.attention_sinks import attend_block
from smtrain.worker.engine.native.comm import (
    ProcessMesh,
    gather_into,
    scatter_sum_into,
    with_gradient,
)
from smtrain.worker.engine.native.varlen import DocumentBounds, find_bounds, pad_heads
from smtrain.worker.engine.native.varlen import attend as attend_documents
from smtrain.worker.engine.step_timing import part

Inner = Callable[..., torch.Tensor]
"""Attention of q [B, heads, n, D] to k and v [B, heads, L, D] under a mask, with a scale, and
parameters of a layer.
"""


class Chunk(NamedTuple):
    """Queries [start, stop) of this rank's tokens, tokens [at, end) of the row, which see its keys
    [low, end).
    """

    start: int
    stop: int
    at: int
    low: int

    @property
    def end(self) -> int:
        return self.at + self.stop - self.start


class ContextParallelRows(NamedTuple):
    """The view of a layer over cut rows; it stands in the place of an attention mask."""

    mesh: ProcessMesh
    tokens: torch.Tensor
    """int32 [S]: the numbers of the row's tokens."""
    number: torch.Tensor | None
    """int32 [B, S]: a number for each document of a row; None: each row is one."""
    window: int | None
    chunks: tuple[Chunk, ...]
    documents: tuple[DocumentBounds, ...] | None = None
    """One for each chunk, on devices whose attention takes documents in place of masks; a chunk is
    then a piece.
    """

    @classmethod
    def of(
        cls,
        mesh: ProcessMesh,
        tokens: torch.Tensor,
        window: int | None,
        number: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> ContextParallelRows:
        """`positions` [B, S] on the host tell which keys no query of a chunk can see; they decide
        about shapes.
        """
        # A window as long as the row hides nothing: the causal mask is enough.
        window = None if window is None or window >= len(tokens) else window
        return cls(
            mesh,
            tokens,
            number,
            window,
            _chunks(mesh, len(tokens), _queries(mesh), window, positions),
        )

    @classmethod
    def by_documents(
        cls,
        mesh: ProcessMesh,
        tokens: torch.Tensor,
        window: int | None,
        positions: torch.Tensor,
        is_compiled: bool,
    ) -> ContextParallelRows:
        """The same without masks, from positions [B, S] on the host."""
        length = positions.shape[1]
        window = None if window is None or window >= length else window
        chunks = _chunks(mesh, length, length, window, positions)
        bounds = (find_bounds(positions, chunk.at, chunk.low, chunk.end) for chunk in chunks)
        documents = (
            DocumentBounds.of(host, mesh.device, is_compiled)._replace(window=window)
            for host in bounds
        )
        return cls(mesh, tokens, None, window, chunks, tuple(documents))

    def sight(self, index: int) -> Any:
        """The keys that the queries of a chunk see, for `Inner`: its documents or its mask."""
        return self.mask(self.chunks[index]) if self.documents is None else self.documents[index]

    def mask(self, chunk: Chunk) -> torch.Tensor:
        """Whether each query of a chunk sees each key from `chunk.low` on, [B or 1, 1, n, L]."""
        start, stop, low = chunk.at, chunk.end, chunk.low
        # Token numbers, not places: they alone decide what is before what in the row.
        query, key = self.tokens[start:stop, None], self.tokens[low:stop]
        is_visible = (
            query >= key if self.window is None else (query >= key) & (query < key + self.window)
        )
        if self.number is None:
            return is_visible[None, None]
        return is_visible & (
            self.number[:, None, start:stop, None] == self.number[:, None, None, low:stop]
        )

    def keys(self, row_keys: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The keys [B, heads, L, D] that a chunk sees, of the whole row's [S, B, heads, D]."""
        return row_keys[chunk.low : chunk.end].permute(1, 2, 0, 3)


def _queries(mesh: ProcessMesh) -> int:
    return QUERIES.get(mesh.device.type, QUERIES["cuda"])


def _chunks(
    mesh: ProcessMesh, length: int, size: int, window: int | None, positions: torch.Tensor | None
) -> tuple[Chunk, ...]:
    """This rank's tokens in chunks of at most `size` queries."""
    chunks, start = list[Chunk](), 0
    for first, end in mesh.own_pieces(length):
        for at in range(first, end, size):
            # The beginning of the longest document at the chunk's first query, over all rows: no
            # earlier key is seen.
            low = 0 if positions is None else at - int(positions[:, at].max())
            if window is not None:
                # The chunk's first query sees `window` keys, itself included.
                low = max(low, at - window + 1)
            stop = start + min(size, end - at)
            chunks.append(Chunk(start, stop, at, low))
            start = stop
    return tuple(chunks)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: ContextParallelRows,
    scaling: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [B, own tokens, heads, D] of q, k and v [B, heads, own tokens, D] over whole rows;
    `sinks` [heads].
    """
    inner: Inner = _products if sinks is None else _with_sinks
    if rows.documents is not None:
        inner = _of_documents
    apply: Any = _Attention.apply
    out: torch.Tensor = apply(
        query, key, value, rows, scaling, inner, *([] if sinks is None else [sinks])
    )
    return out.transpose(1, 2).contiguous()


def _of_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: DocumentBounds,
    scaling: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return attend_documents(q, k, v, documents, scaling, sinks).transpose(1, 2)


def _products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float | None
) -> torch.Tensor:
    repeats = q.shape[1] // k.shape[1]
    enable_gqa = (
        repeats > 1 and q.device.type == "cpu"
    )  # elsewhere no kernel takes a mask and shared keys
    if repeats > 1 and not enable_gqa:
        k, v = (_repeat_heads(x, repeats) for x in (k, v))
    width = v.shape[-1]
    q, k, v = pad_heads(q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, enable_gqa=enable_gqa
    )[..., :width]


def _repeat_heads(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """Each head of x [B, heads, L, D] so many times in a row."""
    batch, heads, length, size = x.shape
    return (
        x[:, :, None]
        .expand(batch, heads, repeats, length, size)
        .reshape(batch, heads * repeats, length, size)
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: ContextParallelRows,
        scaling: float | None,
        inner: Inner,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        # Only own tokens: whole rows are gathered again, so no rank keeps them from layer to layer.
        ctx.save_for_backward(q, k, v, *parameters)
        ctx.rows, ctx.scaling, ctx.inner = rows, scaling, inner
        keys, values = (_gather_rows(x, rows.mesh) for x in (k, v))
        out = [
            inner(
                q[:, :, c.start : c.stop],
                rows.keys(keys, c),
                rows.keys(values, c),
                rows.sight(i),
                scaling,
                *parameters,
            )
            for i, c in enumerate(rows.chunks)
        ]
        return torch.cat(out, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *parameters = ctx.saved_tensors
        rows, mesh = ctx.rows, ctx.rows.mesh
        keys, values = (_gather_rows(x, mesh) for x in (k, v))
        # fp32, and the row's tokens first: a chunk's keys are then one dense piece, which Neuron
        # can add to.
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values)]
        parameter_sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        of_q = []
        for i, chunk in enumerate(rows.chunks):
            # autograd is off in a backward pass. A chunk's graph lives until its gradients exist.
            with torch.enable_grad():
                inputs = [
                    x.detach().requires_grad_()
                    for x in (
                        q[:, :, chunk.start : chunk.stop],
                        rows.keys(keys, chunk),
                        rows.keys(values, chunk),
                        *parameters,
                    )
                ]
                out = ctx.inner(*inputs[:3], rows.sight(i), ctx.scaling, *inputs[3:])
            own_grad = grad[:, :, chunk.start : chunk.stop]
            # Chunk by chunk: its scores are freed before the next chunk makes its own.
            gradients = torch.autograd.grad(out, inputs, own_grad)
            of_q.append(gradients[0])
            for total, piece in zip(sums, gradients[1:3], strict=True):
                total[chunk.low : chunk.low + piece.shape[2]].add_(piece.permute(2, 0, 1, 3))
            for total, piece in zip(parameter_sums, gradients[3:], strict=True):
                total.add_(piece)
        of_k, of_v = (_own_sum(total, x, mesh) for total, x in zip(sums, (k, v), strict=True))
        of_parameters = (
            total.to(p.dtype) for total, p in zip(parameter_sums, parameters, strict=True)
        )
        return torch.cat(of_q, 2), of_k, of_v, None, None, None, *of_parameters


def _gather_rows(x: torch.Tensor, mesh: ProcessMesh) -> torch.Tensor:
    """The whole rows [S, B, heads, D] of everyone's x [B, heads, own tokens, D]."""
    # Tokens first, because a gather joins along the first dimension.
    local = x.permute(2, 0, 1, 3).contiguous()
    out = local.new_empty((mesh.cp * local.shape[0], *local.shape[1:]))
    with part("context parallel"):
        gather_into(out, local, group=mesh.cp_group)
    return mesh.in_row_order(out, 0)


def _own_sum(row_sum: torch.Tensor, like: torch.Tensor, mesh: ProcessMesh) -> torch.Tensor:
    """This rank's tokens, shaped as `like`, of the sum of everyone's fp32 [S, B, heads, D]."""
    # Sums of chunks were fp32; the message has the format of activations, and half its bytes.
    by_rank = mesh.by_rank(row_sum.to(like.dtype), 0)
    out = by_rank.new_empty((by_rank.shape[0] // mesh.cp, *by_rank.shape[1:]))
    with part("context parallel"):
        scatter_sum_into(out, by_rank, group=mesh.cp_group)
    return out.permute(1, 2, 0, 3)


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Part i of x [ranks, ...] goes to rank i; the parts that they sent come back."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with part("context parallel"):
        dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


# Rank i's part j and rank j's part i change places: the exchange is its inverse and its gradient.
_swap = with_gradient(_all_to_all, _all_to_all)


def tokens_for_heads(parts: Sequence[torch.Tensor], mesh: ProcessMesh) -> torch.Tensor:
    """From own tokens of all heads to all tokens of own heads: each [B, S / cp, C] becomes [B, S, C
    / cp], one after another in one tensor.

    A rank's heads are its part of every tensor's C.
    """
    # One message for all tensors: part i of each goes to rank i.
    cut = [x.chunk(mesh.cp, 2) for x in parts]
    assert mesh.cp_group is not None
    own_heads = _swap(
        torch.stack([torch.cat(chunks, 2) for chunks in zip(*cut, strict=True)]), mesh.cp_group
    )
    return mesh.in_row_order(own_heads.transpose(0, 1).flatten(1, 2), 1)


def heads_for_tokens(x: torch.Tensor, mesh: ProcessMesh) -> torch.Tensor:
    """The way back: [B, S, C / cp] of own heads becomes [B, S / cp, C] of own tokens."""
    assert mesh.cp_group is not None
    own_tokens = _swap(torch.stack(mesh.by_rank(x, 1).chunk(mesh.cp, 1)), mesh.cp_group)
    return own_tokens.permute(1, 2, 0, 3).flatten(2, 3)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    scaling: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    # The block with sinks takes one key and value head for each query head.
    k, v = (_repeat_heads(x, q.shape[1] // k.shape[1]) for x in (k, v))
    return attend_block(q, k, v, sinks, mask, scaling)
