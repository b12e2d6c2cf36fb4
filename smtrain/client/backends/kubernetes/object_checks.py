"""Check the objects of a namespace that the section `kubernetes` names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from smtrain.client.backends.kubernetes.cluster_api import ClusterApi, ClusterError
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig

ROLE = "eks.amazonaws.com/role-arn"
"""Annotation of a service account: its role by IRSA
(https://docs.aws.amazon.com/eks/latest/userguide/associate-service-account-role.html).
"""
_REGISTRY_SECRETS = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


def check_objects(cluster: ClusterApi, config: JobConfig) -> Iterator[Finding]:
    """Whether the objects exist and are of use; one that may not be read counts as such."""
    section = cluster.section
    if section.queue:
        queue = cluster.group("kueue.x-k8s.io/v1beta1", "localqueues", section.queue)
        yield from _exists(cluster, "queue", section.queue, queue, "queue")
    if section.priority_class:
        path = f"/apis/scheduling.k8s.io/v1/priorityclasses/{section.priority_class}"
        yield from _exists(
            cluster, "priority_class", section.priority_class, path, "priority class"
        )
    if section.env_secret:
        path = cluster.core("secrets", section.env_secret)
        yield from _exists(cluster, "env_secret", section.env_secret, path, "Secret")
    yield from _check_service_account(cluster)
    yield from _check_login(cluster)
    for volume in section.data:
        yield from _check_claim(cluster, volume.claim, config.compute.instance_count)


def read_object(cluster: ClusterApi, path: str) -> dict[str, Any] | None:
    """An object; None if it does not exist; empty if it may not be read."""
    try:
        return cluster.get(path)
    except ClusterError as error:
        if error.status == 404:
            return None
        if error.status != 403:
            raise
    return {}


def _exists(cluster: ClusterApi, key: str, name: str, path: str, word: str) -> Iterator[Finding]:
    if read_object(cluster, path) is None:
        yield _lacks(cluster, key, name, word)


def _lacks(cluster: ClusterApi, key: str, name: str, word: str) -> Finding:
    text = f"the cluster has no {word} {name} in namespace {cluster.namespace}"
    return Finding("kubernetes", "fault", text, f"create it, or correct kubernetes.{key}")


def _check_service_account(cluster: ClusterApi) -> Iterator[Finding]:
    """Whether the pods get a role of AWS by IRSA. EKS Pod Identity leaves no trace in the cluster."""
    section = cluster.section
    name = section.service_account or "default"
    account = read_object(cluster, cluster.core("serviceaccounts", name))
    if account is None and section.service_account:
        yield _lacks(cluster, "service_account", name, "service account")
    if not account or section.env_secret:
        return
    if role := ((account.get("metadata") or {}).get("annotations") or {}).get(ROLE):
        yield Finding("role", "ok", f"the pods take the role {role} (service account {name})")
        return
    text = f"service account {name} names no role for the pods in its annotation {ROLE}"
    remedy = (
        "nothing needs to be done if EKS Pod Identity or the nodes' role gives access to"
        " kubernetes.storage; else set kubernetes.service_account, whose role `smtrain iam policy`"
        " describes"
    )
    yield Finding("role", "warning", text, remedy)


def _check_login(cluster: ClusterApi) -> Iterator[Finding]:
    """Whether the Secret for the image's registry is one."""
    name = cluster.section.image_pull_secret
    if not name:
        return
    secret = read_object(cluster, cluster.core("secrets", name))
    if secret is None:
        yield _lacks(cluster, "image_pull_secret", name, "Secret")
    elif (kind := secret.get("type", _REGISTRY_SECRETS[0])) not in _REGISTRY_SECRETS:
        text = f"Secret {name} is of type {kind}, and holds no login to a registry"
        remedy = (
            "create one by `kubectl create secret docker-registry`, and correct"
            " kubernetes.image_pull_secret"
        )
        yield Finding("kubernetes", "fault", text, remedy)


def _check_claim(cluster: ClusterApi, name: str, pods: int) -> Iterator[Finding]:
    """Whether a volume claim exists, has its volume, and can be mounted by all pods."""
    claim = read_object(cluster, cluster.core("persistentvolumeclaims", name))
    if claim is None:
        yield _lacks(cluster, "data", name, "volume claim")
        return
    if (claim.get("status") or {}).get("phase") == "Lost":
        text = f"volume claim {name} has lost its volume"
        yield Finding("kubernetes", "fault", text, "create it again, or correct kubernetes.data")
    modes = (claim.get("spec") or {}).get("accessModes") or ["ReadWriteMany"]
    if pods > 1 and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        text = f"volume claim {name} can be mounted on one node only ({', '.join(modes)})"
        remedy = (
            f"create a claim with ReadWriteMany for the {pods} pods, and correct kubernetes.data"
        )
        yield Finding("kubernetes", "fault", text, remedy)
