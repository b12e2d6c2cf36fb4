"""IAM policies from a config's own requests: only the buckets, prefixes, keys and secrets that they name.

Sources: "SageMaker AI Roles: CreateTrainingJob API, execution role permissions" of the SageMaker guide for what the
platform does with the role; the service authorization reference for what each action may be bound to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from smtrain.config import JobConfig, Stage
from smtrain.job.inputs import split_uri
from smtrain.job.request import checkpoint_uri, run_uri

SERVICE = "sagemaker.amazonaws.com"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
Requests = Mapping[Stage, dict[str, Any]]
_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.[a-z0-9.-]+/([^:@]+)")


@dataclass(frozen=True)
class Statement:
    """One Allow."""

    sid: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    condition: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As IAM writes it."""
        told = {
            "Sid": self.sid,
            "Effect": "Allow",
            "Action": list(self.actions),
            "Resource": list(self.resources),
        }
        return told | ({"Condition": {k: dict(v) for k, v in self.condition.items()}} if self.condition else {})


def trust_policy() -> dict[str, Any]:
    """Who may take the role: SageMaker."""
    principal = {"Service": SERVICE}
    return _policy({"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"})


def role_policy(config: JobConfig, requests: Requests) -> dict[str, Any]:
    """What the jobs of these requests do with their role."""
    return _policy(*(statement.to_dict() for statement in role_statements(config, requests)))


def caller_policy(config: JobConfig, requests: Requests) -> dict[str, Any]:
    """What whoever checks, starts, follows and stops these jobs does."""
    return _policy(*(statement.to_dict() for statement in caller_statements(config, requests)))


