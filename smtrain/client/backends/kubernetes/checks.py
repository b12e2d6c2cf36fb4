"""Check a cluster before anything is created: the API, the rights, the namespace, the CRDs, the
queue, the nodes, the named objects, the storage and the inputs in S3.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from smtrain.client.backends.kubernetes.backend import KubernetesBackend
from smtrain.client.backends.kubernetes.cluster_api import ClusterApi, ClusterError
from smtrain.client.backends.kubernetes.kinds import KINDS, ObjectKind
from smtrain.client.backends.kubernetes.node_checks import check_nodes
from smtrain.client.backends.kubernetes.object_checks import check_objects, read_object
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.schema import inputs_of
from smtrain.core.errors import JobError

_RIGHTS = (
    ("list", "", "pods"),
    ("get", "", "pods/log"),
)
"""(verb, group, resource) that a run needs in the namespace, next to those of its jobs."""


def _needed_rights(record: ObjectKind) -> list[tuple[str, str, str]]:
    """The rights of a run whose jobs are of this kind."""
    jobs = [(verb, record.group, record.plural) for verb in ("create", "get", "list", "patch")]
    dependents = [
        (verb, api.rpartition("/")[0], plural)
        for api, kind, plural in record.dependents
        for verb in (("create",) if kind == "Service" else ("create", "patch"))
    ]
    return [*jobs, *dict.fromkeys([*dependents, *_RIGHTS])]


def run_checks(
    backend: KubernetesBackend,
    config: JobConfig,
    stages: Sequence[Stage],
    copied_uris: Collection[str] = (),
    *,
    probe: bool = False,
) -> Iterator[Finding]:
    """Make all checks; after a fault of the API only that one.

    Deletes everything that they write. `copied_uris`: URIs that the launch writes first. `probe` has
    no effect.
    """
    try:
        yield from cluster_checks(backend.cluster, config, stages)
    except ClusterError as error:
        yield Finding("kubernetes", "fault", str(error))
        return
    yield from _storage(backend)
    yield from _inputs(backend, config, copied_uris)


def cluster_checks(
    cluster: ClusterApi, config: JobConfig, stages: Sequence[Stage]
) -> Iterator[Finding]:
    """The checks that ask the API of the cluster. Raises `ClusterError`."""
    version = cluster.get("/version").get("gitVersion", "of an unknown version")
    yield Finding("kubernetes", "ok", f"the cluster answers, {version}")
    record = KINDS[cluster.section.kind]
    yield from _namespace(cluster)
    yield from _rights(cluster, record)
    yield from _kind(cluster, record)
    yield from check_objects(cluster, config)
    yield from check_nodes(cluster, config, stages)


def _namespace(cluster: ClusterApi) -> Iterator[Finding]:
    try:
        cluster.get(f"/api/v1/namespaces/{cluster.namespace}")
    except ClusterError as error:
        if error.status == 404:
            text = f"the cluster has no namespace {cluster.namespace}"
            yield Finding("kubernetes", "fault", text, "correct kubernetes.namespace, or create it")
        elif error.status != 403:  # many users may not read it
            raise


def _rights(cluster: ClusterApi, record: ObjectKind) -> Iterator[Finding]:
    """Ask for each right by SelfSubjectAccessReview."""
    path, missing_rights = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", list[str]()
    for verb, group, resource in _needed_rights(record):
        plural, _, sub = resource.partition("/")
        attributes = {"namespace": cluster.namespace, "verb": verb, "group": group}
        attributes |= {"resource": plural} | ({"subresource": sub} if sub else {})
        review = cluster.create(
            path,
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            },
        )
        if not (review.get("status") or {}).get("allowed"):
            missing_rights.append(f"{verb} {resource}")
    if missing_rights:
        text = f"you may not {', '.join(missing_rights)} in namespace {cluster.namespace}"
        remedy = "ask the administrator of the cluster for a Role with these rights"
        yield Finding("rights", "fault", text, remedy)
    else:
        yield Finding("rights", "ok", f"you may run jobs in namespace {cluster.namespace}")


def _kind(cluster: ClusterApi, record: ObjectKind) -> Iterator[Finding]:
    """Whether the cluster has the kind of the jobs; every cluster has Job."""
    if not record.controller:
        return
    group = f"/apis/{record.api}"
    listing = read_object(cluster, group)
    names = [resource.get("name") for resource in (listing or {}).get("resources") or ()]
    if listing == {} or record.plural in names:
        return
    text = f"the cluster has not installed {record.controller} ({record.plural}.{record.group})"
    yield Finding("kubernetes", "fault", text, "install it, or set kubernetes.kind to job")


def _storage(backend: KubernetesBackend) -> Iterator[Finding]:
    """Write and delete an object below the storage."""
    probe = f"{backend.section.base}/.smtrain-check-{os.urandom(4).hex()}/probe"
    folder = probe.rpartition("/")[0]
    try:
        backend.storage.put(f"{folder}/", [("probe", b"")], lambda _text: None)
        backend.storage.remove([probe])
    except JobError as error:
        yield Finding("storage", "fault", str(error))
    else:
        yield Finding("storage", "ok", f"{backend.section.base} may be written")


def _inputs(
    backend: KubernetesBackend, config: JobConfig, copied_uris: Collection[str]
) -> Iterator[Finding]:
    """Inputs in S3 that are not uploaded first."""
    for key, uri in inputs_of(config):
        if not uri.startswith("s3://") or uri in copied_uris:
            continue
        try:
            is_there = bool(backend.listing(uri))
        except JobError as error:
            yield Finding("inputs", "fault", f"{key}: {error}")
            continue
        if is_there:
            yield Finding("inputs", "ok", f"{uri}: the pods download it")
        else:
            text = f"{key}: there is nothing at {uri}"
            yield Finding("inputs", "fault", text, "correct the path in the config")
