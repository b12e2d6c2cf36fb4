"""Attention by documents in FlashAttention 2 (Dao 2023, arXiv 2307.08691).

It takes the bounds of documents (`cu_seqlens`), a window, and fewer heads of keys than of queries.
torch has it as `aten._flash_attention_forward` and `_backward`, which torch.nn.attention.varlen
(2.10 and later) calls too. Under `torch.use_deterministic_algorithms(True)` its backward pass sums
dq in a fixed order: `_flash_attention_backward` in
ATen/native/transformers/cuda/attention_backward.cu reads that setting, unless it only warns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from smtrain.core.model.footprint import FLASH_HEAD


def flash_fault(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Explain why FlashAttention 2 cannot compute heads of this size; None if it can.

    This is the only such rule.
    """
    if device.type != "cuda":
        return "it needs a GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return (
            "it takes bfloat16 and float16 (train.precision), not"
            f" {str(dtype).removeprefix('torch.')}"
        )
    if head_dim > FLASH_HEAD:
        return f"it takes heads of at most {FLASH_HEAD} numbers, and this model has {head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Ampere GPU or a later one"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch lacks it"
    return None


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    host: torch.Tensor,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `attention_chunks.forward`."""
    padded_qkv = _pad_heads(query, key, value)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *padded_qkv,
        *cu_seqlens,
        *_longest(host),
        0.0,
        window is None,
        False,
        # Never the kernel's default, which is computed from the padded head size.
        scale=scale,
        **_sides(window),
    )
    return out[..., : query.shape[-1]].contiguous(), lse


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
    """As `attention_chunks.backward`."""
    padded_tensors = _pad_heads(grad, query, key, value, out)
    # The state of the random numbers of dropout, which there is not: torch.nn.attention.varlen
    # passes the same.
    state, unused_offset = query.new_zeros(2, dtype=torch.uint64), query.new_empty(0)
    gradients = torch.ops.aten._flash_attention_backward(
        *padded_tensors,
        lse,
        *cu_seqlens,
        *_longest(host),
        0.0,
        window is None,
        state,
        unused_offset,
        scale=scale,
        **_sides(window),
    )
    of_q, of_k, of_v = (x[..., : query.shape[-1]].contiguous() for x in gradients)
    return of_q, of_k, of_v


def _pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Heads whose size is a multiple of 8, as the kernel wants; zeros change no score."""
    padding = -tensors[0].shape[-1] % 8
    return [F.pad(x, (0, padding)) if padding else x for x in tensors]


def _longest(host: torch.Tensor) -> list[int]:
    """The most queries and the most keys of a document."""
    longest: list[int] = host.diff().amax(1).tolist()
    return longest


def _sides(window: int | None) -> dict[str, int]:
    """The window of FlashAttention: keys before a query, and after it; without one its causal mask
    does it.
    """
    return {"window_size_left": -1 if window is None else window - 1, "window_size_right": 0}
