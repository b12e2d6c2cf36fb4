"""Jobs that were submitted to Slurm clusters from here."""

from __future__ import annotations

from smtrain.client.backends.job_registry import JobRegistry
from smtrain.core.config.cluster import Cluster


def _cluster(text: str) -> Cluster:
    host, _, shared_folder = text.rpartition(":")
    return Cluster(host=host or None, shared=shared_folder)


REGISTRY = JobRegistry(
    "slurm",
    Cluster,
    "SMTRAIN_CLUSTER",
    _cluster,
    "me@head:/fsx/smtrain, or /fsx/smtrain on the head node",
    "no Slurm cluster is known here; start a run with --target slurm, or set"
    " SMTRAIN_CLUSTER=me@head:/fsx/smtrain",
)
