"""The objects of the stand-in for a Kubernetes cluster: versions, lists, watches, merge patches."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Iterator
from typing import Any

from testing.kubernetes_pods import stamp

KINDS = {
    "namespaces": ("v1", "Namespace"),
    "nodes": ("v1", "Node"),
    "pods": ("v1", "Pod"),
    "services": ("v1", "Service"),
    "secrets": ("v1", "Secret"),
    "serviceaccounts": ("v1", "ServiceAccount"),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim"),
    "events": ("v1", "Event"),
    "jobs": ("batch/v1", "Job"),
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjobs": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "trainingruntimes": ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"),
    "hyperpodpytorchjobs": ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob"),
    "workloads": ("kueue.x-k8s.io/v1beta1", "Workload"),
    "localqueues": ("kueue.x-k8s.io/v1beta1", "LocalQueue"),
    "priorityclasses": ("scheduling.k8s.io/v1", "PriorityClass"),
    "customresourcedefinitions": ("apiextensions.k8s.io/v1", "CustomResourceDefinition"),
}
CLUSTER_WIDE = ("namespaces", "nodes", "priorityclasses", "customresourcedefinitions")


class RefusedError(Exception):
    """An error as a `Status`: HTTP's status, the reason and the message."""


class Store:
    """All objects, by plural, namespace and name, and what has happened to them."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        """(version, what happened, plural, object)."""
        self.version, self.oldest = 1, 0
        """The newest version, and the last one that watches can no longer begin at."""
        self.changed = threading.Condition(threading.RLock())

    def find(self, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        with self.changed:
            return self.objects.get((plural, namespace, name))

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        stored_item = self.find(plural, namespace, name)
        if stored_item is None:
            raise RefusedError(404, "NotFound", f'{plural} "{name}" not found')
        return stored_item

    def select(self, plural: str, namespace: str, **selectors: str) -> list[dict[str, Any]]:
        """Copies of objects; an empty namespace means all."""
        with self.changed:
            return [
                copy.deepcopy(item)
                for (kind, of, _), item in sorted(self.objects.items())
                if kind == plural and namespace in ("", of) and selects(item, **selectors)
            ]

    def create(self, plural: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            metadata = body.setdefault("metadata", {})
            if "generateName" in metadata and "name" not in metadata:
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            if not metadata.get("name"):
                raise RefusedError(422, "Invalid", f"{plural}: metadata.name: Required value")
            key = (plural, namespace, metadata["name"])
            if key in self.objects:
                raise RefusedError(
                    409, "AlreadyExists", f'{plural} "{metadata["name"]}" already exists'
                )
            version, kind = KINDS[plural]
            body.update(apiVersion=version, kind=kind)
            metadata.update(uid=str(uuid.uuid4()), creationTimestamp=stamp())
            if namespace:
                metadata["namespace"] = namespace
            self.objects[key] = body
            self._note("ADDED", plural, body)
            return copy.deepcopy(body)

    def update(self, plural: str, item: dict[str, Any]) -> None:
        """Say that an object has changed."""
        with self.changed:
            self._note("MODIFIED", plural, item)

    def patch(
        self, plural: str, namespace: str, name: str, change: dict[str, Any]
    ) -> dict[str, Any]:
        with self.changed:
            item = self.get(plural, namespace, name)
            merge(item, change)
            self._note("MODIFIED", plural, item)
            return copy.deepcopy(item)

    def delete(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        """Delete an object."""
        with self.changed:
            item = self.get(plural, namespace, name)
            del self.objects[(plural, namespace, name)]
            self._note("DELETED", plural, item)
            return item

    def owned_by(self, uid: str) -> list[tuple[str, str, str]]:
        """The keys of objects that one owns."""
        with self.changed:
            return [
                key
                for key, item in self.objects.items()
                if any(owner["uid"] == uid for owner in item["metadata"].get("ownerReferences", ()))
            ]

    def compact(self) -> None:
        """Forget what has happened, as etcd does: older versions are gone (410)."""
        with self.changed:
            self.oldest = self.version
            self.history.clear()
            self.changed.notify_all()

    def watch(
        self, plural: str, namespace: str, version: int, **selectors: str
    ) -> Iterator[dict[str, Any] | None]:
        """Events after a version, and None now and then. Raises `RefusedError` (410)."""
        while True:
            with self.changed:
                if version < self.oldest:
                    raise RefusedError(
                        410, "Expired", f"too old resource version: {version} ({self.oldest})"
                    )
                news = [event for event in self.history if event[0] > version]
                if not news:
                    self.changed.wait(0.1)
            for number, event_type, kind, item in news:
                version = number
                of = item["metadata"].get("namespace", "")
                if kind == plural and namespace in ("", of) and selects(item, **selectors):
                    yield {"type": event_type, "object": item}
            if not news:
                yield None

    def _note(self, event_type: str, plural: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, event_type, plural, copy.deepcopy(item)))
        self.changed.notify_all()


def merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    """Apply a JSON merge patch (RFC 7386)."""
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def selects(item: dict[str, Any], label_selector: str = "", field_selector: str = "") -> bool:
    """Whether selectors of equality match an object."""
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, label_selector.split(",")):
        key, _, value = term.replace("==", "=").partition("=")
        if (labels.get(key) != value) if "=" in term else key not in labels:
            return False
    for term in filter(None, field_selector.split(",")):
        path, _, expected = term.replace("==", "=").partition("=")
        field_value: Any = item
        for part in path.split("."):
            field_value = field_value.get(part, "") if isinstance(field_value, dict) else ""
        if str(field_value) != expected:
            return False
    return True
