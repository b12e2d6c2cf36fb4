"""Minimal calls of every operation of a service, as its model requires them, and the answers."""

from __future__ import annotations

import re
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from smtrain.core.botocore_models import service_model
from smtrain.plane.client import ROLE

# Values for the patterns of the models; the first that matches is sent.
CANDIDATES = (
    "some-name",
    "name",
    "1.0",
    "1",
    "12345678",
    ROLE,
    "arn:aws:sagemaker:us-east-1:123456789012:pipeline/some-name",
    "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl",
    "s3://smtrain-local/x",
    "vpc-12345678",
    "subnet-12345678",
    "sg-12345678",
    "i-1234567890abcdef0",
    "https://example.com/x",
    "2026-01-01T00:00:00Z",
    "123456789012",
    "arn:aws:kms:us-east-1:123456789012:key/x",
    "/opt/ml/x",
    "image:1",
    "{}",
    "a" * 32,
    "a" * 64,
)


def required_values(shape: Any, seen: tuple[str, ...] = ()) -> Any:
    """The smallest value of a shape: only required members, and lists of minimal length."""
    kind = shape.type_name
    if kind == "structure":
        required = [name for name in shape.required_members if name not in seen]
        return {name: required_values(shape.members[name], (*seen, name)) for name in required}
    if kind == "list":
        return [required_values(shape.member, seen)] * max(1, shape.metadata.get("min", 1))
    if kind == "map":
        return {}
    if kind in ("integer", "long", "float", "double"):
        return max(1, shape.metadata.get("min", 1))
    if kind == "boolean":
        return False
    if kind == "timestamp":
        return 1_700_000_000
    if kind == "blob":
        return b"{}"
    if getattr(shape, "enum", []):
        return shape.enum[0]
    pattern, least = shape.metadata.get("pattern"), shape.metadata.get("min", 0)
    fitting = (text for text in CANDIDATES if len(text) >= least and _fits(pattern, text))
    return next(fitting, "a" * max(least, 1))


def _fits(pattern: str | None, text: str) -> bool:
    try:
        return pattern is None or re.fullmatch(pattern, text) is not None
    except re.error:
        return True


def operations(service: str) -> list[str]:
    """The operations of botocore's model of a service."""
    return list(service_model(service).operation_names)


def answer(client: Any, operation: str) -> tuple[int, str, str]:
    """Status, error code and message of the minimal call; (200, "", "") without an error."""
    from botocore import xform_name

    shape = client.meta.service_model.operation_model(operation).input_shape
    try:
        getattr(client, xform_name(operation))(**(required_values(shape) if shape else {}))
    except ClientError as error:
        fault, status = (
            error.response["Error"],
            error.response["ResponseMetadata"]["HTTPStatusCode"],
        )
        return status, fault["Code"], fault.get("Message", "")
    except BotoCoreError as error:
        return 0, type(error).__name__, str(error)
    return 200, "", ""
