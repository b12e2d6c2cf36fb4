"""Faults of a whole config, found before anything starts: each with the keys that it is about."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.config.checks.data import data_faults, path_faults, prepared_faults, task_faults
from smtrain.client.config.checks.machines import MESH, machine_faults
from smtrain.client.config.checks.rule import Fault, rule_faults
from smtrain.client.config.checks.train import TRAIN, engine_faults, validation_faults
from smtrain.client.config.checks.weights import folder_faults, weights_faults
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.secrets import is_secret
from smtrain.core.errors import Sentence
from smtrain.core.targets import TARGETS


def combination_faults(config: JobConfig) -> Iterator[Fault]:
    """Combinations of keys that cannot run; no file is read."""
    yield from rule_faults((*MESH, *TRAIN), config)
    yield from data_faults(config)
    yield from weights_faults(config)
    yield from machine_faults(config)
    yield from engine_faults(config)
    yield from validation_faults(config)


def model_faults(config: JobConfig, *, shape_alone: bool = False) -> Iterator[Fault]:
    """Text and models that cannot be read, as far as this machine can tell without a network.

    shape_alone: the model's folder needs only its config.json, which is enough for a plan.
    """
    yield from path_faults(config)
    yield from task_faults(config)
    yield from prepared_faults(config)
    yield from folder_faults(config, shape_alone=shape_alone)


def secret_faults(config: JobConfig) -> Iterator[Fault]:
    """Secrets in clear text: anyone who may describe the job could read them.

    The value is never repeated.
    """
    for key, value in texts_in(config.model_dump(mode="json")):
        if is_secret(
            value,
            key.rpartition(".")[2] if key.startswith(("compute.environment.", "tags.")) else "",
        ):
            remedy = TARGETS[config.target].secrets
            fault = (
                f"{key}: looks like a secret, and anyone who may describe the job could read it;"
                f" {remedy}"
            )
            yield {key}, Sentence(fault, "config.secret")


def texts_in(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts in plain values, each with its dotted key; the names of a mapping count too."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield key, str(name)  # reported under its section, as the name may be the secret
            yield from texts_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item, key)
    elif isinstance(value, str):
        yield key, value
