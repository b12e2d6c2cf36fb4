"""LoRA (Hu et al. 2021, arXiv 2106.09685): the adapted linears and the two trained factors of each.

A linear W gets two matrices, A [rank, in] and B [out, rank]; its output becomes W x + scale * B A x. A model's adapters
have a shape of their own, so that layout, optimizer, checkpoints and planner treat them like a whole model. Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import sqrt
from typing import Any, Literal

from smtrain.core.errors import ConfigError
from smtrain.core.model.families import ModelShape, Role, Spec
from smtrain.core.model.layout import Layout
from smtrain.core.text import with_article

ALL_LINEAR: Literal["all-linear"] = "all-linear"
"""peft's name for all linears of the decoder layers."""
A, B = ".lora_A.weight", ".lora_B.weight"
_COLUMNS_CUT = (Role.O, Role.ROW, Role.DELTA_COLUMNS)


@dataclass(frozen=True)
class Lora:
    """The settings of the adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Names of the adapted linears of a decoder layer, in the model's order."""
    rslora: bool = False

    @property
    def scale(self) -> float:
        """The factor of B A: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732)."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def linears(shape: ModelShape) -> tuple[str, ...]:
    """The names of the decoder layers' linears, in the model's order: `q_proj`, `k_proj`...

    Routers and experts are left out, as in peft with transformers 5, which has no linear modules for them.
    """
    specs = (s for kind in shape.kinds for s in kind.layer if _is_linear(s) and not s.turned)
    return tuple(dict.fromkeys(s.name.removesuffix(".weight").rpartition(".")[2] for s in specs))


def _is_linear(spec: Spec) -> bool:
    return len(spec.shape) == 2 and not spec.of_experts and spec.role is not Role.EXPERTS_SUM


def targets_of(shape: ModelShape, targets: Sequence[str]) -> tuple[str, ...]:
    """The linears that `asked` names, in the model's order. Raises `ConfigError` for an unknown name."""
    known = linears(shape)
    if not known:
        raise ConfigError(
            f"train.adapter: the linears of {with_article(shape.family)} model are stored with their inputs first "
            "(Conv1D), for which smtrain has no adapters; leave train.adapter out",
            code="config.combination",
        )
    if tuple(targets) == (ALL_LINEAR,):
        return known
    lost = [name for name in targets if name not in known]
    if lost or not targets:
        shown = f"{', '.join(map(repr, lost))} matches no linear layer" if lost else "names no linear layer"
        raise ConfigError(
            f"train.adapter.targets: {shown} of {with_article(shape.family)} model; take {ALL_LINEAR} or some of "
            f"{', '.join(known)}",
            code="config.combination",
        )
    return tuple(name for name in known if name in targets)


@dataclass(frozen=True)
class AdapterShape(ModelShape):
    """The adapters of a model: its parameters are the factors of every adapted linear, `<module>.lora_A.weight`..."""

    lora: Lora = Lora(1, 1.0)

    @classmethod
    def of(cls, shape: ModelShape, lora: Lora) -> AdapterShape:
        """The adapters of a model of `shape`."""
        return cls(**{f.name: getattr(shape, f.name) for f in fields(ModelShape)}, lora=lora)

    @property
    def base(self) -> ModelShape:
        """The shape of the model itself."""
        return ModelShape(**{f.name: getattr(self, f.name) for f in fields(ModelShape)})

    @cached_property
    def layer(self) -> tuple[Spec, ...]:  # type: ignore[override]
        """Both factors of every adapted linear of a decoder layer, in the order of the forward pass.

        If tensor parallelism divides the linear's rows, B is divided like it and each rank holds all of A; if it
        divides the columns, A is divided and each rank holds all of B."""
        out = []
        for spec in self.base.layer:
            module = spec.name.removesuffix(".weight")
            if _is_linear(spec) and module.rpartition(".")[2] in self.lora.targets:
                rows, (width, into) = spec.role not in _COLUMNS_CUT, spec.shape
                out.append(Spec(module + A, Role.FACTOR if rows else spec.role, (self.lora.rank, into)))
                out.append(Spec(module + B, spec.role if rows else Role.FACTOR, (width, self.lora.rank)))
        return tuple(out)

    @cached_property
    def _ends(self) -> tuple[list[Spec], list[Spec]]:  # type: ignore[override]
        """No adapters: embedding and output matrix have none."""
        return [], []


def stage_faults(shape: AdapterShape, pp: int, cuts: Sequence[int] = ()) -> list[str]:
    """The pipeline stages that would have nothing to train, as layers of other kinds have the adapted linears."""
    layout, named = Layout(shape, 1, pp, cuts=cuts or None), " or ".join(shape.lora.targets)
    empty = [layout.layers(stage) for stage in range(pp) if not layout.names(stage)]
    return [
        f"train.adapter.targets: layers {layers[0]} to {layers[-1]}, a stage of parallel.pp = {pp}, have no {named}; "
        f"take {ALL_LINEAR}"
        for layers in empty
    ]


def described(lora: Lora) -> dict[str, Any]:
    """The settings as JSON, for a checkpoint's manifest."""
    return {
        "type": "lora", "rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout,
        "targets": list(lora.targets), "rslora": lora.rslora,
    }  # fmt: skip


def from_described(settings: dict[str, Any]) -> Lora:
    """Parse the result of `described`. Raises `TypeError`, `KeyError` or `ValueError` for anything else."""
    if settings["type"] != "lora" or not all(isinstance(name, str) for name in settings["targets"]):
        raise ValueError(settings["type"])
    rank, alpha, dropout = int(settings["rank"]), float(settings["alpha"]), float(settings["dropout"])
    return Lora(rank, alpha, dropout, tuple(settings["targets"]), bool(settings["rslora"]))


def is_described(settings: Any) -> bool:
    """Whether `from_described` accepts it."""
    try:
        from_described(settings)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def another_adapter(there: Lora | None, here: Lora | None) -> str | None:
    """The reason why a checkpoint with adapter `there` cannot resume with `here`; None if it can. Dropout may
    change."""
    if there is None or here is None:
        if there == here:
            return None
        return (
            "holds a LoRA adapter, and train.adapter is not set: set it as it was, or give the run another name"
            if here is None
            else "holds a whole model, and train.adapter is set: give the run another name, and the exported model as "
            "model.path"
        )
    was, now = described(there), described(here)
    changed = [
        f"{key} {was[key]} there and {now[key]} here" for key in was if key != "dropout" and was[key] != now[key]
    ]
    return (
        f"holds another adapter than train.adapter asks for ({', '.join(changed)}): set it as it was, or give the "
        "run another name"
        if changed
        else None
    )
