"""The table of model families: their names, parameters and sizes.

Pure Python, as the client and the planner have no torch. Names are those in Hugging Face *files* (`model.safetensors`);
`file_name` translates the names of transformers' modules, which may differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role as Role
from smtrain.core.model.blocks import Spec as Spec
from smtrain.core.model.blocks import block, norm
from smtrain.core.text import with_article


@dataclass(frozen=True)
class Family:
    """The names of the parts of one model type."""

    model_type: str
    prefix: str
    embed: str
    norm: str
    head: str
    layers: str = "layers"
    attention: str = "self_attn"
    block_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    positions: str | None = None  # the table of learned positions, if any
    norm_bias: bool = False
    module_names: Mapping[str, str] = field(default_factory=dict)  # transformers' name -> the file's, if they differ
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # transformers' defaults of keys that config.json leaves out
    keys: Mapping[str, str] = field(default_factory=dict)  # config.json's own names of sizes; transformers reads both
    bare: bool = False
    """Whether there are files without the prefix."""


def _llama_like(model_type: str, **defaults: Any) -> Family:
    return Family(model_type, "model", "embed_tokens", "norm", "lm_head", defaults=defaults)


FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        _llama_like("llama"),
        _llama_like("qwen2", num_key_value_heads=32, sliding_window=4096),
        _llama_like("qwen3", num_key_value_heads=32, head_dim=128, sliding_window=4096),
        _llama_like("mistral", num_key_value_heads=8, sliding_window=4096),
        Family(
            "gpt_neox",
            "gpt_neox",
            "embed_in",
            "final_layer_norm",
            "embed_out",
            attention="attention",
            norm_bias=True,
            module_names={"lm_head.weight": "embed_out.weight"},  # transformers 5 renamed the module, not the file
            defaults={"attention_bias": True},
        ),
        Family(
            "gpt2",
            "transformer",
            "wte",
            "ln_f",
            "lm_head",
            layers="h",
            attention="attn",
            block_norms=("ln_1", "ln_2"),
            positions="wpe",
            norm_bias=True,
            defaults={"tie_word_embeddings": True, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
            | {"vocab_size": 50257},
            keys={"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
            | {"max_position_embeddings": "n_positions"},
            bare=True,  # the first files, openai-community/gpt2 among them
        ),
    )
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a mixture of experts; dense models may have the same keys with null, 0 or 1."""
    counts = (config.get(key) for key in _EXPERTS)
    return any(isinstance(n, int) and not isinstance(n, bool) and n > 1 for n in counts)


def _no_family(config: Mapping[str, Any]) -> str:
    """The sentence for a config.json whose model_type is missing or cannot be trained."""
    kind = config.get("model_type")
    if kind is not None:
        experts = " (a mixture of experts)" if is_mixture(config) else ""
        return (
            f"config.json has model_type {kind!r}{experts}, which smtrain cannot train: take one of "
            f"{', '.join(FAMILIES)}"
        )
    named = config.get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    own = next((f for f in FAMILIES if first.lower().startswith(f.replace("_", "") + "for")), None)
    if own:
        return f"config.json has no model_type: add model_type: {own}, by its architectures ({first})"
    if "_class_name" in config or "_diffusers_version" in config:
        return "config.json is of a model of diffusers, which makes pictures: give the folder of a language model"
    return (
        f"config.json has no model_type: add the one of the model (smtrain trains {', '.join(FAMILIES)}), or take the "
        "whole config.json of the model"
    )


LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
"""Matches the number of the layer in a parameter's name."""


_MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 100_000, "num_key_value_heads": 100_000}
"""Limits of sizes over which code loops, against a damaged config.json."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, and what follows from them."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    positions: int | None = None
    """Rows of the table of learned positions, if there is one."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the contents of a `config.json`. Raises `CheckpointError` for a family or a config we cannot train."""
        kind = str(config.get("model_type"))
        family = FAMILIES.get(kind)
        if family is None:
            raise CheckpointError(_no_family(config))
        named = {own: config[usual] for usual, own in family.keys.items() if usual in config}
        got = {
            **family.defaults,
            **named,
            **config,
        }  # a null in config.json overrides the default

        def size(name: str) -> int:
            key = family.keys.get(name, name)
            value = got.get(key)
            if value is None:
                raise CheckpointError(
                    f"config.json has no {key}, which {with_article(kind)} model needs (a whole number of at least "
                    "1): add it, or take the whole config.json of the model"
                )
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(
                    f"config.json has {key} = {value!r} for {with_article(kind)} model: it must be a whole number of "
                    "at least 1"
                )
            if value > (most := _MOST.get(name, 1 << 40)):
                raise CheckpointError(
                    f"config.json has {key} = {value:.4g} for {with_article(kind)} model, and more than {most:,} are "
                    "in no model: take the config.json of a model that exists"
                )
            return value

        hidden, heads = size("hidden_size"), size("num_attention_heads")
        gpt2, plain = kind == "gpt2", family.norm_bias
        kv_heads = size("num_key_value_heads") if got.get("num_key_value_heads") is not None and not plain else heads
        head_dim = size("head_dim") if got.get("head_dim") is not None and not plain else hidden // heads
        if heads % kv_heads or ((plain or got.get("head_dim") is None) and hidden % heads):
            raise CheckpointError(
                f"config.json has num_attention_heads = {heads}, which must divide hidden_size = {hidden} and be a "
                f"multiple of num_key_value_heads = {kv_heads}"
            )
        attention_bias = gpt2 or (bool(got.get("attention_bias", False)) and kind != "mistral")
        slides = kind == "mistral" or (kind in ("qwen2", "qwen3") and got.get("use_sliding_window"))
        window = size("sliding_window") if slides and got.get("sliding_window") is not None else None
        return cls(
            family=family.model_type,
            hidden=hidden,
            intermediate=4 * hidden
            if gpt2 and got.get("n_inner") is None
            else size("n_inner" if gpt2 else "intermediate_size"),
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab=size("vocab_size"),
            tied=bool(got.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=kind != "qwen2" and attention_bias,
            mlp_bias=plain or (kind == "llama" and bool(got.get("mlp_bias", False))),
            sliding_window=window,
            positions=size("max_position_embeddings") if gpt2 else None,
        )

    @property
    def plain(self) -> bool:
        """Whether norms have a bias and the MLP no gate, as in GPT-NeoX and GPT-2."""
        return FAMILIES[self.family].norm_bias

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """All parameters in the order of the forward pass; a tied head is not listed."""
        f, parts = FAMILIES[self.family], self._layer
        layers = (replace(s, name=f"{f.prefix}.{f.layers}.{i}.{s.name}") for i in range(self.layers) for s in parts)
        first, last = self._ends
        return (*first, *layers, *last)

    @cached_property
    def _layer(self) -> tuple[Spec, ...]:
        """The parameters of one decoder layer, by their names within it."""
        return tuple(block(self))

    @cached_property
    def _ends(self) -> tuple[list[Spec], list[Spec]]:
        """The parameters before the first decoder layer, and those after the last."""
        f, table = FAMILIES[self.family], (self.vocab, self.hidden)
        first = [Spec(self.embed_name, Role.VOCAB, table)]
        if self.positions_name is not None and self.positions is not None:
            first.append(Spec(self.positions_name, Role.WHOLE, (self.positions, self.hidden)))
        last = list(norm(f"{f.prefix}.{f.norm}", self.hidden, f.norm_bias))
        if not self.tied:
            last.append(Spec(self.head_name, Role.VOCAB, table))
        return first, last

    def _numbers(self, counted: Callable[[Spec], bool] = lambda spec: True) -> int:
        """Size of the parameters that are `counted`; one layer is multiplied, as all are the same."""
        ends = sum(s.size for part in self._ends for s in part if counted(s))
        return ends + self.layers * sum(s.size for s in self._layer if counted(s))

    @property
    def largest(self) -> int:
        """Size of the largest parameter."""
        first, last = self._ends
        return max(s.size for s in (*first, *self._layer, *last))

    @property
    def embed_name(self) -> str:
        f = FAMILIES[self.family]
        return f"{f.prefix}.{f.embed}.weight"

    @property
    def positions_name(self) -> str | None:
        f = FAMILIES[self.family]
        return None if self.positions is None else f"{f.prefix}.{f.positions}.weight"

    @property
    def head_name(self) -> str:
        """The output matrix's name in files; that of the embedding in a tied model."""
        return self.embed_name if self.tied else f"{FAMILIES[self.family].head}.weight"

    def file_name(self, module_name: str) -> str:
        """The name in files of the parameter that transformers calls `module_name`."""
        name = FAMILIES[self.family].module_names.get(module_name, module_name)
        return self.embed_name if self.tied and name == f"{FAMILIES[self.family].head}.weight" else name

    def file_aliases(self, name: str) -> list[str]:
        """Other names of `name` in files, as some tools write the module's name."""
        family = FAMILIES[self.family]
        bare = [name.removeprefix(f"{family.prefix}.")] if family.bare else []
        return [*bare, *(module for module, file in family.module_names.items() if file == name)]

    def parameters(self) -> int:
        """Number of parameters; a tied matrix counts once."""
        return self._numbers()

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one token's forward and backward pass, for MFU; recomputation not counted.

        6 N + 12 L H Q T of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): N the weights that multiply
        (everything but the embedding lookup, norms and biases; a tied head does multiply), L layers, H heads, Q head
        size, T the sequence length or the sliding window, if shorter. As in PaLM, the causal mask saves nothing here.
        """
        multiplied = self._numbers(lambda spec: len(spec.shape) > 1) - (self.positions or 0) * self.hidden
        if not self.tied:
            multiplied -= self.vocab * self.hidden
        span = min(seq_len, self.sliding_window or seq_len)
        return 6.0 * multiplied + 12.0 * self.layers * self.heads * self.head_dim * span

    def mesh_faults(self, tp: int, pp: int) -> list[str]:
        """All reasons, one sentence each, why this model cannot be divided for (tp, pp)."""
        faults = []
        if self.heads % tp:
            faults.append(f"parallel.tp = {tp} does not divide the model's {self.heads} attention heads")
        if self.kv_heads % tp and tp % self.kv_heads:
            faults.append(
                f"parallel.tp = {tp} does not divide the model's {self.kv_heads} key/value heads and is not a "
                "multiple of them"
            )
        if self.intermediate % tp:
            faults.append(f"parallel.tp = {tp} does not divide the model's intermediate size {self.intermediate}")
        if pp > self.layers:
            faults.append(f"parallel.pp = {pp} is more than the model's {self.layers} layers")
        return faults
