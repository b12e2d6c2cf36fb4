"""Policies of pods that take a role of AWS by their service account, and of the user who starts
them.

Sources, read 2026-11: "Assign IAM roles to Kubernetes service accounts" (IRSA) and "Learn how EKS
Pod Identity grants pods access to AWS services" of the EKS user guide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.kubernetes.backend import KubernetesBackend
from smtrain.client.iam.statements import Statement
from smtrain.core.config import JobConfig
from smtrain.core.config.schema import inputs_of
from smtrain.core.errors import JobError
from smtrain.core.protocol.uris import split_uri

ACCOUNT, REGION, ISSUER_ID = "ACCOUNT", "REGION", "ISSUER_ID"
"""Words to replace if the config and the cluster do not tell them."""


def pod_policies(config: JobConfig, place: Backend) -> dict[str, dict[str, Any]]:
    """Policies by `caller`, `role` and `trust`."""
    assert isinstance(place, KubernetesBackend)
    partition, region, account = _place_of(place)
    base = f"{place.section.base}/"
    input_uris = sorted(
        uri for _, uri in inputs_of(config) if uri.startswith("s3://") and not uri.startswith(base)
    )
    storage = [
        Statement(
            "UseStorage",
            ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"),
            (_objects(partition, base),),
        ),
        *_listing(partition, [base, *input_uris]),
    ]
    inputs = tuple(_objects(partition, uri) for uri in input_uris)
    read = [Statement("ReadInputs", ("s3:GetObject",), inputs)] if inputs else []
    cluster = f"arn:{partition}:eks:{region}:{account}:cluster/*"
    if (place.section.context or "").startswith("arn:"):
        cluster = str(place.section.context)
    find = Statement("FindCluster", ("eks:DescribeCluster",), (cluster,))
    return {
        "caller": _policy(statement.to_dict() for statement in [*storage, find]),
        "role": _policy(statement.to_dict() for statement in [*storage, *read]),
        "trust": _trust(place, partition, account, region),
    }


def _trust(place: KubernetesBackend, partition: str, account: str, region: str) -> dict[str, Any]:
    """Let the service account take the role, by IRSA or by EKS Pod Identity."""
    issuer = _issuer(place, f"{region}.amazonaws.com" + (".cn" if partition == "aws-cn" else ""))
    section = place.section
    subject = f"system:serviceaccount:{section.namespace}:{section.service_account or 'default'}"
    by_token = {
        "Sid": "ServiceAccount",
        "Effect": "Allow",
        "Principal": {"Federated": f"arn:{partition}:iam::{account}:oidc-provider/{issuer}"},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {
            "StringEquals": {f"{issuer}:aud": "sts.amazonaws.com", f"{issuer}:sub": subject}
        },
    }
    by_agent = {
        "Sid": "PodIdentity",
        "Effect": "Allow",
        "Principal": {"Service": "pods.eks.amazonaws.com"},
        "Action": ["sts:AssumeRole", "sts:TagSession"],
    }
    return _policy([by_token, by_agent])


def _issuer(place: KubernetesBackend, domain: str) -> str:
    """The issuer of the cluster's tokens without its scheme; with `ISSUER_ID` if the cluster does
    not tell it.
    """
    try:
        answer = place.cluster.get("/.well-known/openid-configuration")
    except JobError:
        answer = {}
    default_issuer = f"https://oidc.eks.{domain}/id/{ISSUER_ID}"
    return str(answer.get("issuer") or default_issuer).removeprefix("https://").rstrip("/")


def _place_of(place: KubernetesBackend) -> tuple[str, str, str]:
    """Partition, region and account of the cluster, by a context named after its ARN."""
    parts = (place.section.context or "").split(":")
    if parts[0] == "arn" and len(parts) > 5:
        return parts[1], parts[3], parts[4]
    return "aws", REGION, ACCOUNT


def _objects(partition: str, uri: str) -> str:
    return f"arn:{partition}:s3:::{uri.removeprefix('s3://')}*"


def _listing(partition: str, uris: Iterable[str]) -> list[Statement]:
    """ListBucket of each bucket, only below the prefixes."""
    by_bucket: dict[str, list[str]] = {}
    for uri in uris:
        bucket, prefix = split_uri(uri)
        by_bucket.setdefault(bucket, []).append(f"{prefix}*")
    return [
        Statement(
            f"List{number or ''}",
            ("s3:ListBucket",),
            (f"arn:{partition}:s3:::{bucket}",),
            {"StringLike": {"s3:prefix": prefixes}},
        )
        for number, (bucket, prefixes) in enumerate(sorted(by_bucket.items()))
    ]


def _policy(statements: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}
