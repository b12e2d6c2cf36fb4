"""LoRA (Hu et al. 2021, arXiv 2106.09685): the adapted linears and experts, and the two trained
factors of each.

A linear W gets two matrices, A [rank, in] and B [out, rank]; its output becomes W x + scale * B A
x. A model's adapters have their own shape, so that layout, optimizer, checkpoints and planner
treat them like a whole model. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import sqrt
from typing import Any, Literal

from smtrain.core.errors import ConfigError
from smtrain.core.model.blocks import Role, Spec
from smtrain.core.model.footprint import Precision
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.core.text import with_article

ALL_LINEAR: Literal["all-linear"] = "all-linear"
"""peft's name for all linears of the decoder layers."""
A, B = ".lora_A.weight", ".lora_B.weight"
_COLUMNS_CUT = (Role.O, Role.ROW, Role.SHARED_ROW, Role.DELTA_COLUMNS)
STACKED_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""Targets: matrices of all experts of a layer as transformers 5 has them, which peft calls
target_parameters. Gate and up share their A.
"""
_PER_EXPERT = "experts.*."
"""Begins targets that are linears of each expert, as transformers 4 has them; gate and up have an A
each.
"""


@dataclass(frozen=True)
class Lora:
    """The settings of the adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Names of the adapted linears of a decoder layer, in the model's order; then of experts, as
    `expert_targets`.
    """
    rslora: bool = False
    quantize: Literal["nf4"] | None = None
    """The format of the frozen linears (core/model/quantized.py); None: the training's precision.
    """

    @property
    def scale(self) -> float:
        """The factor of B A: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, arXiv
        2312.03732).
        """
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)

    @property
    def of_experts(self) -> tuple[str, ...]:
        """The targets that are experts."""
        return tuple(
            name for name in self.targets if name in STACKED_EXPERTS or name.startswith(_PER_EXPERT)
        )

    @property
    def of_linears(self) -> tuple[str, ...]:
        """The other targets."""
        return tuple(name for name in self.targets if name not in self.of_experts)

    @property
    def of_each_expert(self) -> bool:
        """Whether each expert's linears are adapted, not the matrices of all experts."""
        return any(name.startswith(_PER_EXPERT) for name in self.targets)


def linears(shape: ModelShape) -> tuple[str, ...]:
    """The names of the decoder layers' linears, in the model's order: `q_proj`, `k_proj`...

    Routers and experts are left out, as in peft with transformers 5, which has no linear modules
    for them (`expert_targets`).
    """
    specs = (s for kind in shape.kinds for s in kind.layer if _is_linear(s) and not s.is_transposed)
    return tuple(dict.fromkeys(s.name.removesuffix(".weight").rpartition(".")[2] for s in specs))


def _is_linear(spec: Spec) -> bool:
    return len(spec.shape) == 2 and not spec.of_experts and spec.role is not Role.EXPERTS_SUM


def expert_targets(shape: ModelShape) -> tuple[str, ...]:
    """The targets that adapt a model's experts.

    Linears of each expert have the names of other linears in a model that also has layers without
    experts, or an expert that all tokens share; its experts can be adapted as matrices of all
    experts only.
    """
    names = shape.rules.experts
    if shape.experts is None or names is None:
        return ()
    return (
        STACKED_EXPERTS
        if names.stacked or shape.sparse or shape.experts.shared
        else (*STACKED_EXPERTS, *(_PER_EXPERT + part for part in names.parts))
    )


def targets_of(shape: ModelShape, targets: Sequence[str]) -> tuple[str, ...]:
    """The adapted linears and experts that `targets` name, in the model's order.

    Raises `ConfigError` for a name that the model lacks.
    """
    plain, experts = linears(shape), expert_targets(shape)
    if not plain:
        raise ConfigError(
            f"train.adapter: the linears of {with_article(shape.family)} model are stored with"
            " their inputs first (Conv1D), for which smtrain has no adapters; leave"
            " train.adapter out",
            code="config.combination",
        )
    # A plain down_proj leaves it open, as linears have that name too.
    has_stacked = any(
        _ends(target, name) for target in STACKED_EXPERTS for name in targets if name != "down_proj"
    )
    matches = {name: _match_target(name, plain, experts, has_stacked) for name in targets}
    unmatched_names = [name for name, its in matches.items() if not its]
    if unmatched_names or not targets:
        problem = (
            f"{', '.join(map(repr, unmatched_names))} matches no linear layer"
            if unmatched_names
            else "names no linear layer"
        )
        expert_linears = ", ".join(
            name.removeprefix(_PER_EXPERT) for name in experts if name.startswith(_PER_EXPERT)
        )
        of_experts = (
            f", for experts {', '.join(STACKED_EXPERTS)}"
            + f" (or {expert_linears})" * bool(expert_linears)
            if experts
            else ""
        )
        raise ConfigError(
            f"train.adapter.targets: {problem} of {with_article(shape.family)} model; take"
            f" {ALL_LINEAR} or some of {', '.join(plain)}{of_experts}",
            code="config.combination",
        )
    target_set = {name for its in matches.values() for name in its}
    _refuse_half(shape, target_set)
    return tuple(name for name in (*plain, *experts) if name in target_set)


