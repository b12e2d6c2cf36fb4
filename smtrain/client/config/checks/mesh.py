"""The mesh most like the config's that divides the model: the remedy for meshes that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import log2
from typing import Any

from smtrain.core.config.schema import JobConfig
from smtrain.core.facts.trainium2 import Group, first_group_off_torus, pairs_of, torus_chip
from smtrain.core.model.shape import ModelShape
from smtrain.core.targets import TARGETS

_DEGREES = ("tp", "pp", "cp", "ep", "dp")
BATCH = "train.global_batch_size"


def mesh_instead(
    config: JobConfig, shape: ModelShape, faults_of: Callable[[JobConfig], Iterable[str]]
) -> str:
    """Name the values to set so that the mesh divides the model and no other fault comes of it.

    As few degrees as possible change, and the batch only if no mesh divides the given one.
    `faults_of` finds the other faults of a config.
    """
    current_faults = set(faults_of(config))
    nearest = sorted(_candidates(config, shape), key=lambda values: _distance(config, values))
    for values in nearest:
        candidate = _with(config, values)
        is_unconnected = not TARGETS[config.target].here and unconnected_group(
            candidate, tied=shape.tied
        )
        if not is_unconnected and current_faults.issuperset(faults_of(candidate)):
            return would_do(_changes(config, values))
    return would_do(_changes(config, nearest[0]))  # the other faults name their own remedies


def would_do(values: Mapping[str, int]) -> str:
    """The clause of a remedy that names values, such as `tp = 2 and dp = 4 would do`."""
    *first_values, last = (f"{name} = {value}" for name, value in values.items())
    return f"{', '.join(first_values)} and {last} would do" if first_values else f"{last} would do"


def _candidates(config: JobConfig, shape: ModelShape) -> Iterator[dict[str, int]]:
    """The meshes of the config's processes that divide the model, each with the nearest batch that
    it divides.
    """
    world, batch = config.world_size, config.train.global_batch_size
    for tp in _divisors(world):
        for pp in _divisors(world // tp):
            for cp in sorted({1, config.parallel.cp}):
                dp, remainder = divmod(world, tp * pp * cp)
                if remainder:
                    continue
                unit = dp * config.parallel.micro_batch_size
                for ep in _divisors(dp * cp):
                    if not shape.mesh_faults(tp, pp, ep, cp=cp):
                        yield {
                            "tp": tp,
                            "pp": pp,
                            "cp": cp,
                            "ep": ep,
                            "dp": dp,
                            BATCH: -(-batch // unit) * unit,
                        }


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _changes(config: JobConfig, values: dict[str, int]) -> dict[str, int]:
    """The values that differ from the config's; dp and the batch count only if they are given."""
    config_values = {degree: getattr(config.parallel, degree) for degree in _DEGREES} | {
        BATCH: given_batch(config)
    }
    return {
        name: value for name, value in values.items() if config_values[name] not in (value, None)
    }


def given_batch(config: JobConfig) -> int | None:
    """train.global_batch_size; None if smtrain chooses it by the mesh."""
    return (
        config.train.global_batch_size
        if "global_batch_size" in config.train.model_fields_set
        else None
    )


def _distance(config: JobConfig, values: dict[str, int]) -> tuple[bool, int, float]:
    changes = _changes(config, values)
    ratios = (
        abs(log2(value / getattr(config.parallel, name)))
        for name, value in changes.items()
        if name != BATCH
    )
    return BATCH in changes, len(changes), sum(ratios)


def _with(config: JobConfig, values: dict[str, int]) -> JobConfig:
    changes = _changes(config, values)
    train: dict[str, Any] = {"global_batch_size": values[BATCH]}
    parallel = {name: value for name, value in changes.items() if name != BATCH}
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=parallel),
            "train": config.train.model_copy(update=train),
        }
    )


def unconnected_group(config: JobConfig, *, tied: bool) -> Group | None:
    """The first group of a config's mesh that its machines' torus does not connect; None if it
    connects all.

    `tied` as `ModelShape.tied`. An ep that divides no group of processes is a fault by itself, and
    not counted.
    """
    chip, parallel = torus_chip(config.compute.instance_type, config.lnc), config.parallel
    if chip is None or config.own_machine is not None:
        return None
    ep = 1 if config.shards % parallel.ep else parallel.ep
    pairs, cores = pairs_of(parallel.pp, tied=tied), config.processes_per_instance
    return first_group_off_torus(
        parallel.tp, parallel.pp, config.dp, cores, chip, pairs, parallel.cp, ep
    )
