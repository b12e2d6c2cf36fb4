"""One Allow of a policy, and ARNs for a config's account, region and names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.config.section import Secret
from smtrain.core.facts.sagemaker import LOG_GROUP
from smtrain.core.protocol.uris import split_uri


@dataclass(frozen=True)
class Statement:
    """One Allow."""

    sid: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    condition: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The statement in IAM's form."""
        told = {
            "Sid": self.sid,
            "Effect": "Allow",
            "Action": list(self.actions),
            "Resource": list(self.resources),
        }
        return told | ({"Condition": {k: dict(v) for k, v in self.condition.items()}} if self.condition else {})


@dataclass(frozen=True)
class Arns:
    """ARNs in the account and region of a resolved config's jobs."""

    partition: str
    region: str
    account: str

    @classmethod
    def of(cls, config: JobConfig) -> Arns:
        _, partition, _, _, account, _ = str(config.compute.role).split(":", 5)
        return cls(partition, str(config.compute.region), account)

    def arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"

    @property
    def logs(self) -> str:
        return self.arn("logs", f"log-group:{LOG_GROUP}")

    def bucket(self, uri: str) -> str:
        return f"arn:{self.partition}:s3:::{split_uri(uri)[0]}"

    def jobs(self, run: str) -> str:
        return self.arn("sagemaker", f"training-job/{run.lower()}-*")

    def rule(self, run: str) -> str:
        return self.arn("events", f"rule/smtrain-{run}")

    def objects(self, uri: str) -> str:
        return f"arn:{self.partition}:s3:::{uri.removeprefix('s3://')}*"

    def key(self, sid: str, key: str, actions: tuple[str, ...]) -> Statement:
        """Use of a key by its ARN, ID or alias; IAM can only bind to an alias by a condition."""
        keys = self.arn("kms", "key/")
        if "alias/" in key:
            alias = key[key.index("alias/") :]
            return Statement(
                sid, actions, (f"{keys}*",), {"ForAnyValue:StringEquals": {"kms:ResourceAliases": [alias]}}
            )
        return Statement(sid, actions, (key if key.startswith("arn:") else keys + key,))

    def secret(self, sid: str, named: Secret) -> Statement:
        """Reading of one secret or parameter, by its name or ARN."""
        if named.secret:
            # Secrets Manager appends a hyphen and six characters to the name.
            arn = self.arn("secretsmanager", f"secret:{named.secret}-??????")
            given = named.secret if named.secret.startswith("arn:") else arn
            return Statement(sid, ("secretsmanager:GetSecretValue",), (given,))
        name = str(named.ssm)
        arn = self.arn("ssm", f"parameter/{name.lstrip('/')}")
        return Statement(sid, ("ssm:GetParameter",), (name if name.startswith("arn:") else arn,))