def _match_target(
    name: str, plain: Sequence[str], experts: Sequence[str], has_stacked: bool
) -> tuple[str, ...]:
    """The targets that a user's `name` means. If experts have both forms, take the stacked one only
    if `has_stacked`: other targets are stacked too.
    """
    if name == ALL_LINEAR:
        return tuple(plain)
    if name in plain or name in experts:
        return (name,)
    if _PER_EXPERT + name in experts and not (has_stacked and "experts." + name in STACKED_EXPERTS):
        return (_PER_EXPERT + name,)
    return tuple(target for target in experts if target in STACKED_EXPERTS and _ends(target, name))


def _ends(target: str, name: str) -> bool:
    """Whether a target's name in a block ends with `name`, as peft compares target_parameters."""
    return f".mlp.{target}".endswith(f".{name}")


def _refuse_half(shape: ModelShape, target_set: set[str]) -> None:
    """Raise `ConfigError` for experts in two forms, and for gate or up without the other."""
    names = shape.rules.experts
    expert_linears = {
        name.removeprefix(_PER_EXPERT) for name in target_set if name.startswith(_PER_EXPERT)
    }
    if not expert_linears or names is None:
        return
    if target_set & {*STACKED_EXPERTS}:
        raise ConfigError(
            "train.adapter.targets: experts are named as matrices of all"
            f" ({', '.join(sorted(target_set & {*STACKED_EXPERTS}))}) and as linears of each"
            f" ({', '.join(sorted(expert_linears))}); leave out the linears",
            code="config.combination",
        )
    half = [part for part in names.parts[:2] if part in expert_linears]
    if len(half) == 1:
        other_half = next(part for part in names.parts[:2] if part not in expert_linears)
        raise ConfigError(
            f"train.adapter.targets: {half[0]} of experts needs {other_half} too, because peft with"
            " transformers 5 reads only both; name both",
            code="config.combination",
        )


