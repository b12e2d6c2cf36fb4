"""The kinds of checkpoint that `convert` writes, each with its own options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.model.footprint import PRECISIONS, Precision
from smtrain.core.model.layout import KvOrder
from smtrain.core.public_api import public_class
from smtrain.core.suggest import hint

Spelling = Literal["te", "local"]
"""Megatron's layer specs, which name the norms differently."""
Release = Literal["2.15", "2.21"]
Qkv = Literal["separate", "grouped", "fused", "fused_mha"]
"""q_proj/k_proj/v_proj; qkv_proj.weight_q/k/v; qkv_proj.weight_qkv; qkv_proj.weight (as many kv
heads as queries).
"""

_CHOICES: dict[str, tuple[str, ...]] = {
    "spec": get_args(Spelling),
    "release": get_args(Release),
    "kv_order": get_args(KvOrder),
    "qkv": get_args(Qkv),
    "dtype": tuple(PRECISIONS),
}
_FROM_ONE = (
    "tp",
    "pp",
    "ep",
    "kv_multiplier",
    "vpp",
    "vocab_divisor",
    "first_stage_layers",
    "last_stage_layers",
)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Checks what all targets have in common."""

    FORMS: ClassVar[tuple[str, ...]] = ()
    """The values of `form`, the default first."""

    def __post_init__(self) -> None:
        if faults := self._faults(vars(self)):
            raise ConfigError(faults, code="config.wrong_value")

    @classmethod
    def _faults(cls, options: Mapping[str, Any]) -> list[str]:
        """Every fault of the values themselves; keys that this target does not have are checked
        too.
        """
        choices = {**_CHOICES, **({"form": cls.FORMS} if cls.FORMS else {})}
        # Fields that were left out are None, and `__post_init__` passes them too.
        values = {key: value for key, value in options.items() if value is not None}
        faults = [
            unknown_value_fault(key, values[key], allowed_values)
            for key, allowed_values in choices.items()
            if key in values and values[key] not in allowed_values
        ]
        faults += [
            f"{key}: got {values[key]}; must be at least 1"
            for key in _FROM_ONE
            if values.get(key, 1) < 1
        ]
        if values.get("max_shard_size", 1) < 1:
            faults.append(
                f"max_shard_size: got {values['max_shard_size']} bytes; must be at least 1"
            )
        return faults


@dataclass(frozen=True, kw_only=True)
class _Weights(_Options):
    dtype: Precision | None = None
    """`bf16`, `fp32` or `fp16`, converted on the way. Default: the source's."""


@dataclass(frozen=True, kw_only=True)
class _Sharded(_Weights):
    tp: int = 1
    """Tensor-parallel degree."""
    pp: int = 1
    """Pipeline-parallel degree."""


@public_class
@dataclass(frozen=True, kw_only=True)
class HuggingFace(_Weights):
    """A Hugging Face folder, which transformers and vLLM load."""

    max_shard_size: int = 5_000_000_000
    """Largest size of one file, in bytes."""


@public_class
@dataclass(frozen=True, kw_only=True)
class Nxd(_Sharded):
    """Shards of neuronx-distributed, one for each (tp, pp) rank."""

    FORMS: ClassVar[tuple[str, ...]] = ("pt", "xser")
    form: Literal["pt", "xser"] = "pt"
    """`pt`: one file a rank. `xser`: one file a tensor."""
    qkv: Qkv | None = None
    """The form of q, k and v. Default: `separate`, or `grouped` if key/value heads repeat."""
    kv_multiplier: int | None = None
    """Number of copies of each key/value head. Default: as many as tp needs."""
    kv_order: KvOrder = "tiled"
    """Order of repeated heads: `tiled` (trn1) or `grouped` (trn2)."""
    cuts: Sequence[int] | None = None
    """The last layer of each pipeline stage except the last. Default: equal stages."""


@public_class
@dataclass(frozen=True, kw_only=True)
class Native(_Sharded):
    """A checkpoint of the native engine; from another one the optimizer state goes along, and
    training can resume.
    """

    ep: int = 1
    """Expert-parallel degree."""


