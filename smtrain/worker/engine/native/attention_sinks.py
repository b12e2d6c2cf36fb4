"""Attention with sinks (gpt-oss): a trained number for each head is one more score, whose value is
zero.

torch's kernels have no such column. `varlen` adds it to their result on CUDA. Here blocks of
queries meet only the keys that they may see, and the scores of a block are computed again in the
backward pass if a row has several blocks: memory is that of one block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from smtrain.core.model.footprint import SINK_QUERIES


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries [B, heads, S, D] as transformers calls it; `attention_mask` [B or 1, 1,
    S, keys] is true for keys that a query sees, None for all before it and itself. The queries are
    the last of the keys.
    """
    length, groups = query.shape[2], module.num_key_value_groups
    past_length = key.shape[2] - length
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    out = []
    for start in range(0, length, SINK_QUERIES):
        stop = min(start + SINK_QUERIES, length)
        # The block's first query sees `sliding_window` keys, itself included.
        first = 0 if sliding_window is None else max(0, past_length + start - sliding_window + 1)
        keys = slice(first, past_length + stop)
        block_mask = None if attention_mask is None else attention_mask[:, :, start:stop, keys]
        block = (
            query[:, :, start:stop],
            key[:, :, keys],
            value[:, :, keys],
            module.sinks,
            block_mask,
            scaling,
        )
        if length > SINK_QUERIES and torch.is_grad_enabled():
            out.append(
                checkpoint(attend_block, *block, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            out.append(attend_block(*block))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def attend_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention with sinks; the last query is that of the last key."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if mask is None:
        rows, columns = scores.shape[-2:]
        # The queries are the last of the keys: the diagonal ends in the last column.
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    probabilities = torch.softmax(torch.cat([scores, column], -1), -1, dtype=torch.float32).to(
        value.dtype
    )
    # The sink takes its share of the softmax and adds no value, as in gpt-oss's
    # eager_attention_forward in transformers.
    return torch.matmul(probabilities[..., :-1], value)
