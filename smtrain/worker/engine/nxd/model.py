"""The model families as thin modules over neuronx-distributed's parallel layers.

Modules are named so that their parameters have the names NxD's own examples save
(worker/checkpoint/nxd/names.py, attention inputs in the grouped form). Hidden states are [sequence,
batch, hidden], the sequence cut between tensor-parallel ranks under sequence parallelism: NxD's
layers need this order of dimensions for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers.layers import ParallelEmbedding
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
)
from torch import nn

from smtrain.core.model.families import FAMILIES
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.nxd.names import factor_of
from smtrain.worker.engine.nxd.attention import CoreAttention, unpack_places
from smtrain.worker.engine.nxd.build import Build, HeadNorm
from smtrain.worker.engine.nxd.lora import sum_over_copies


class LlamaAttention(nn.Module):
    """Grouped-query attention; key/value heads are repeated as often as tp requires."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        shape, layout = build.shape, build.layout
        self.head, self.rotary = shape.head_dim, build.rotary
        self.qkv_proj = GQAQKVColumnParallelLinear(
            shape.hidden,
            [shape.heads * self.head, shape.kv_heads * self.head],
            bias=False,
            gather_output=False,
            dtype=build.dtype,
            sequence_parallel_enabled=build.sequence_parallel,
            kv_size_multiplier=layout.kv_multiplier,
            fuse_qkv=False,
        )
        if shape.qkv_bias:
            self._add_biases(build)
        self.q_norm = self.k_norm = None
        if shape.family == "qwen3":
            self.q_norm, self.k_norm = (
                HeadNorm(self.head, build.config.eps, build.dtype) for _ in range(2)
            )
        self.core = CoreAttention(build.config.windows[layer])
        self.o_proj = build.row(shape.heads * self.head, bias=shape.o_bias)
        self.adapters = build.adapters_of(
            layer, "self_attn", "q_proj", "k_proj", "v_proj", "o_proj"
        )

    def _add_biases(self, build: Build) -> None:
        """Add our own biases: NxD's cannot be built on `meta`, and it would not sum the gradients
        of their copies.
        """
        weights = self.qkv_proj.weight_q, self.qkv_proj.weight_k, self.qkv_proj.weight_v
        for letter, weight in zip("qkv", weights, strict=True):
            bias = nn.Parameter(torch.zeros(weight.shape[0], dtype=build.dtype))
            setattr(self.qkv_proj, f"bias_{letter}", bias)

    def sum_copies(self) -> None:
        """Sum the gradients of repeated key/value biases; call it once the parameters are on their
        device.
        """
        if self.qkv_proj.kv_size_multiplier > 1 and self.qkv_proj.bias_k is not None:
            for bias in (self.qkv_proj.bias_k, self.qkv_proj.bias_v):
                if bias.requires_grad:
                    bias.register_hook(sum_over_copies)

    def forward(self, x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        positions, samples = unpack_places(places)
        parts = zip(("q_proj", "k_proj", "v_proj"), self.qkv_proj(x), strict=True)
        q, k, v = (self._heads(self.adapters.add(name, x, part)) for name, part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary.turn(q, positions), self.rotary.turn(k, positions)
        # The library repeats key/value heads only as often as tp requires: queries may share one.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attention_out = _merge_heads(self.core(q, k, v, samples))
        return self.adapters.add("o_proj", attention_out, self.o_proj(attention_out))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.head).permute(1, 2, 0, 3)


class LlamaMLP(nn.Module):
    """Gate and up projection in one matrix, as NxD stores them."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        shape = build.shape
        self.gate_up_proj = build.column(2 * shape.intermediate, bias=shape.mlp_bias, stride=2)
        self.down_proj = build.row(shape.intermediate, bias=shape.mlp_bias)
        self.act = _activation(build.config.activation)
        self.adapters = build.adapters_of(layer, "mlp", "gate_proj", "up_proj", "down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # stride=2: each rank has its part of gate, then its part of up, so halves split locally.
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        inner = self.act(self.adapters.add("gate_proj", x, gate)) * self.adapters.add(
            "up_proj", x, up
        )
        return self.adapters.add("down_proj", inner, self.down_proj(inner))


class LlamaDecoderLayer(nn.Module):
    """A block of Llama, Mistral and Qwen."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = build.norm(), build.norm()
        self.self_attn, self.mlp = LlamaAttention(build, layer), LlamaMLP(build, layer)

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), places)
        return x + self.mlp(self.post_attention_layernorm(x))