@public_class
@dataclass(frozen=True, kw_only=True)
class Megatron(_Sharded):
    """A checkpoint of Megatron-core, Megatron-LM or MindSpeed-LLM."""

    FORMS: ClassVar[tuple[str, ...]] = ("torch_dist", "torch")
    form: Literal["torch_dist", "torch"] = "torch_dist"
    """`torch_dist`, which any mesh reads, or `torch`, the older form of one file a rank."""
    spec: Spelling = "te"
    """Form `torch`: the layer spec whose names are written, `te` (Transformer Engine) or `local`.
    """
    vpp: int = 1
    """Form `torch`: virtual stages of each pipeline stage."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, if the stages are not even."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, if the stages are not even."""
    layers_per_stage: Sequence[int] | None = None
    """Layers of every pipeline stage, as MindSpeed-LLM's --num-layer-list."""
    vocab_divisor: int = 128
    """--make-vocab-size-divisible-by: the vocabulary is padded to a multiple of this times tp."""

    @classmethod
    def _faults(cls, options: Mapping[str, Any]) -> list[str]:
        # `torch_dist` stores whole tensors under one set of names, so these two would be silently
        # ignored.
        ignored_options = [
            f"{key}: has no effect with form: torch_dist, which any mesh reads; leave it out, or"
            " take form: torch"
            for key in ("spec", "vpp")
            if options.get("form") != "torch" and options.get(key, _DEFAULTS[key]) != _DEFAULTS[key]
        ]
        return [*super()._faults(options), *ignored_options]


@public_class
@dataclass(frozen=True, kw_only=True)
class NemoMegatron(_Sharded):
    """A checkpoint of neuronx-nemo-megatron."""

    FORMS: ClassVar[tuple[str, ...]] = ("pt", "xser")
    form: Literal["pt", "xser"] = "pt"
    """`pt`: one file a rank. `xser`: one file a tensor."""
    release: Release = "2.21"
    """The release whose names and row orders are written, `2.15` or `2.21`."""
    vocab_divisor: int = 8
    """make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times tp."""


@public_class
@dataclass(frozen=True, kw_only=True)
class Dcp(_Weights):
    """A folder of torch.distributed.checkpoint; from a native checkpoint the optimizer state goes
    along.
    """

    FORMS: ClassVar[tuple[str, ...]] = ("torchtitan", "accelerate")
    form: Literal["torchtitan", "accelerate"] = "torchtitan"
    """`torchtitan`: one folder under torchtitan's names, or `accelerate`: `pytorch_model_fsdp_0/`
    and `optimizer_0/` under Hugging Face's, as accelerate and transformers' Trainer with FSDP.
    """


@public_class
@dataclass(frozen=True, kw_only=True)
class Peft(_Options):
    """The folder that peft and vLLM load, from the checkpoints of a run with a LoRA adapter."""


Target = HuggingFace | Nxd | Native | Megatron | NemoMegatron | Dcp | Peft
KINDS: dict[str, type[Target]] = {
    "nxd": Nxd,
    "hf": HuggingFace,
    "native": Native,
    "megatron": Megatron,
    "nemo-megatron": NemoMegatron,
    "dcp": Dcp,
    "peft": Peft,
}
_DEFAULTS = {
    field.name: field.default
    for kind in KINDS.values()
    for field in fields(kind)
    if field.name not in ("form", "vocab_divisor")  # these differ by kind
}


def kind_of(target: Target) -> str:
    """The name of a target's kind on the command line."""
    return next(name for name, kind in KINDS.items() if isinstance(target, kind))


def make_target(to: str, **options: Any) -> Target:
    """Build the target named `to`, as on the command line: None and default values count as not
    given.

    Raises ConfigError with every fault, among them options that have no effect on this kind.
    """
    kind = KINDS.get(to)
    values = {key: value for key, value in options.items() if value is not None}
    faults = [] if kind else [unknown_value_fault("to", to, tuple(KINDS))]
    faults += (kind or _Options)._faults(values)
    if kind is not None:
        field_names = {field.name for field in fields(kind)}
        # `kv_order` describes the source too.
        extra = [
            key
            for key in values
            if key not in {*field_names, "kv_order"} and values[key] != _DEFAULTS.get(key)
        ]
        faults += [_without_effect(key, to) for key in extra]
        if not faults:
            return kind(**{key: value for key, value in values.items() if key in field_names})
    raise ConfigError(faults, code="config.wrong_value")


def unknown_value_fault(key: str, value: object, allowed_values: Sequence[str]) -> str:
    """The fault of an unknown word."""
    return (
        f"{key}: got {value!r}; {hint(str(value), allowed_values, table('word_names')['values'])}"
    )


def _without_effect(key: str, to: str) -> str:
    if (key, to) == ("dtype", "peft"):
        return "dtype: an adapter stays fp32, as it was trained; leave it out with to: peft"
    return f"{key}: has no effect with to: {to}; leave it out"
