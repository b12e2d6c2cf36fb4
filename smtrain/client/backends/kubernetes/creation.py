"""Create the objects of a job, and delete them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from smtrain.client.backends.kubernetes.cluster_api import (
    ClusterApi,
    ClusterError,
    ClusterLostError,
)
from smtrain.client.backends.kubernetes.kinds import KINDS
from smtrain.client.backends.kubernetes.manifest import is_owner


def job_path(cluster: ClusterApi, *names: str) -> str:
    """The path of jobs of the section's kind."""
    record = KINDS[cluster.section.kind]
    return cluster.group(record.api, record.plural, *names)


def create_job(cluster: ClusterApi, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Create the objects of `manifests` in their order, and return the job, which owns the other
    ones. Nothing stays if the cluster refuses one.

    Raises `ClusterError`.
    """
    place = next(number for number, item in enumerate(items) if is_owner(item))
    created_objects: list[Mapping[str, Any]] = []
    try:
        for item in items[:place]:
            _create_dependent(cluster, item)
            created_objects.append(item)
        job = _create_owner(cluster, items[place])
        created_objects.append(items[place])
        reference = {key: items[place][key] for key in ("apiVersion", "kind")}
        reference |= {key: job["metadata"][key] for key in ("name", "uid")}
        owners = {"ownerReferences": [reference]}
        for item in items[:place]:  # it was there before its owner
            cluster.patch(
                _path_of(cluster, item, str(job["metadata"]["name"])), {"metadata": owners}
            )
        for item in items[place + 1 :]:
            _create_dependent(cluster, {**item, "metadata": {**item["metadata"], **owners}})
    except ClusterLostError:
        raise  # the next launch finds what was created
    except ClusterError as error:
        if error.reason != "AlreadyExists":
            for item in reversed(created_objects):
                with suppress(ClusterError):
                    cluster.delete(_path_of(cluster, item, str(item["metadata"]["name"])))
        raise
    return job


def _create_owner(cluster: ClusterApi, item: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return cluster.create(job_path(cluster), item)
    except ClusterLostError:
        with suppress(ClusterError):
            return cluster.get(job_path(cluster, item["metadata"]["name"]))  # its answer was lost
        raise


def _create_dependent(cluster: ClusterApi, item: Mapping[str, Any]) -> None:
    try:
        cluster.create(_path_of(cluster, item), item)
    except ClusterError as error:
        if error.reason != "AlreadyExists":
            raise


def _path_of(cluster: ClusterApi, item: Mapping[str, Any], *names: str) -> str:
    for api, kind, plural in KINDS[cluster.section.kind].dependents:
        if item["kind"] == kind:
            return (
                cluster.group(api, plural, *names) if "/" in api else cluster.core(plural, *names)
            )
    return job_path(cluster, *names)
