"""AWS calls of this process, in IAM's terms: action, resource, and the prefix of a listing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from botocore.httpsession import URLLib3Session

from smtrain.client.iam.statements import Arns, Statement

ACCOUNT = "123456789012"
HERE = Arns("aws", "us-east-1", ACCOUNT)
# the resource of an operation, by a word of its name; the longer words first
_KINDS = {
    "HyperParameterTuningJob": ("HyperParameterTuningJobName", "hyper-parameter-tuning-job"),
    "EndpointConfig": ("EndpointConfigName", "endpoint-config"),
    "Endpoint": ("EndpointName", "endpoint"),
    "ModelPackageGroup": ("ModelPackageGroupName", "model-package-group"),
    "DescribeModelPackage": ("ModelPackageName", "model-package"),
    "CreateModelPackage": ("ModelPackageGroupName", "model-package-group"),
    "ListModelPackages": ("", ""),
    "Model": ("ModelName", "model"),
    "Pipeline": ("PipelineName", "pipeline"),
}
_SCOPE = re.compile(r"Credential=[^/]+/\d+/([^/]+)/([^/]+)/aws4_request")


@dataclass(frozen=True)
class Call:
    """One request."""

    action: str
    resource: str
    prefix: str | None = None


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Every signed request of this process in the block."""
    calls: list[Call] = []
    send = URLLib3Session.send

    def noting(self: Any, request: Any) -> Any:
        calls.append(call_of(request))
        return send(self, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(URLLib3Session, "send", noting)
        yield calls


def call_of(request: Any) -> Call:
    signed = request.headers["Authorization"]
    match = _SCOPE.search(signed.decode() if isinstance(signed, bytes) else signed)
    assert match, signed
    region, service = match.groups()
    url = urlsplit(request.url)
    query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
    if service == "s3":
        return _s3(request.method, unquote(url.path), query)
    if service == "scheduler":  # REST: the operation is the method and the path
        action = {"POST": "CreateSchedule", "DELETE": "DeleteSchedule"}[request.method]
        name = url.path.rpartition("/")[2]
        return Call(
            f"scheduler:{action}", f"arn:aws:scheduler:{region}:{ACCOUNT}:schedule/default/{name}"
        )
    target = request.headers.get("X-Amz-Target")
    body = request.body.decode() if isinstance(request.body, bytes) else str(request.body or "")
    if target is None:
        fields = {key: values[0] for key, values in parse_qs(body).items()}
        role = f"arn:aws:iam::{ACCOUNT}:role/{fields.get('RoleName', '')}"
        return Call(f"{service}:{fields['Action']}", role if service == "iam" else "*")
    operation = (target.decode() if isinstance(target, bytes) else target).rpartition(".")[2]
    named = re.search(
        r'"(?:TrainingJobName|logGroupName)"\s*:\s*"([^"]+)"|training-job/([\w-]+)"', body
    )
    resource = "*"
    kind = next((kind for word, kind in _KINDS.items() if word in operation), None)
    if (
        service == "sagemaker"
        and kind
        and (match := re.search(rf'"{kind[0]}"\s*:\s*"([^"]+)"', body))
    ):
        resource = f"arn:aws:sagemaker:{region}:{ACCOUNT}:{kind[1]}/{match[1].lower()}"
        resource = match[1] if match[1].startswith("arn:") else resource
    elif named and service == "sagemaker":
        resource = (
            f"arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{(named[1] or named[2]).lower()}"
        )
    elif named:
        resource = f"arn:aws:logs:{region}:{ACCOUNT}:log-group:{named[1]}"
    return Call(f"{service}:{operation}", resource)


def _s3(method: str, path: str, query: dict[str, str]) -> Call:
    bucket, _, key = path.lstrip("/").partition("/")
    if key:
        action = {"GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}.get(
            method, "PutObject"
        )
        return Call(f"s3:{action}", f"arn:aws:s3:::{bucket}/{key}")
    return Call(
        "s3:CreateBucket" if method == "PUT" else "s3:ListBucket",
        f"arn:aws:s3:::{bucket}",
        query.get("prefix"),
    )


def allows(statement: dict[str, Any], call: Call) -> bool:
    """True if a statement of ours allows a call: wildcards, and conditions on the prefix of a
    listing.
    """
    if call.action not in statement["Action"] or not any(
        _like(p, call.resource) for p in statement["Resource"]
    ):
        return False
    for test, keys in statement.get("Condition", {}).items():
        for key, patterns in keys.items():
            if key != "s3:prefix":
                return False
            if call.prefix is None:
                if not test.endswith("IfExists"):
                    return False
            elif not any(_like(pattern, call.prefix) for pattern in patterns):
                return False
    return True


def _like(pattern: str, text: str) -> bool:
    return (
        re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text) is not None
    )


def told(calls: list[Call], *services: str, everywhere: bool = False) -> set[Call]:
    """Calls of some services, in the region of the statements (the plane has another); with
    `everywhere` also calls without a resource.
    """
    here = {call for call in calls if call.action.partition(":")[0] in services}
    moved = ((call.action, call.resource.split(":", 4)) for call in here if call.resource != "*")
    calls_here = {
        Call(action, ":".join([*parts[:3], HERE.region, parts[4]])) for action, parts in moved
    }
    return calls_here | {call for call in here if everywhere and call.resource == "*"}


def held(statements: list[Statement], calls: set[Call], unseen: set[str]) -> None:
    """Every call is granted, and every action and statement is used, except the actions named."""
    granted = [statement.to_dict() for statement in statements]
    assert {call for call in calls if not any(allows(one, call) for one in granted)} == set()
    assert {action for one in granted for action in one["Action"]} - {
        call.action for call in calls
    } == unseen
    for one in granted:
        assert set(one["Action"]) <= unseen or any(allows(one, call) for call in calls), one
