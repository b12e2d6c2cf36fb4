"""Rules for target kubernetes: the needs and limits of a job of pods."""

from __future__ import annotations

import re
from collections.abc import Iterator

from smtrain.client.config.checks.pods import pod_rules
from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, rule_faults
from smtrain.core.config.schema import JobConfig

NAME_LENGTH = 30
"""Longest name of a run: the names of its jobs and pods must fit into 63 characters (RFC 1123)."""
VARIABLE_BYTES = 131_072 - 1
"""Longest `NAME=value` of a process (execve(2): MAX_ARG_STRLEN, with a zero at its end)."""
_NAME = re.compile(r"[a-z](-?[a-z0-9])*")
"""RFC 1035, "label", without double hyphens, which the names of stages are cut at."""


def _too_long(config: JobConfig) -> str | None:
    """The first variable that no process can have. A $ takes two bytes in a manifest, one here."""
    variables = config.compute.environment.items()
    lengths = {name: len(f"{name}={value}".encode()) for name, value in variables}
    return next((name for name, length in lengths.items() if length > VARIABLE_BYTES), None)


def _short_name(config: JobConfig) -> str:
    name = re.sub(r"-+", "-", config.name.lower())
    name = (name if name[:1].isalpha() else f"run-{name}")[:NAME_LENGTH].strip("-")
    return (
        f"name: {config.name} cannot name pods and services, which begin with a letter and have"
        f" small letters, digits and single hyphens, at most {NAME_LENGTH} here; choose another, such"
        f" as {name}"
    )


KUBERNETES = (
    Rule(
        "kubernetes.storage",
        lambda c: c.kubernetes.storage is None,
        "kubernetes.storage: is missing; name a bucket and a prefix, such as s3://my-bucket/smtrain",
    ),
    Rule(
        "name",
        lambda c: not _NAME.fullmatch(c.name) or len(c.name) > NAME_LENGTH,
        _short_name,
    ),
    Rule(
        "compute.image",
        lambda c: c.compute.image is None,
        "compute.image: is missing, and a cluster has no default; name an image with Python and the"
        " packages of smtrain[train] (`smtrain help kubernetes`)",
    ),
    Rule(
        "kubernetes.resources compute.instance_type",
        lambda c: c.own_machine is not None and not c.kubernetes.resources,
        "kubernetes.resources: is missing, and smtrain cannot know how the cluster names the devices"
        " of your machine; give what a pod gets, such as {nvidia.com/gpu: 8}",
    ),
    Rule(
        "compute.environment",
        lambda c: _too_long(c) is not None,
        lambda c: (
            f"compute.environment: {_too_long(c)} has more than {VARIABLE_BYTES:,} bytes, and Linux"
            " starts no process with it; put the text into a file of the image or of a volume"
            " (kubernetes.data)"
        ),
    ),
    *pod_rules("Kubernetes", "kubernetes.storage"),
)


def section_faults(config: JobConfig) -> Iterator[Fault]:
    """Faults of a config for Kubernetes."""
    yield from rule_faults(KUBERNETES, config)
    paths: dict[str, str] = {}
    for number, volume in enumerate(config.kubernetes.data):
        key = f"kubernetes.data.{number}"
        for path, owner in paths.items():
            if f"{volume.path}/".startswith(f"{path}/") or f"{path}/".startswith(f"{volume.path}/"):
                yield (
                    {"kubernetes.data"},
                    (
                        f"{key}.path: {volume.path} overlaps {path} of {owner}; give it a separate"
                        f" folder, such as /mnt/data{number}"
                    ),
                )
        paths[volume.path] = key
