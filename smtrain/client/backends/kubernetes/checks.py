"""Check a cluster before anything is created: the API, the rights, the namespace, the CRDs, the
queue, the nodes, the named objects, the storage and the inputs in S3.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from smtrain.client.backends.kubernetes.backend import KubernetesBackend
from smtrain.client.backends.kubernetes.cluster_api import ClusterApi, ClusterError
from smtrain.client.backends.kubernetes.kinds import KINDS, ObjectKind
from smtrain.client.backends.kubernetes.pod import devices_of
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.schema import inputs_of
from smtrain.core.errors import JobError
from smtrain.stages import stage_named

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
    cluster, section = backend.cluster, backend.section
    try:
        version = cluster.get("/version").get("gitVersion", "of an unknown version")
        yield Finding("kubernetes", "ok", f"the cluster answers, {version}")
        yield from _namespace(cluster)
        record = KINDS[section.kind]
        yield from _rights(cluster, record)
        yield from _kind(cluster, record)
        yield from _objects(cluster)
        yield from _nodes(cluster, config, stages)
    except ClusterError as error:
        yield Finding("kubernetes", "fault", str(error))
        return
    yield from _storage(backend)
    yield from _inputs(backend, config, copied_uris)


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
    resources = cluster.get(group).get("resources") or () if _exists(cluster, group) else ()
    if any(resource.get("name") == record.plural for resource in resources):
        return
    text = f"the cluster has not installed {record.controller} ({record.plural}.{record.group})"
    yield Finding("kubernetes", "fault", text, "install it, or set kubernetes.kind to job")


def _objects(cluster: ClusterApi) -> Iterator[Finding]:
    """The objects that the config names."""
    section = cluster.section
    queue = cluster.group("kueue.x-k8s.io/v1beta1", "localqueues", section.queue or "")
    priority = f"/apis/scheduling.k8s.io/v1/priorityclasses/{section.priority_class}"
    service_account = cluster.core("serviceaccounts", section.service_account or "")
    named_objects = [
        ("queue", section.queue, queue, "queue"),
        ("service_account", section.service_account, service_account, "service account"),
        ("priority_class", section.priority_class, priority, "priority class"),
        *(
            (key, name, cluster.core("secrets", name or ""), "Secret")
            for key, name in (
                ("env_secret", section.env_secret),
                ("image_pull_secret", section.image_pull_secret),
            )
        ),
        *(
            ("data", v.claim, cluster.core("persistentvolumeclaims", v.claim), "volume claim")
            for v in section.data
        ),
    ]
    for key, name, path, word in named_objects:
        if name and not _exists(cluster, path):
            text = f"the cluster has no {word} {name} in namespace {cluster.namespace}"
            yield Finding("kubernetes", "fault", text, f"create it, or correct kubernetes.{key}")


def _exists(cluster: ClusterApi, path: str) -> bool:
    """Whether an object exists; one that may not be read counts as existing."""
    try:
        cluster.get(path)
    except ClusterError as error:
        if error.status == 404:
            return False
        if error.status != 403:
            raise
    return True


def _nodes(cluster: ClusterApi, config: JobConfig, stages: Sequence[Stage]) -> Iterator[Finding]:
    """Whether enough nodes offer the devices of a pod."""
    if not any(stage_named(stage).on_accelerators for stage in stages):
        return
    resources = dict(cluster.section.resources) or devices_of(config.compute.instance_type)
    devices = {
        key: int(value) for key, value in resources.items() if "/" in key and value.isdigit()
    }
    try:
        nodes = list(cluster.items("/api/v1/nodes"))
    except ClusterError as error:
        if error.status != 403:
            raise
        yield Finding("nodes", "warning", "the nodes may not be listed, so they were not checked")
        return
    for name, count in devices.items():
        amounts = [_amount(node, name) for node in nodes]
        pods = sum(amount // count for amount in amounts)
        if pods >= config.compute.instance_count:
            yield Finding("nodes", "ok", f"the nodes offer {sum(amounts)} {name}")
            continue
        text = f"the nodes offer {sum(amounts)} {name}, for {pods} pods of {count}"
        if any(amounts):
            text += f", and the run takes {config.compute.instance_count}"
        remedy = (
            "nothing needs to be done if the cluster adds nodes; else correct kubernetes.resources"
        )
        yield Finding("nodes", "warning", text, remedy)


def _amount(node: dict[str, object], name: str) -> int:
    status = node.get("status")
    allocatable = status.get("allocatable") if isinstance(status, dict) else None
    value = str((allocatable or {}).get(name, "0"))
    return int(value) if value.isdigit() else 0


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