@dataclass(frozen=True)
class AdapterShape(ModelShape):
    """The adapters of a model: its parameters are the factors of every adapted linear,
    `<module>.lora_A.weight`...
    """

    lora: Lora = Lora(1, 1.0)

    @classmethod
    def of(cls, shape: ModelShape, lora: Lora) -> AdapterShape:
        """The adapters of a model of `shape`."""
        return cls(**{f.name: getattr(shape, f.name) for f in fields(ModelShape)}, lora=lora)

    @property
    def base(self) -> ModelShape:
        """The shape of the model itself."""
        return ModelShape(**{f.name: getattr(self, f.name) for f in fields(ModelShape)})

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations of one token's forward and backward pass on a frozen base.

        A frozen weight has no gradient, so it takes 4 of the 6 operations of
        `ModelShape.flops_per_token`; a factor of an adapter takes all 6. What unpacks a base in 4
        bits is not counted.
        """
        base = self.base
        frozen = base.flops_per_token(seq_len) - 2.0 * base.matmul_parameters()
        return frozen + 6.0 * self.active_parameters()

    @cached_property
    def layer(self) -> tuple[Spec, ...]:  # type: ignore[override]
        """Both factors of every adapted linear of a decoder layer, in the order of the forward
        pass.

        If tensor parallelism divides the linear's rows, B is divided like it and each rank holds
        all of A; if it divides the columns, A is divided and each rank holds all of B.
        """
        out = []
        for spec in self.base.layer:
            module = spec.name.removesuffix(".weight")
            if _is_linear(spec) and module.rpartition(".")[2] in self.lora.targets:
                rows, (width, into) = spec.role not in _COLUMNS_CUT, spec.shape
                out.append(
                    Spec(module + A, Role.FACTOR if rows else spec.role, (self.lora.rank, into))
                )
                out.append(
                    Spec(module + B, spec.role if rows else Role.FACTOR, (width, self.lora.rank))
                )
        return (*out, *self._of_experts())

    def _of_experts(self) -> Iterator[Spec]:
        """Both factors of every adapted matrix of the experts, [E, rank, in] and [E, out, rank]."""
        sizes, names = self.experts, self.rules.experts
        if sizes is None or names is None:
            return
        f, h, gate_up = (
            sizes.width,
            self.hidden,
            Role.EXPERTS_PAIRS_BIAS if names.stacked == "pairs" else Role.EXPERTS_GATE_UP,
        )
        for target in self.lora.of_experts:
            leaf = target.rpartition(".")[2]
            down = leaf in (names.parts[2], "down_proj")
            into, width = (f, h) if down else (h, 2 * f if target in STACKED_EXPERTS else f)
            row = Role.EXPERTS_ROW if target not in STACKED_EXPERTS else gate_up
            roles = (Role.EXPERTS_COLUMNS, Role.FACTOR) if down else (Role.FACTOR, row)
            module, count, rank = f"{names.path}.{leaf}", sizes.count, self.lora.rank
            yield Spec(module + A, roles[0], (count, rank, into), is_stacked=True)
            yield Spec(module + B, roles[1], (count, width, rank), is_stacked=True)

    @cached_property
    def _ends(self) -> tuple[list[Spec], list[Spec]]:  # type: ignore[override]
        """No adapters: embedding and output matrix have none."""
        return [], []


def stage_faults(shape: AdapterShape, pp: int, cuts: Sequence[int] = ()) -> list[str]:
    """The pipeline stages that would have nothing to train, as layers of other kinds have the
    adapted linears.
    """
    layout, target_names = Layout(shape, 1, pp, cuts=cuts or None), " or ".join(shape.lora.targets)
    empty = [layout.layers(stage) for stage in range(pp) if not layout.names(stage)]
    return [
        f"train.adapter.targets: layers {layers[0]} to {layers[-1]}, a stage of parallel.pp = {pp},"
        f" have no {target_names}; take {ALL_LINEAR}"
        for layers in empty
    ]


def lora_settings(lora: Lora, precision: Precision | None = None) -> dict[str, Any]:
    """The settings as JSON, for a checkpoint's manifest; `precision` is that of the training, in
    which a base is quantised.
    """
    return {
        "type": "lora",
        "rank": lora.rank,
        "alpha": lora.alpha,
        "dropout": lora.dropout,
        "targets": list(lora.targets),
        "rslora": lora.rslora,
        **({"quantize": lora.quantize} if lora.quantize else {}),
        **({"quantized_in": precision} if lora.quantize and precision else {}),
    }


def from_described(settings: dict[str, Any]) -> Lora:
    """Parse the result of `lora_settings`.

    Raises `TypeError`, `KeyError` or `ValueError` for anything else.
    """
    if settings["type"] != "lora" or not all(isinstance(name, str) for name in settings["targets"]):
        raise ValueError(settings["type"])
    rank, alpha, dropout = (
        int(settings["rank"]),
        float(settings["alpha"]),
        float(settings["dropout"]),
    )
    quantize = settings.get("quantize")
    if quantize not in (None, "nf4"):
        raise ValueError(quantize)
    return Lora(
        rank, alpha, dropout, tuple(settings["targets"]), bool(settings["rslora"]), quantize
    )


def is_described(settings: Any) -> bool:
    """Whether `from_described` accepts it."""
    try:
        from_described(settings)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def another_adapter(checkpoint_lora: Lora | None, config_lora: Lora | None) -> str | None:
    """The reason why a checkpoint with one adapter cannot resume with another; None if it can.
    Dropout may change.
    """
    if checkpoint_lora is None or config_lora is None:
        if checkpoint_lora == config_lora:
            return None
        return (
            "holds a LoRA adapter, and train.adapter is not set: set it as it was, or give the run"
            " another name"
            if config_lora is None
            else (
                "holds a whole model, and train.adapter is set: give the run another name, and the"
                " exported model as model.path"
            )
        )
    checkpoint_settings, config_settings = (
        lora_settings(checkpoint_lora),
        lora_settings(config_lora),
    )
    changes = [
        f"{key} {checkpoint_settings.get(key)} there and {config_settings.get(key)} here"
        for key in {**checkpoint_settings, **config_settings}
        if key != "dropout" and checkpoint_settings.get(key) != config_settings.get(key)
    ]
    return (
        f"holds another adapter than train.adapter asks for ({', '.join(changes)}): set it as it"
        " was, or give the run another name"
        if changes
        else None
    )
