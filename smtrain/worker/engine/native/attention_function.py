"""The attention of all layers, as transformers calls it; the type of `attention_mask` chooses how
it runs.

| attention_mask | made for | runs |
|---|---|---|
| None: causal over the row | whole rows, one new token | torch's SDPA |
| a tensor, true for keys that a query sees | the CPU and Neuron; generation | torch's SDPA |
| None or a tensor, and sinks (gpt-oss) | the CPU and Neuron; generation | `attention_sinks` |
| `DocumentBounds` | CUDA: documents, windows, sinks, or no FlashAttention | `varlen` |
| `ContextParallelRows` | context parallelism | `context_parallel`: one of the above for each chunk |

`AttentionContext` and `CachedStage` choose the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from smtrain.worker.engine.native import attention_sinks, context_parallel, varlen


def register(is_compiled: bool) -> str:
    """Make this attention known to transformers; returns its name there."""
    name, over_cut_rows = "smtrain", context_parallel.attend
    if (
        is_compiled
    ):  # a compiler would have to see through the messages and the second backward pass
        name, over_cut_rows = "smtrain_compiled", torch.compiler.disable(context_parallel.attend)  # type: ignore[no-untyped-call]
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, over_cut_rows))
    return name


def _attend(
    over_cut_rows: Callable[..., torch.Tensor],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention [B, n, heads, D] of q, k and v [B, heads, n or keys, D]."""
    if isinstance(attention_mask, varlen.DocumentBounds):
        return varlen.attend(query, key, value, attention_mask, scaling, s_aux), None
    if isinstance(attention_mask, context_parallel.ContextParallelRows):
        return over_cut_rows(query, key, value, attention_mask, scaling, s_aux), None
    width = value.shape[-1]
    # SDPA would keep the scores of latent attention, whose values have another size.
    query, key, value = varlen.pad_heads(query, key, value)
    # Without a mask transformers' SDPA is causal, but for a single query, which sees all keys.
    plain: Any = ALL_ATTENTION_FUNCTIONS["sdpa"] if s_aux is None else attention_sinks.attend
    result: tuple[torch.Tensor, None] = plain(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return (result[0][..., :width], None) if result[0].shape[-1] != width else result
