"""neuronx-nemo-megatron's checkpoints made only from facts about its source, without the writer of
smtrain.

Weights are given under Hugging Face names; what the models of neuronx-nemo-megatron hold of them,
and its place, is written here once more, in torch.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from smtrain.core.model.shape import ModelShape

Weights = dict[str, torch.Tensor]
PREFIX = "model.language_model."
OLD, NEW = "torch_xla.utils.serialization", "nemo.collections.nlp.parts.serialization"


@dataclass(frozen=True)
class How:
    """Differences between releases, converters and trainings."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    qkv: Literal["one", "two"] = "one"
    mlp: Literal["one", "two"] = "one"
    xser: str | None = None
    """The module of the references' class; None: the tensors are in the file itself."""
    head: str = PREFIX + "output_layer.weight"
    divisor: int = 8
    name: str = "megatron_llama--step=12-consumed_samples=96.0.ckpt"
    buffers: bool = True


def write(folder: Path, config: dict[str, Any], weights: Weights, how: How) -> Path:
    """A checkpoint of all ranks."""
    for t in range(how.tp):
        for p in range(how.pp):
            at = folder
            if how.pp > 1:
                at = folder / f"tp_rank_{t:02d}_pp_rank_{p:03d}"
            elif how.tp > 1:
                at = folder / f"mp_rank_{t:02d}"
            at.mkdir(parents=True, exist_ok=True)
            chunks = [
                _chunk(ModelShape.from_config(config), weights, how, t, p, v)
                for v in range(how.vpp)
            ]
            state = (
                chunks[0]
                if how.vpp == 1
                else {f"model{v}": chunk for v, chunk in enumerate(chunks)}
            )
            _save(at / how.name, state, how.xser)
    return folder


