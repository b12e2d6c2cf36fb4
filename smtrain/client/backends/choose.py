"""Which place is meant: by a config and its target, or by the name of a job alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, get_args

from smtrain.client.backends.base import JobPlace
from smtrain.client.backends.sagemaker import attach
from smtrain.client.backends.sagemaker.target import Target
from smtrain.client.backends.slurm import job_registry
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.near import hint

if TYPE_CHECKING:
    from smtrain.client.backends.slurm.place import SlurmPlace
    from smtrain.core.config.cluster import Cluster


def target_of(config: JobConfig, name: TargetName | None = None) -> JobPlace:
    """The place that a call means: its own word, else the config's."""
    name = name or config.target
    return _slurm(config.cluster) if name == "slurm" else Target(name, config.compute.region)


def named(name: TargetName) -> JobPlace:
    """The place of a name, for whoever has no config: of clusters the one used last."""
    return _slurm(job_registry.cluster_of()) if name == "slurm" else Target(name)


def place_of(job: str, name: TargetName | None = None) -> tuple[str, JobPlace]:
    """(job name, place) of a name or an ARN: as told, by $SMTRAIN_TARGET, where it was started from here, else AWS."""
    word = name or os.environ.get("SMTRAIN_TARGET") or None
    if word is not None and word not in get_args(TargetName):
        raise ConfigError(
            [f"SMTRAIN_TARGET is {word!r}; {hint(word, get_args(TargetName), table('word_names')['values'])}"]
        )
    if word == "slurm" or (word is None and job_registry.knows(job)):
        return job, _slurm(job_registry.cluster_of(job))
    return attach.place_of(job, name)


def sagemaker(place: JobPlace) -> Target:
    """The place as one that the SageMaker API answers for. Raises `ConfigError` for a Slurm cluster."""
    if not isinstance(place, Target):
        raise ConfigError([f"target: {place.name} has no SageMaker API, which this is about; give `--target aws`"])
    return place


def cluster(place: JobPlace) -> SlurmPlace:
    """The place as a Slurm cluster, which it is where it `queues`."""
    from smtrain.client.backends.slurm.place import SlurmPlace

    assert isinstance(place, SlurmPlace)
    return place


def _slurm(cluster: Cluster) -> SlurmPlace:
    """A cluster's place; its modules are imported by those who have one."""
    from smtrain.client.backends.slurm.place import SlurmPlace

    return SlurmPlace(cluster)
