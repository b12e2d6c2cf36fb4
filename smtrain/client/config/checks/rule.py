"""A rule about several keys, as a row: its keys, when it is broken, and what to say then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from smtrain.core.config.schema import JobConfig

Fault = tuple[set[str], str]
"""The keys that a sentence is about, and the sentence."""


class ConfigRule(NamedTuple):
    """One row of a table of rules."""

    keys: str
    """Keys that it reads, with blanks between: if one is wrong by itself, the rule is not applied.
    """
    is_broken: Callable[[JobConfig], object]
    """True, or anything that counts as true, if the config breaks it."""
    sentence: str | Callable[[JobConfig], str]


def all_set(*keys: str) -> Callable[[JobConfig], bool]:
    """A condition: each of these keys has another value than False, 0, None or an empty one."""
    return lambda config: all(attrgetter(key)(config) for key in keys)


def sagemaker_rules(*names: str) -> tuple[ConfigRule, ...]:
    """The rules of a target without SageMaker for these keys of `compute`, and for `network`."""
    sentence = "applies to SageMaker only; leave it out"
    return (
        *(
            ConfigRule(f"compute.{name}", all_set(f"compute.{name}"), f"compute.{name}: {sentence}")
            for name in names
        ),
        ConfigRule(
            "network",
            lambda config: config.network.isolation or config.network.subnets,
            f"network: {sentence}",
        ),
    )


def no_s3_checkpoints(place: str, storage: str) -> ConfigRule:
    """The rule of a target whose checkpoints lie below the folder `storage`."""
    return ConfigRule(
        "checkpoint.s3_uri",
        lambda config: config.checkpoint.s3_uri,
        f"checkpoint.s3_uri: on {place} checkpoints lie below {storage}; leave it out",
    )


def rule_faults(rules: Iterable[ConfigRule], config: JobConfig) -> Iterator[Fault]:
    """The faults of the rules that a config breaks, in their order."""
    for rule in rules:
        if rule.is_broken(config):
            yield (
                set(rule.keys.split()),
                (rule.sentence if isinstance(rule.sentence, str) else rule.sentence(config)),
            )
