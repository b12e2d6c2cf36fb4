"""The sizes of a decoder, its parameters, and what follows from them: counts, FLOPs, and the meshes
that divide it.

Pure Python. Names are those in Hugging Face files; `ModelShape.file_name` translates the names of
transformers' modules, which may differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role, Spec, block, norm
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.family import Bias, Family
from smtrain.core.model.layer_kinds import layer_windows, linear_layers, sparse_layers
from smtrain.core.model.sizes import (
    DeltaSizes,
    ExpertSizes,
    LatentSizes,
    delta_sizes,
    expert_sizes,
    full_layer_sizes,
    head_sizes,
    mtp_layers,
    read_size,
    untrained_part,
)
from smtrain.core.model.text_part import text_part
from smtrain.core.model.unread_keys import refused_key
from smtrain.core.model.unsupported_model import odd_attention, refusal
from smtrain.core.text import with_article

LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
ROUTER_PARTS = (".mlp.gate.weight", ".mlp.e_score_correction_bias")
"""transformers' names of routers and of biases next to them, which files call otherwise (Mixtral,
MiniMax-M2).
"""
"""Matches the number of the layer in a parameter's name."""


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
    full: tuple[bool, ...] = ()
    """Whether each layer sees everything, if some have a window."""
    full_head_dim: int | None = None
    """Head size of layers that see everything, if it differs from head_dim; the next two are alike.
    """
    full_kv_heads: int | None = None
    values_are_keys: bool = False
    """These layers have no values but their keys."""
    capped: bool = False
    """Logits are bounded by a tanh."""
    positions: int | None = None
    """Rows of the table of learned positions, if there is one."""
    delta: DeltaSizes | None = None
    """Sizes of the layers with linear attention, if there are any."""
    linear: tuple[bool, ...] = ()
    """Whether each layer has linear attention, if only some have it."""
    experts: ExpertSizes | None = None
    """Sizes of the layers with experts, if there are any."""
    sparse: tuple[bool, ...] = ()
    """Whether each layer has experts, if only some have them."""
    latent: LatentSizes | None = None
    """Sizes of latent attention; `head_dim` is then that of queries and keys."""
    has_qk_norm: bool = True
    """False: config.json leaves out the family's norms of queries and keys."""
    mtp_layers: int = field(default=0, compare=False)
    """Layers of the files that predict further tokens, and are left out."""
    activation: str = "silu"
    """The MLP's activation by transformers' name, which decides what its backward pass keeps."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the contents of a `config.json`, of a multimodal model the text part.

        Raises `CheckpointError` for a family or a config we cannot train.
        """
        full_config, config = config, text_part(config)
        kind = str(config.get("model_type"))
        family = FAMILIES.get(kind)
        if family is None:
            raise CheckpointError(refusal(full_config, config, FAMILIES))
        if fault := odd_attention(config):
            raise CheckpointError(fault)
        renamed_settings = {
            smtrain_key: config[usual]
            for usual, smtrain_key in family.keys.items()
            if usual in config
        }
        got = {
            **family.defaults,
            **renamed_settings,
            **config,
        }  # a null in config.json overrides the default

        if fault := untrained_part(config, family) or refused_key(config, family):
            raise CheckpointError(fault)

        size = partial(read_size, got, family)
        gpt2, hidden_size, layers = (
            family.form == "gpt2",
            size("hidden_size"),
            size("num_hidden_layers"),
        )
        slides = family.windows in ("always", "kinds") or (
            family.windows == "asked" and got.get("use_sliding_window")
        )
        window = (
            size("sliding_window") if slides and got.get("sliding_window") is not None else None
        )
        full: tuple[bool, ...] = ()
        if window is not None or family.windows == "kinds":
            full = tuple(w is None for w in layer_windows(got, family, layers, window))
        if family.full_sizes:
            got |= full_layer_sizes(got, full)
        linear, sparse = linear_layers(got, family, layers), sparse_layers(got, family, layers)

        def has_bias(rule: Bias, key: str) -> bool:
            return rule == "always" or (rule == "key" and bool(got.get(key, False)))

        return cls(
            family=family.model_type,
            hidden=hidden_size,
            intermediate=(
                4 * hidden_size
                if gpt2 and got.get("n_inner") is None
                else size("n_inner" if gpt2 else "intermediate_size")
            ),
            layers=layers,
            **head_sizes(got, family),
            vocab=size("vocab_size"),
            tied=bool(got.get("tie_word_embeddings", False)),
            qkv_bias=has_bias(family.qkv_bias, "attention_bias"),
            o_bias=has_bias(family.o_bias, family.o_bias_key),
            mlp_bias=has_bias(family.mlp_bias, "mlp_bias"),
            sliding_window=window,
            full=full,
            values_are_keys=family.full_sizes and bool(got.get("attention_k_eq_v")),
            capped="cap" in family.scales and got.get(family.scales["cap"][0]) is not None,
            positions=size("max_position_embeddings") if gpt2 else None,
            delta=delta_sizes(got, family) if any(linear) else None,
            linear=linear if any(linear) and not all(linear) else (),
            experts=expert_sizes(config, got, family) if any(sparse) else None,
            sparse=sparse if any(sparse) and not all(sparse) else (),
            has_qk_norm=family.qk_norm_key is None or bool(got.get(family.qk_norm_key)),
            mtp_layers=mtp_layers(got, family.mtp) if family.mtp is not None else 0,
            activation=str(got.get(family.activation[0]) or family.activation[1]),
        )

    @property
    def by_nxd(self) -> bool:
        """Whether engine nxd trains such a model; engine native trains all."""
        return self.rules.nxd_and_megatron and self.positions is None

    @property
    def rules(self) -> Family:
        """The family's row of the table."""
        return FAMILIES[self.family]

    @property
    def has_mlp(self) -> bool:
        """Whether layers have an MLP, if all are of one kind."""
        names = self.rules.experts
        return self.experts is None or (names is not None and names.next_to_mlp)

    @property
    def layers_behind(self) -> int:
        """Layers of the files behind the last one; `mtp_layers` may have a separate name."""
        return 0 if "mtp." in self.rules.ignored else self.mtp_layers

    @property
    def qk_norm(self) -> Literal["head", "wide"] | None:
        """The norm of queries and keys, if there is one."""
        return self.rules.qk_norm if self.has_qk_norm else None

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def mean_head_dim(self) -> float:
        """The mean of a head's numbers of keys and of values."""
        return (self.head_dim + self.value_dim) / 2

    @property
    def rotary_head_dim(self) -> int:
        """Numbers of a head among which some or all turn."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def plain(self) -> bool:
        """Whether norms have a bias and the MLP no gate, as in GPT-NeoX and GPT-2."""
        return self.rules.norm_bias

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """All parameters in the order of the forward pass; a tied head is not listed."""
        f = self.rules
        layers = (
            replace(s, name=f"{f.prefix}.{f.layers}.{i}.{s.name}")
            for i, kind in enumerate(self.by_layer)
            for s in kind.layer
        )
        first, last = self._ends
        return (*first, *layers, *last)

    @cached_property
    def by_layer(self) -> tuple[ModelShape, ...]:
        """For each layer, the shape of a model that has only layers of its kind."""
        if self.linear or self.sparse:
            has_net = self.linear or (self.delta is not None,) * self.layers
            has_experts = self.sparse or (self.experts is not None,) * self.layers
            plain = replace(self, linear=(), sparse=(), delta=None, experts=None)
            kinds = {
                (net, experts): replace(
                    plain,
                    delta=self.delta if net else None,
                    experts=self.experts if experts else None,
                )
                for net, experts in {*zip(has_net, has_experts, strict=True)}
            }
            return tuple(kinds[kind] for kind in zip(has_net, has_experts, strict=True))
        if self.full_head_dim is None:
            return (self,) * self.layers
        base_shape = replace(self, full=(), full_head_dim=None, full_kv_heads=None)
        sliding_shape = replace(base_shape, values_are_keys=False)
        full = replace(
            base_shape,
            head_dim=self.full_head_dim,
            kv_heads=self.full_kv_heads or self.kv_heads,
            sliding_window=None,
        )
        return tuple(
            full if sees_all else sliding_shape for sees_all in self.full or (True,) * self.layers
        )

    @cached_property
    def kinds(self) -> Counter[ModelShape]:
        """The number of layers of each shape in `by_layer`."""
        return Counter(self.by_layer)

    @property
    def widest_head(self) -> int:
        """The largest head size of a layer."""
        return max(self.head_dim, self.value_dim, self.full_head_dim or 0)

    @cached_property
    def layer(self) -> tuple[Spec, ...]:
        """The parameters of one decoder layer, by their names within it, if all layers are of one
        kind.
        """
        return tuple(block(self))

    @cached_property
    def _ends(self) -> tuple[list[Spec], list[Spec]]:
        """The parameters before the first decoder layer, and those after the last."""
        f, table = self.rules, (self.vocab, self.hidden)
        first = [Spec(self.embed_name, Role.VOCAB, table)]
        if self.positions_name is not None and self.positions is not None:
            first.append(Spec(self.positions_name, Role.WHOLE, (self.positions, self.hidden)))
        last = list(norm(f"{f.prefix}.{f.norm}", self.hidden, f.norm_bias))
        if not self.tied:
            last.append(Spec(self.head_name, Role.VOCAB, table))
        return first, last

    def numbers(self, is_counted: Callable[[Spec], bool] = lambda spec: spec.is_parameter) -> int:
        """Size of the parameters for which `is_counted` is true; one layer of each kind is
        multiplied.
        """
        ends = sum(s.size for part in self._ends for s in part if is_counted(s))
        return ends + sum(
            n * sum(s.size for s in kind.layer if is_counted(s)) for kind, n in self.kinds.items()
        )

    @property
    def largest(self) -> int:
        """Size of the largest parameter."""
        first, last = self._ends
        return max(s.size for s in (*first, *(s for kind in self.kinds for s in kind.layer), *last))

    @property
    def embed_name(self) -> str:
        f = self.rules
        return f"{f.prefix}.{f.embed}.weight"

    @property
    def positions_name(self) -> str | None:
        f = self.rules
        return None if self.positions is None else f"{f.prefix}.{f.positions}.weight"

    @property
    def head_name(self) -> str:
        """The output matrix's name in files; that of the embedding in a tied model."""
        return self.embed_name if self.tied else f"{self.rules.head}.weight"

    def file_name(self, module_name: str) -> str:
        """The name in files of the parameter that transformers calls `module_name`."""
        name = self.rules.module_names.get(module_name, module_name)
        if self.experts is not None and self.rules.experts is not None:
            name = name.replace(".mlp.gate.", f".{self.rules.experts.router}.")
            if self.rules.experts.bias is not None:
                name = name.replace(ROUTER_PARTS[1], f".{self.rules.experts.bias}")
        return self.embed_name if self.tied and name == f"{self.rules.head}.weight" else name

    def file_parts(self, module_name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The parameters in files, with their shapes, of which the module's parameter `module_name`
        consists.

        transformers 5 has gate_up_proj [E, 2F, H] and down_proj [E, H, F] of all experts of a layer
        for the tensors of each expert in files. They follow one another in the module's memory in
        the order given here.
        """
        names, (path, _, leaf) = self.rules.experts, module_name.rpartition(".")
        if names is None or names.stacked or not path.endswith(".mlp.experts"):
            return {self.file_name(module_name): shape}
        path = path.removesuffix("mlp.experts") + names.path
        gate, up, down = names.parts
        count, rows, columns = shape
        if leaf == "down_proj":
            return {f"{path}.{j}.{down}.weight": (rows, columns) for j in range(count)}
        return {
            f"{path}.{j}.{part}.weight": (rows // 2, columns)
            for j in range(count)
            for part in (gate, up)
        }

    def left_out_part(self, name: str) -> str | None:
        """The beginning of the name of a tensor in files that the text model leaves out; None for a
        parameter, and for an unknown tensor.
        """
        ignored_names, m = self.rules.ignored, LAYER.search(name)
        if m and self.layers <= int(m[1]) < self.layers + self.layers_behind:
            return name[: m.end()]
        return next((start for start in ignored_names if name.startswith(start)), None)

    def file_aliases(self, name: str) -> list[str]:
        """Other names of `name` in files, as some tools write the module's name."""
        family = self.rules
        bare = [name.removeprefix(f"{family.prefix}.")] if family.unprefixed else []
        return [*bare, *(module for module, file in family.module_names.items() if file == name)]

    def parameters(self) -> int:
        """Number of parameters; a tied matrix counts once."""
        return self.numbers()

    def active_parameters(self) -> int:
        """Number of parameters that a token meets: of the experts of a layer, only those that it
        chooses.
        """
        if self.experts is None:
            return self.parameters()
        of_experts = self.numbers(lambda spec: spec.of_experts)
        return (
            self.parameters() - of_experts + of_experts * self.experts.chosen // self.experts.count
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one token's forward and backward pass, for MFU;
        recomputation not counted.

        6 N + 12 L H Q T of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): N the
        weights that multiply (everything but the embedding lookup, norms and biases; a tied head
        does multiply), L layers, H heads, Q head size (the mean of a key's and a value's), T the
        sequence length or the sliding window, if shorter. As in PaLM, the causal mask saves nothing
        here. A gated delta net has in place of 12 H Q T three products of a head's keys and values
        (the state's value for the key, the state's update, its value for the query): 18 D_k D_v for
        each value head. Of experts only those count that a token chooses.
        """
        spans = sum(
            layer.mean_head_dim
            * (seq_len if sees_all else min(seq_len, layer.sliding_window or seq_len))
            for layer, sees_all in zip(
                self.by_layer, self.full or (False,) * self.layers, strict=True
            )
            if layer.delta is None
        )
        nets = sum(n for kind, n in self.kinds.items() if kind.delta is not None)
        recurrent = 18.0 * nets * self.delta.values * self.delta.key_dim if self.delta else 0.0
        return 6.0 * self.matmul_parameters() + 12.0 * self.heads * spans + recurrent

    def matmul_parameters(self) -> float:
        """Number of weights that a token is multiplied with: N of `flops_per_token`."""
        count: float = (
            self.numbers(lambda spec: spec.is_matrix) - (self.positions or 0) * self.hidden
        )
        if self.experts is not None:
            idle = self.experts.count - self.experts.chosen
            count -= (
                self.numbers(lambda spec: spec.is_matrix and spec.of_experts)
                * idle
                / self.experts.count
            )
        return count if self.tied else count - self.vocab * self.hidden

    def mesh_faults(self, tp: int, pp: int, ep: int = 1, cp: int = 1) -> list[str]:
        """All reasons, one sentence each, why this model cannot be divided for (tp, pp, ep, cp)."""
        faults = []
        if self.heads % tp:
            faults.append(
                f"parallel.tp = {tp} does not divide the model's {self.heads} attention heads"
            )
        for kv_heads in dict.fromkeys(kind.kv_heads for kind in self.kinds):
            if self.latent is None and kv_heads % tp and tp % kv_heads:
                faults.append(
                    f"parallel.tp = {tp} does not divide the model's {kv_heads} key/value heads and"
                    " is not a multiple of them"
                )
        if self.delta is not None and self.delta.key_heads % tp:
            faults.append(
                f"parallel.tp = {tp} does not divide the {self.delta.key_heads} key heads of the"
                " model's linear attention"
            )
        elif self.delta is not None and self.delta.key_heads // tp % cp:
            faults.append(
                f"parallel.cp = {cp} does not divide the {self.delta.key_heads // tp} key heads of"
                " the model's linear"
                f" attention{f' on a process with parallel.tp = {tp}' if tp > 1 else ''}"
            )
        if self.experts is not None and self.experts.width % tp:
            faults.append(
                f"parallel.tp = {tp} does not divide the {self.experts.width} units of the model's"
                " experts"
            )
        if self.experts is not None and self.experts.shared % tp:
            faults.append(
                f"parallel.tp = {tp} does not divide the {self.experts.shared} units of the expert"
                " that all tokens share"
            )
        if self.experts is not None and self.experts.count % ep:
            faults.append(
                f"parallel.ep = {ep} does not divide the {self.experts.count} experts of the"
                " model's layers"
            )
        if self.experts is None and ep > 1:
            faults.append(
                f"parallel.ep: {with_article(self.family)} model has no experts to divide; set it"
                " to 1"
            )
        if any(kind.has_mlp for kind in self.kinds) and self.intermediate % tp:
            faults.append(
                f"parallel.tp = {tp} does not divide the model's intermediate size"
                f" {self.intermediate}"
            )
        if self.rules.fused and self.kv_heads % tp and not tp % self.kv_heads:
            faults.append(
                f"parallel.tp = {tp} is more than the model's {self.kv_heads} key/value heads,"
                " which smtrain does not copy in a fused qkv_proj"
            )
        if pp > self.layers:
            faults.append(f"parallel.pp = {pp} is more than the model's {self.layers} layers")
        return faults
