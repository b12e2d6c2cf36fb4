"""Rotary positions and causal attention of the nxd engine: plain operations, or NKI's kernel if it
fits.

Tensors are [batch, heads, sequence, head size] here. The kernel knows no segments, so rows of
several samples take plain operations with a mask over the whole row.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from neuronx_distributed.utils import cpu_mode
from torch import nn

from smtrain.core.model.hf_config import HFConfig
from smtrain.core.model.transformers_build import check_rotary
from smtrain.worker.engine.native.attention import positions_within

_ROTARY = {
    "llama": "LlamaRotaryEmbedding",
    "qwen2": "Qwen2RotaryEmbedding",
    "qwen3": "Qwen3RotaryEmbedding",
    "mistral": "MistralRotaryEmbedding",
    "gpt_neox": "GPTNeoXRotaryEmbedding",
}
Places = tuple[torch.Tensor | None, torch.Tensor | None]
"""Positions within samples and the numbers of these, each [B, S]; both None if a row is one sample.
"""
KERNEL_BLOCK = 2048  # NKI's flash attention takes sequences of whole blocks of this many tokens
KERNEL_HEAD = 128  # and heads of at most this size: the partition size of a Neuron core's memory


class Rotary:
    """cos and sin [sequence, head size] of a model, shared by its layers and cached by length.

    A partial rotary (GPT-NeoX) is a full one whose frequencies are zero on the part that does not
    turn: cos 1, sin 0.
    """

    def __init__(self, config: Any, hf_config: HFConfig) -> None:
        family = hf_config.shape.family
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        self._rotary = getattr(module, _ROTARY[family])(config)
        assert hf_config.rope is not None  # `refusals` refuses models without
        check_rotary(self._rotary, hf_config.rope)
        self._head = hf_config.shape.head_dim
        self._tables: dict[
            tuple[int, torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]
        ] = {}
        self.turned = 0
        """The number of a head's values that turn; known once a table was made."""

    @torch.no_grad()
    def __call__(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables for the sequence length, dtype and device of `like`."""
        key = like.shape[2], like.dtype, like.device
        if key not in self._tables:
            ids = torch.arange(key[0])[None]
            cos, sin = (
                x[0]
                for x in self._rotary(torch.empty(1, key[0], 1, dtype=key[1]), position_ids=ids)
            )
            self.turned = cos.shape[-1]
            unrotated_size = self._head - self.turned
            cos = torch.cat([cos, cos.new_ones(key[0], unrotated_size)], -1)
            sin = torch.cat([sin, sin.new_zeros(key[0], unrotated_size)], -1)
            self._tables[key] = cos.to(like.device), sin.to(like.device)
        return self._tables[key]

    def turn(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate each head by its position: `positions` [B, S], or by default its place in the
        row.
        """
        cos, sin = self(x)
        if positions is not None:
            cos, sin = cos[positions][:, None], sin[positions][:, None]
        half = self.turned // 2
        # rotate_half of transformers; the values that do not turn are multiplied by sin 0.
        rotated_halves = torch.cat(
            [-x[..., half : self.turned], x[..., :half], x[..., self.turned :]], -1
        )
        return x * cos + rotated_halves * sin


class CoreAttention(nn.Module):
    """Softmax attention without parameters: the part that selective activation checkpointing
    computes again.
    """

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, samples: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend to earlier tokens; `samples` [B, S] numbers the samples of a row, which do not see
        each other.
        """
        length = q.shape[2]
        if samples is None and self._kernel_fits(length, q.shape[3]):
            from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func

            cores = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1"))
            out: torch.Tensor = nki_flash_attn_func(
                q,
                k,
                v,
                lnc=cores,
                softmax_scale=q.shape[3] ** -0.5,
                causal=True,
                transpose_nki_inputs=False,
            )
            return out
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[3] ** -0.5
        hidden_mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        if self.window is not None and length > self.window:
            # A query sees `window` keys, itself included; keys at a distance of `window` are
            # hidden.
            hidden_mask = hidden_mask | torch.ones(
                length, length, dtype=torch.bool, device=q.device
            ).tril(-self.window)
        if samples is not None:
            hidden_mask = hidden_mask | (samples[:, None, :, None] != samples[:, None, None, :])
        scores = scores.masked_fill(hidden_mask, torch.finfo(scores.dtype).min)
        return torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)

    def _kernel_fits(self, length: int, head: int) -> bool:
        sliding = self.window is not None and length > self.window
        return not cpu_mode() and length % KERNEL_BLOCK == 0 and head <= KERNEL_HEAD and not sliding


def places_of(segments: torch.Tensor) -> torch.Tensor:
    """Each token's position within its sample, and the sample's number in the row: int64 [B, 2, S],
    on the host.

    A sample is a run of equal numbers in `segments` [B, S].
    """
    positions = positions_within(segments)
    return torch.stack([positions, (positions == 0).cumsum(-1)], 1)


def unpack_places(places: torch.Tensor | None) -> Places:
    """The two parts of what `places_of` made."""
    if places is None:
        return None, None
    positions, samples = places.unbind(1)
    return positions, samples
