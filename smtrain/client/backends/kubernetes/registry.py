"""Jobs that were submitted to Kubernetes clusters from here."""

from __future__ import annotations

from smtrain.client.backends.job_registry import JobRegistry
from smtrain.core.config.kubernetes import Kubernetes


def _kubernetes(text: str) -> Kubernetes:
    namespace, _, storage = text.partition("=")
    context, _, namespace = namespace.rpartition("/")
    return Kubernetes(context=context or None, namespace=namespace, storage=storage)


REGISTRY = JobRegistry(
    "kubernetes",
    Kubernetes,
    "SMTRAIN_KUBERNETES",
    _kubernetes,
    "NAMESPACE=s3://my-bucket/smtrain, or CONTEXT/NAMESPACE=s3://...",
    "no cluster is known here; start a run with --target kubernetes, or set "
    "SMTRAIN_KUBERNETES=NAMESPACE=s3://my-bucket/smtrain",
)
