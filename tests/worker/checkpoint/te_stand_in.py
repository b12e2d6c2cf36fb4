"""Transformer Engine's modules as plain torch, for CPUs: their parameters and computation, and
nothing else.

Megatron-core's own classes derive from these when `install` has been called before it is imported;
names, cuts and sharded keys of a model with its TE spec are then Megatron-core's.
"""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import layer_norm, linear, rms_norm, scaled_dot_product_attention

VERSION = "2.8.0"
"""The first whose attention has sinks."""


class _State(nn.Module):
    """Keeps a state of fp8 that says nothing, as the real modules do."""

    def get_extra_state(self) -> io.BytesIO:
        held = io.BytesIO()
        torch.save(None, held)
        return held

    def set_extra_state(self, state: Any) -> None:
        pass


class Linear(_State):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        tp_size: int,
        tp_group: Any,
        sequence_parallel: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel and tp_size > 1
        rows, columns = (tp_size if parallel_mode == mode else 1 for mode in ("column", "row"))
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.parallel_mode, self.return_bias, self.group, self.size = (
            parallel_mode,
            return_bias,
            tp_group,
            tp_size,
        )
        self.weight = nn.Parameter(torch.empty(out_features // rows, in_features // columns))
        self.bias = nn.Parameter(torch.empty(out_features // rows)) if bias else None

    def forward(self, x: torch.Tensor, **_: Any) -> Any:
        if self.parallel_mode == "column" and self.sequence_parallel:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            dist.all_gather(parts, x.contiguous(), group=self.group)
            x = torch.cat(parts)
        out = linear(x, self.weight)
        if self.parallel_mode == "row" and self.size > 1:
            dist.all_reduce(out, group=self.group)
            if self.sequence_parallel:
                out = out.chunk(self.size)[dist.get_rank(self.group)]
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNorm(nn.Module):
    rms = False

    def __init__(self, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        if not self.rms:
            self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normed(x, self.weight, None if self.rms else self.bias, self.eps)


class RMSNorm(LayerNorm):
    rms = True


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, *, eps: float, normalization: str, **more: Any
    ) -> None:
        super().__init__(in_features, out_features, **more)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        plain = normalization == "LayerNorm"
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if plain else None

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return super().forward(
            _normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps), **more
        )


class GroupedLinear(_State):
    """A linear for each expert, `weightJ` and `biasJ`; with `return_bias` the biases are the
    caller's to add.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        tp_size: int,
        **_: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1  # Megatron-core cuts experts itself
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        for j in range(num_gemms):
            setattr(self, f"weight{j}", nn.Parameter(torch.empty(out_features, in_features)))
            if bias:
                setattr(self, f"bias{j}", nn.Parameter(torch.empty(out_features)))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        pass

    def forward(self, x: torch.Tensor, m_splits: list[int], **_: Any) -> Any:
        biases = [getattr(self, f"bias{j}") for j in range(self.num_gemms)] if self.use_bias else []
        out = [
            linear(rows, getattr(self, f"weight{j}")) for j, rows in enumerate(x.split(m_splits))
        ]
        if self.return_bias:
            return torch.cat(out), biases
        return torch.cat(
            [one + bias for one, bias in zip(out, biases, strict=True)] if biases else out
        )


class DotProductAttention(_State):
    """Causal attention of (position, sequence, head, dimension); its state may be missing, as the
    real one's may.
    """

    def __init__(
        self,
        num_attention_heads: int,
        tp_size: int,
        window_size: tuple[int, int] | None = None,
        softmax_type: str = "vanilla",
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.softmax_offset = (
            nn.Parameter(torch.zeros(num_attention_heads // tp_size))
            if softmax_type == "learnable"
            else None
        )
        self.window = None if window_size is None else window_size[0]
        self.register_load_state_dict_post_hook(lambda _, found: found.missing_keys.clear())

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        repeats = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        seen = seen if self.window is None else seen.triu(-self.window)
        if self.softmax_offset is None:
            out = scaled_dot_product_attention(q, k, v, seen, scale=self.scale)
        else:
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
            sinks = self.softmax_offset.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            out = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return out.permute(2, 0, 1, 3).flatten(2)


def _normed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    return (
        rms_norm(x, x.shape[-1:], weight, eps)
        if bias is None
        else layer_norm(x, x.shape[-1:], weight, bias, eps)
    )


def install() -> None:
    """Let `import transformer_engine` find these."""
    classes = (Linear, LayerNorm, RMSNorm, LayerNormLinear, GroupedLinear, DotProductAttention)
    unused = [
        "CudaRNGStatesTracker",
        "DelayedScaling",
        "FP8GlobalStateManager",
        "Float8Tensor",
        "Sequential",
    ]
    unused += ["FusibleOperation", "QuantizedTensor"]
    router = (
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    )
    empty = {name: type(name, (nn.Module,), {}) for name in unused}
    modules: dict[str, dict[str, Any]] = {
        "": {"__version__": VERSION},
        "pytorch": {kind.__name__: kind for kind in classes},
        "pytorch.ops": {name: empty[name] for name in ("Sequential", "FusibleOperation")},
        "pytorch.router": dict.fromkeys(router),
        "pytorch.tensor": {"QuantizedTensor": empty["QuantizedTensor"]},
        "pytorch.distributed": {
            "CudaRNGStatesTracker": empty["CudaRNGStatesTracker"],
            "activation_recompute_forward": None,
        },
        "pytorch.fp8": {
            "FP8GlobalStateManager": empty["FP8GlobalStateManager"],
            "fp8_autocast": None,
        },
        "pytorch.float8_tensor": {"Float8Tensor": empty["Float8Tensor"]},
        "pytorch.cpp_extensions": {"cast_to_fp8": None},
        "common": {},
        "common.recipe": {"DelayedScaling": empty["DelayedScaling"]},
    }
    for name, held in modules.items():
        full = f"transformer_engine.{name}".rstrip(".")
        module = types.ModuleType(full)
        module.__dict__.update(held, __path__=[])
        sys.modules[full] = module
        parent, _, leaf = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
