"""Attention by documents in plain torch, for devices, formats and head sizes that FlashAttention 2
does not take.

Chunks of queries meet only the keys from the first one that any of them sees to the last. The
backward pass computes the scores of each chunk again from its softmax's sum, as FlashAttention does
(Dao et al. 2022, arXiv 2205.14135), so no more than the scores of one chunk exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from smtrain.core.model.footprint import CHUNK_SCORES, QUERIES

_FEWEST = 64
"""Queries of a chunk, however many keys they see."""


class _QueryChunk(NamedTuple):
    """Queries [start, stop) and the keys [low, high) among which are all that they see."""

    start: int
    stop: int
    low: int
    high: int


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    host: torch.Tensor,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [queries, heads, D] of q to k and v [keys, kv heads, D], and the logarithm of each
    softmax's sum, fp32 [heads, queries].

    `cu_seqlens` and `host` are those of `varlen.DocumentBounds`.
    """
    out, lse = (
        torch.empty_like(query),
        query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32),
    )
    bounds = _key_bounds(cu_seqlens, query.shape[0], window)
    for chunk in _split(host, window, query):
        keys = slice(chunk.low, chunk.high)
        scores = _scores(_group_heads(query, key, chunk) * scale, key[keys], chunk, bounds)
        # L of FlashAttention 2 (algorithm 1): exp(S - L) is the softmax, here and in `backward`.
        total = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(total).exp_().to(value.dtype)
        out[chunk.start : chunk.stop] = _by_token(weights @ value[keys].transpose(0, 1), chunk)
        lse[:, chunk.start : chunk.stop] = total.view(query.shape[1], -1)
    return out, lse


def backward(
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
    """Gradients of q, k and v, from that of the output."""
    of_q = torch.empty_like(query)
    # fp32, because many chunks add to the same keys.
    sums = [
        x.new_zeros((x.shape[1], x.shape[0], x.shape[2]), dtype=torch.float32) for x in (key, value)
    ]
    bounds = _key_bounds(cu_seqlens, query.shape[0], window)
    for chunk in _split(host, window, query):
        keys, queries = slice(chunk.low, chunk.high), slice(chunk.start, chunk.stop)
        q, of_out, grouped_out = (_group_heads(x, key, chunk) for x in (query, grad, out))
        q = q * scale
        total = lse[:, queries].reshape(*q.shape[:2], 1)
        weights = _scores(q, key[keys], chunk, bounds).sub_(total).exp_()
        of_weights = (of_out @ value[keys].permute(1, 2, 0)).float()
        # D of FlashAttention 2 (algorithm 2): rowsum(dO O), which equals rowsum(dP P).
        delta = (of_out.float() * grouped_out.float()).sum(-1, keepdim=True)
        # dS = P (dP - D). `q` is scaled already, so dK needs no scale, but dQ does.
        of_scores = of_weights.sub_(delta).mul_(weights).to(query.dtype)
        of_q[queries] = _by_token(of_scores @ key[keys].transpose(0, 1), chunk) * scale
        sums[0][:, keys] += of_scores.transpose(1, 2) @ q
        sums[1][:, keys] += weights.to(query.dtype).transpose(1, 2) @ of_out
    of_k, of_v = (total.transpose(0, 1).to(key.dtype).contiguous() for total in sums)
    return of_q, of_k, of_v


def _split(host: torch.Tensor, window: int | None, query: torch.Tensor) -> Iterator[_QueryChunk]:
    """Cut the queries into chunks whose scores are few enough."""
    queries, keys = host.numpy()
    tokens, heads, _ = query.shape
    max_queries = QUERIES.get(query.device.type, QUERIES["cuda"])

    def last_key(at: int) -> tuple[int, int]:
        """The last key that a query sees, and the first of its document."""
        document = int(queries.searchsorted(at, side="right")) - 1
        # A document's last query is that of its last key, so the ends align, not the beginnings.
        return at + int(keys[document + 1] - queries[document + 1]), int(keys[document])

    start = 0
    while start < tokens:
        # The chunk's first query sees the earliest key: documents and windows only move forward.
        last, low = last_key(start)
        low = low if window is None else max(low, last - window + 1)
        stop = min(start + max_queries, tokens)
        while (
            stop - start > _FEWEST
            and heads * (stop - start) * (last_key(stop - 1)[0] + 1 - low) > CHUNK_SCORES
        ):
            stop = start + (stop - start) // 2
        yield _QueryChunk(start, stop, low, last_key(stop - 1)[0] + 1)
        start = stop


def _key_bounds(
    cu_seqlens: torch.Tensor, tokens: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the last key that each query sees, int32 [queries]."""
    queries, keys = cu_seqlens
    index = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    # Of documents that begin at the same query the last one has queries.
    document = torch.searchsorted(queries.contiguous(), index, right=True) - 1
    last = index + (keys - queries)[document + 1]
    first = keys[document]
    return first if window is None else torch.maximum(first, last - window + 1), last


def _group_heads(x: torch.Tensor, key: torch.Tensor, chunk: _QueryChunk) -> torch.Tensor:
    """The chunk's [kv heads, heads of queries for each x n, D] of x [queries, heads, D]."""
    rows = x[chunk.start : chunk.stop]
    return rows.view(len(rows), key.shape[1], -1, x.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)


def _by_token(x: torch.Tensor, chunk: _QueryChunk) -> torch.Tensor:
    """The opposite of `_group_heads`: [n, heads, D]."""
    return (
        x.view(x.shape[0], -1, chunk.stop - chunk.start, x.shape[2])
        .permute(2, 0, 1, 3)
        .flatten(1, 2)
    )


def _scores(
    q: torch.Tensor,
    key: torch.Tensor,
    chunk: _QueryChunk,
    bounds: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """fp32 [kv heads, heads for each x n, keys]: scores of scaled queries, -inf for keys that they
    do not see.
    """
    index = torch.arange(chunk.low, chunk.high, dtype=torch.int32, device=q.device)
    first, last = (side[chunk.start : chunk.stop, None] for side in bounds)
    is_hidden = (index < first) | (index > last)
    scores = (q @ key.permute(1, 2, 0)).float()
    # A query sees at least the key of its token, so no row is all -inf and its logsumexp is finite.
    by_query = scores.view(q.shape[0], -1, *is_hidden.shape).masked_fill_(is_hidden, float("-inf"))
    return by_query.view(scores.shape)