class NeoXAttention(nn.Module):
    """Each head's query, key and value rows lie together, so a rank's part is a block of whole
    heads (stride 1).
    """

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        shape = build.shape
        self.head, self.rotary = shape.head_dim, build.rotary
        self.query_key_value = build.column(3 * shape.heads * self.head, bias=shape.qkv_bias)
        self.core = CoreAttention(build.config.windows[layer])
        self.dense = build.row(shape.heads * self.head, bias=shape.o_bias)
        self.adapters = build.adapters_of(layer, "attention", "query_key_value", "dense")

    def forward(self, x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        positions, samples = unpack_places(places)
        rows = self.adapters.add("query_key_value", x, self.query_key_value(x))
        rows = rows.view(rows.shape[0], rows.shape[1], -1, 3 * self.head).permute(1, 2, 0, 3)
        q, k, v = rows.split(self.head, -1)
        q, k = self.rotary.turn(q, positions), self.rotary.turn(k, positions)
        attention_out = _merge_heads(self.core(q, k, v, samples))
        return self.adapters.add("dense", attention_out, self.dense(attention_out))


class NeoXMLP(nn.Module):
    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        self.dense_h_to_4h = build.column(build.shape.intermediate, bias=build.shape.mlp_bias)
        self.dense_4h_to_h = build.row(build.shape.intermediate, bias=build.shape.mlp_bias)
        self.act = _activation(build.config.activation)
        self.adapters = build.adapters_of(layer, "mlp", "dense_h_to_4h", "dense_4h_to_h")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act(self.adapters.add("dense_h_to_4h", x, self.dense_h_to_4h(x)))
        return self.adapters.add("dense_4h_to_h", inner, self.dense_4h_to_h(inner))


class NeoXDecoderLayer(nn.Module):
    """A block of GPT-NeoX and Pythia, its residual parallel or sequential."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = build.norm(), build.norm()
        self.attention, self.mlp = NeoXAttention(build, layer), NeoXMLP(build, layer)
        self.parallel = build.config.parallel_residual

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        attention_out = self.attention(self.input_layernorm(x), places)
        # `use_parallel_residual` of GPT-NeoX: the MLP reads x without the result of attention.
        if self.parallel:
            return x + attention_out + self.mlp(self.post_attention_layernorm(x))
        x = x + attention_out
        return x + self.mlp(self.post_attention_layernorm(x))


class WeighedLoss(nn.Module):
    """Sum of token losses times weights; the caller's weights make it the mean of the global batch.

    Without gradients also the sum of the weights of labels that are the likeliest token: both in
    one vector.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._vocabulary, self._padded = build.shape.vocab, build.vocabulary
        self._kept: dict[torch.device, torch.Tensor] = {}

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """`logits` [S, B, V / tp]; `labels` and `weights` [B, S]; ignored labels have weight 0."""
        # parallel_cross_entropy writes into its argument.
        wide = logits.float() if logits.dtype != torch.float32 else logits.clone()
        if self._padded > self._vocabulary:
            wide = wide + self._bar(wide)
        targets, weights = labels.transpose(0, 1).contiguous(), weights.transpose(0, 1)
        hits = None if torch.is_grad_enabled() else self._likeliest(wide, targets)
        loss = (parallel_cross_entropy(wide.contiguous(), targets) * weights).sum()
        return loss if hits is None else torch.stack([loss, (hits * weights).sum()])

    def _likeliest(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[S, B]: 1 if no token is likelier than the label, else 0."""
        rows, group = logits.shape[-1], get_tensor_model_parallel_group()
        best = logits.max(-1).values
        dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
        local = targets - get_tensor_model_parallel_rank() * rows
        label_logits = logits.gather(-1, local.clamp(0, rows - 1)[..., None])[..., 0]
        # Only the rank with the label's column can have a hit; MAX gives it to all.
        hits = ((local >= 0) & (local < rows) & (label_logits == best)).float()
        dist.all_reduce(hits, op=dist.ReduceOp.MAX, group=group)
        return hits

    def _bar(self, logits: torch.Tensor) -> torch.Tensor:
        """[V / tp]: keeps padding out of the softmax.

        Made on the host, so that all ranks have the same graph.
        """
        if logits.device not in self._kept:
            rows = logits.shape[-1]
            tokens = torch.arange(rows) + get_tensor_model_parallel_rank() * rows
            bar = torch.zeros(rows).masked_fill(
                tokens >= self._vocabulary, torch.finfo(torch.float32).min
            )
            self._kept[logits.device] = bar.to(logits.device)
        return self._kept[logits.device]


class Decoder(nn.Module):
    """Embedding, layers and final norm under the family's names."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        family, layer = FAMILIES[build.shape.family], layer_class(build.shape)
        embed = ParallelEmbedding(
            build.vocabulary,
            build.shape.hidden,
            dtype=build.dtype,
            padding_idx=None if build.shape.family == "gpt_neox" else build.padding,
            sequence_parallel_enabled=build.sequence_parallel,
        )
        if build.padding == 0 and build.shape.family != "gpt_neox" and embed.start_index == 0:
            embed.padding_idx = 0  # the library takes 0 as none
        setattr(self, family.embed, embed)
        self.layers = nn.ModuleList([layer(build, i) for i in range(build.shape.layers)])
        setattr(self, family.norm, build.norm())


class CausalLM(nn.Module):
    """The whole model; NxD's tracer follows `forward` and cuts it between layers."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        family = FAMILIES[build.shape.family]
        decoder = Decoder(build)
        setattr(self, family.prefix, decoder)
        head = build.column(build.vocabulary, bias=False)
        setattr(self, family.head, head)
        self.loss = WeighedLoss(build)
        self.tie()
        if build.adapters is not None:
            # A layer computed again needs an input with a gradient, or its adapters get none.
            getattr(decoder, family.embed).register_forward_hook(_with_gradient)
            self.freeze()

    def freeze(self) -> None:
        """Train only the adapters."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(factor_of(name) is not None)

    def tie(self) -> None:
        """Use one matrix for embedding and head if config.json says so."""
        family = FAMILIES[self.build.shape.family]
        if self.build.shape.tied:
            embed = getattr(getattr(self, family.prefix), family.embed)
            getattr(self, family.head).weight = embed.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the weighed loss of `input_ids` [B, S]."""
        return self.run(input_ids, labels, weights, None)

    def run(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        places: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same, within the samples of each row if their `places` (`places_of`) are given."""
        family = FAMILIES[self.build.shape.family]
        decoder = getattr(self, family.prefix)
        x = getattr(decoder, family.embed)(input_ids)
        if not self.build.sequence_parallel:  # else the embedding has transposed it
            x = x.transpose(0, 1).contiguous()
        for layer in decoder.layers:
            x = layer(x, places)
        logits = getattr(self, family.head)(getattr(decoder, family.norm)(x))
        return self.loss(logits, labels, weights)


class PackedCausalLM(CausalLM):
    """A model whose rows hold several samples; a separate class, as the pipeline is traced by
    these arguments.
    """

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the weighed loss of `input_ids` [B, S] with `places` [B, 2, S]."""
        return self.run(input_ids, labels, weights, places)


def layer_class(shape: ModelShape) -> type[nn.Module]:
    """The layer between which a pipeline is cut, and which full activation checkpointing wraps."""
    return NeoXDecoderLayer if shape.family == "gpt_neox" else LlamaDecoderLayer


def _merge_heads(heads: torch.Tensor) -> torch.Tensor:
    """[B, heads, S, head size] -> [S, B, heads x head size]."""
    return heads.permute(2, 0, 1, 3).flatten(2)


def _activation(name: str) -> Any:
    from transformers.activations import ACT2FN

    return F.silu if name == "silu" else ACT2FN[name]


def _with_gradient(_module: nn.Module, _args: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return hidden_states.requires_grad_() if torch.is_grad_enabled() else hidden_states