def _policy(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def role_statements(config: JobConfig, requests: Requests) -> list[Statement]:
    """The execution role's permissions. `config` is resolved: its role, region and URIs are filled in."""
    a = _Arns.of(config)
    read, written = _read(config, requests), _written(config, requests)
    out = [
        Statement("ReadInputs", ("s3:GetObject",), tuple(a.objects(uri) for uri in read)),
        Statement("WriteResults", ("s3:PutObject", "s3:AbortMultipartUpload"), tuple(a.objects(u) for u in written)),
        # A checkpoint that training deletes locally is deleted in S3 by the platform's sync.
        Statement("PruneCheckpoints", ("s3:DeleteObject",), (a.objects(checkpoint_uri(config)),)),
        *_listing(a, [*read, *written]),
        Statement(
            "WriteLogs",
            ("logs:CreateLogGroup", "logs:CreateLogStream", "logs:DescribeLogStreams", "logs:PutLogEvents"),
            (a.logs, f"{a.logs}:*"),
        ),
        Statement(
            "WriteMetrics", ("cloudwatch:PutMetricData",), ("*",),
            {"StringLike": {"cloudwatch:namespace": ["/aws/sagemaker/*"]}},
        ),
    ]  # fmt: skip
    if images := _images(a, requests):
        out += [
            Statement("SignInToEcr", ("ecr:GetAuthorizationToken",), ("*",)),
            Statement(
                "PullImage",
                ("ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"),
                images,
            ),
        ]
    if config.network.subnets:
        out += [
            # These actions are bound to interfaces that do not exist yet.
            Statement(
                "AttachToVpc",
                (
                    "ec2:CreateNetworkInterface", "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface",
                    "ec2:DeleteNetworkInterfacePermission", "ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces",
                    "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs",
                ),
                ("*",),
            ),
        ]  # fmt: skip
    if config.output.kms_key:
        actions = ("kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey")
        out.append(Statement("UseKey", actions, (a.key(config.output.kms_key),)))
    return out + _secrets(config, a)


def caller_statements(config: JobConfig, requests: Requests) -> list[Statement]:
    """The permissions of whoever runs smtrain with this config."""
    a = _Arns.of(config)
    jobs = f"arn:{a.partition}:sagemaker:{a.region}:{a.account}:training-job/{config.name.lower()}-*"
    base = str(config.output.s3_uri).rstrip("/") + "/"
    own = [f"{base}{folder}/" for folder in ("inputs", "code", "configs")]
    read = [run_uri(config), checkpoint_uri(config), *(u for u in _read(config, requests) if not u.startswith(base))]
    control = ["sagemaker:AddTags", "sagemaker:CreateTrainingJob", "sagemaker:DescribeTrainingJob"]
    control += ["sagemaker:ListTags", "sagemaker:StopTrainingJob"]
    if config.compute.keep_alive:
        control.append("sagemaker:UpdateTrainingJob")  # releasing a warm pool
    quotas = ("servicequotas:ListAWSDefaultServiceQuotas", "servicequotas:ListServiceQuotas")
    role = str(config.compute.role)
    out = [
        Statement("RunJobs", tuple(sorted(control)), (jobs,)),
        Statement("FindJobs", ("sagemaker:ListTrainingJobs",), ("*",)),
        Statement("PassRole", ("iam:PassRole",), (role,), {"StringEquals": {"iam:PassedToService": [SERVICE]}}),
        Statement("CheckRole", ("iam:GetRole", "iam:SimulatePrincipalPolicy"), (role,)),
        Statement("CheckQuotas", quotas, ("*",)),
        Statement(
            "Upload", ("s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"), tuple(a.objects(uri) for uri in own)
        ),
        Statement("ReadResults", ("s3:GetObject",), tuple(dict.fromkeys(a.objects(uri) for uri in read))),
        *_listing(a, [*own, *read]),
        Statement("ReadLogs", ("logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents"), (a.logs, f"{a.logs}:*")),
    ]  # fmt: skip
    if images := _images(a, requests):
        out.append(Statement("CheckImage", ("ecr:BatchGetImage",), images))
    if config.output.kms_key:
        key = (a.key(config.output.kms_key),)
        out.append(
            Statement("UseKey", ("kms:CreateGrant", "kms:DescribeKey", "kms:Decrypt", "kms:GenerateDataKey"), key)
        )
    return out


def _read(config: JobConfig, requests: Requests) -> list[str]:
    """Prefixes that the jobs read; what lies in the run's own folders counts as those folders."""
    base = str(config.output.s3_uri).rstrip("/") + "/"
    folders = [f"{base}{folder}/" for folder in ("inputs", "code", "configs")] + [
        run_uri(config),
        checkpoint_uri(config),
    ]
    uris = [
        channel["DataSource"]["S3DataSource"]["S3Uri"]
        for request in requests.values()
        for channel in request["InputDataConfig"]
    ]
    used = [next((folder for folder in folders if uri.startswith(folder)), uri) for uri in uris]
    return sorted({*used, *_written(config, requests)})


def _written(config: JobConfig, requests: Requests) -> list[str]:
    """The run's folder, its checkpoints, and the compile cache where that is in S3."""
    caches = {request.get("Environment", {}).get("NEURON_COMPILE_CACHE_URL", "") for request in requests.values()}
    cached = [f"{cache.rstrip('/')}/" for cache in sorted(caches) if cache.startswith("s3://")]
    return list(dict.fromkeys([run_uri(config), checkpoint_uri(config), *cached]))


def _listing(a: _Arns, uris: list[str]) -> Iterator[Statement]:
    """ListBucket, of each bucket below the prefixes only."""
    by_bucket: dict[str, set[str]] = {}
    for uri in uris:
        bucket, prefix = split_uri(uri)
        by_bucket.setdefault(bucket, set()).add(f"{prefix}*")
    for number, (bucket, prefixes) in enumerate(sorted(by_bucket.items())):
        yield Statement(
            f"List{number or ''}", ("s3:ListBucket",), (f"arn:{a.partition}:s3:::{bucket}",),
            {"StringLike": {"s3:prefix": sorted(prefixes)}},
        )  # fmt: skip


def _images(a: _Arns, requests: Requests) -> tuple[str, ...]:
    found = [_ECR.match(request["AlgorithmSpecification"].get("TrainingImage", "")) for request in requests.values()]
    return tuple(sorted({f"arn:{a.partition}:ecr:{m[2]}:{m[1]}:repository/{m[3]}" for m in found if m}))


def _secrets(config: JobConfig, a: _Arns) -> list[Statement]:
    return []


@dataclass(frozen=True)
class _Arns:
    partition: str
    region: str
    account: str

    @classmethod
    def of(cls, config: JobConfig) -> _Arns:
        _, partition, _, _, account, _ = str(config.compute.role).split(":", 5)
        return cls(partition, str(config.compute.region), account)

    @property
    def logs(self) -> str:
        return f"arn:{self.partition}:logs:{self.region}:{self.account}:log-group:{LOG_GROUP}"

    def objects(self, uri: str) -> str:
        return f"arn:{self.partition}:s3:::{uri.removeprefix('s3://')}*"

    def key(self, key: str) -> str:
        """A key's ARN from its ARN, id or alias; a key policy speaks of aliases by other means."""
        if key.startswith("arn:"):
            return key
        if key.startswith("alias/"):
            return f"arn:{self.partition}:kms:{self.region}:{self.account}:{key}"
        return f"arn:{self.partition}:kms:{self.region}:{self.account}:key/{key}"