def _chunk(shape: ModelShape, weights: Weights, how: How, t: int, p: int, v: int) -> Weights:
    """The state_dict of virtual stage `v` of stage `p` on rank `t`."""
    each = shape.layers // (how.pp * how.vpp)
    first, last = v == 0 and p == 0, v == how.vpp - 1 and p == how.pp - 1
    plain = shape.family != "llama"
    out: Weights = {}

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(how.tp)[t]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        unit = how.divisor * how.tp
        return rows(
            torch.cat(
                [tensor, torch.randn(-len(tensor) % unit, *tensor.shape[1:]).to(tensor.dtype)]
            )
        )

    names = {
        "llama": ("model", "layers", "embed_tokens", "norm"),
        "gpt_neox": ("gpt_neox", "layers", "embed_in", "final_layer_norm"),
        "gpt2": ("transformer", "h", "wte", "ln_f"),
    }[shape.family]
    root, layers, embed, norm = names
    embedding = weights[f"{root}.{embed}.weight"]
    if first:
        out[f"{PREFIX}embedding.word_embeddings.weight"] = padded(embedding)
        if shape.family == "gpt2":
            out[f"{PREFIX}embedding.position_embeddings.weight"] = weights[f"{root}.wpe.weight"]
    for local in range(each):
        number = (v * how.pp + p) * each + local
        layer = f"{PREFIX}encoder.layers.{local}."
        held = {
            name.removeprefix(f"{root}.{layers}.{number}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"{root}.{layers}.{number}.")
        }
        made = _plain(shape, held, how.tp, t) if plain else _llama(shape, held, how, t)
        out |= {layer + name: tensor for name, tensor in made.items()}
        if how.buffers and shape.family != "gpt2":
            out[f"{layer}self_attention.core_attention.rotary_emb.inv_freq"] = torch.ones(2)
    if last:
        for kind in ("weight", "bias") if plain else ("weight",):
            out[f"{PREFIX}encoder.final_layernorm.{kind}"] = weights[f"{root}.{norm}.{kind}"]
        if not shape.tied:
            out[how.head] = padded(
                weights["embed_out.weight" if shape.family == "gpt_neox" else "lm_head.weight"]
            )
        elif not first:
            out["model.word_embeddings.weight"] = padded(embedding)
    return {name: tensor.clone() for name, tensor in out.items()}


def _llama(shape: ModelShape, held: Weights, how: How, t: int) -> Weights:
    groups, d = shape.kv_heads, shape.head_dim
    q, k, v = (held[f"self_attn.{n}_proj.weight"] for n in "qkv")
    q, k, v = (
        q.view(groups, -1, d, shape.hidden),
        k.view(groups, 1, d, shape.hidden),
        v.view(groups, 1, d, shape.hidden),
    )
    mine = slice(t * groups // how.tp, (t + 1) * groups // how.tp)
    gate, up = (held[f"mlp.{n}_proj.weight"].chunk(how.tp)[t] for n in ("gate", "up"))
    out = {
        "input_layernorm.weight": held["input_layernorm.weight"],
        "post_attention_layernorm.weight": held["post_attention_layernorm.weight"],
        "self_attention.dense.weight": held["self_attn.o_proj.weight"].chunk(how.tp, 1)[t],
        "mlp.dense_4h_to_h.weight": held["mlp.down_proj.weight"].chunk(how.tp, 1)[t],
    }
    if how.qkv == "one":
        out["self_attention.query_key_value.weight"] = torch.cat([q, k, v], 1)[mine].reshape(
            -1, shape.hidden
        )
    else:
        out["self_attention.query.weight"] = q[mine].reshape(-1, shape.hidden)
        out["self_attention.key_value.weight"] = torch.cat([k, v], 1)[mine].reshape(
            -1, shape.hidden
        )
    if how.mlp == "one":
        out["mlp.dense_h_to_4h.weight"] = torch.cat([gate, up])
    else:
        out |= {"mlp.dense_h_to_4h.weight": gate, "mlp.dense_h_to_4h_2.weight": up}
    return out


def _plain(shape: ModelShape, held: Weights, tp: int, t: int) -> Weights:
    """Layers of GPT-NeoX, in Megatron's row order, and of GPT-2, with transposed matrices and
    queries first.
    """
    if shape.family == "gpt2":
        theirs = {
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.c_attn": "query_key_value",
            "attn.c_proj": "attention.dense",
            "mlp.c_fc": "dense_h_to_4h",
            "mlp.c_proj": "dense_4h_to_h",
        }
        held = {
            f"{theirs[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": (
                tensor.t() if tensor.dim() == 2 else tensor
            )
            for name, tensor in held.items()
            if name.rpartition(".")[0] in theirs
        }
        for kind in ("weight", "bias"):
            thirds = held[f"query_key_value.{kind}"]
            by_head = thirds.view(3, shape.heads, shape.head_dim, *thirds.shape[1:]).transpose(0, 1)
            held[f"query_key_value.{kind}"] = by_head.reshape(thirds.shape)
    else:
        held = {
            name.replace("attention.query_key_value", "query_key_value"): x
            for name, x in held.items()
        }
        held = {name.removeprefix("mlp."): tensor for name, tensor in held.items()}
    out = {}
    for kind in ("weight", "bias"):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{norm}.{kind}"] = held[f"{norm}.{kind}"]
        out[f"self_attention.query_key_value.{kind}"] = held[f"query_key_value.{kind}"].chunk(tp)[t]
        out[f"mlp.dense_h_to_4h.{kind}"] = held[f"dense_h_to_4h.{kind}"].chunk(tp)[t]
        for ours, name in (
            ("self_attention.dense", "attention.dense"),
            ("mlp.dense_4h_to_h", "dense_4h_to_h"),
        ):
            tensor = held[f"{name}.{kind}"]
            out[f"{ours}.{kind}"] = tensor.chunk(tp, 1)[t] if kind == "weight" else tensor
    return out


def _save(file: Path, state: dict[str, Any], xser: str | None) -> None:
    whole = {
        "epoch": 0,
        "global_step": 12,
        "pytorch-lightning_version": "1.8.6",
        "optimizer_states": [{"lr": 0.1}],
    }
    if xser is None:
        torch.save({**whole, "state_dict": state}, file)
        return
    folder = file.with_name(f"{file.name}.tensors")
    folder.mkdir()
    number = 0

    def kept(held: Any) -> Any:
        nonlocal number
        if isinstance(held, dict):
            return {name: kept(tensor) for name, tensor in held.items()}
        torch.save(held, folder / f"tensor_{number}.pt")
        tensor = reference()
        tensor.__dict__.update(
            {"tid": number}
            if xser == OLD
            else {"tid": number, "shape": held.shape, "dtype": held.dtype}
        )
        number += 1
        return tensor

    with _importable(xser) as reference:
        torch.save({**whole, "state_dict": kept(state)}, file)


@contextlib.contextmanager
def _importable(module: str) -> Iterator[type]:
    """Provide a class `TensorReference` in that module, for pickling."""
    kind = type("TensorReference", (), {"__module__": module})
    parts = module.split(".")
    made = {
        name: types.ModuleType(name)
        for n in range(len(parts))
        if (name := ".".join(parts[: n + 1])) not in sys.modules
    }
    vars(made.get(module) or sys.modules[module])["TensorReference"] = kind
    sys.modules.update(made)
    try:
        yield kind
    finally:
        for name in made:
            del sys.modules[name]
