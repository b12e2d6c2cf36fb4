"""Check the limits of CreateTrainingJob: those in botocore's description of the API, and the
documented rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from smtrain.client.findings import Finding
from smtrain.client.preflight.context import Context
from smtrain.core.botocore_models import service_model

# CreateTrainingJob in the SageMaker API reference; botocore's model has the shape's 2500 and no
# such pattern.
HYPERPARAMETER_VALUE = 256
# The warm-pool guide; the API allows up to 21600.
KEEP_ALIVE = 3600


def limits(context: Context) -> Iterator[Finding]:
    """Each stage's request against the API: types, enumerations, lengths, counts and patterns, all
    faults at once.
    """
    reported_faults: set[str] = set()
    for stage, request in context.requests.items():
        for fault in (*violations(request), *_documented_limits(request)):
            if fault not in reported_faults:
                yield Finding(
                    "limits",
                    "fault",
                    f"{stage}: {fault}",
                    "shorten, remove or correct it in the config",
                )
            reported_faults.add(fault)
    keep = context.config.compute.keep_alive
    if keep > KEEP_ALIVE:
        yield Finding(
            "limits",
            "warning",
            f"compute.keep_alive is {keep} s, and warm pools are documented up to {KEEP_ALIVE} s",
            f"set it to {KEEP_ALIVE} or less",
        )
    if not reported_faults:
        yield Finding(
            "limits",
            "ok",
            f"the requests of {', '.join(context.stages)} are within the API's limits",
        )


def violations(request: dict[str, Any]) -> Iterator[str]:
    """All violations of the API's model by a CreateTrainingJob request."""
    from botocore.validate import ParamValidator

    shape = _shape()
    yield from ParamValidator().validate(request, shape).generate_report().splitlines()
    yield from _limit_faults(request, shape, "")


@cache
def _shape() -> Any:
    return service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def _limit_faults(value: Any, shape: Any, path: str) -> Iterator[str]:
    """The checks that botocore leaves to the service: upper bounds, patterns and enumerations."""
    maximum = shape.metadata.get("max")
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, item in value.items():
            if name in shape.members:
                yield from _limit_faults(
                    item, shape.members[name], f"{path}.{name}" if path else name
                )
    elif shape.type_name == "map" and isinstance(value, dict):
        if maximum is not None and len(value) > maximum:
            yield f"{path} has {len(value)} entries, {maximum} are allowed"
        for key, item in value.items():
            yield from _limit_faults(key, shape.key, f"the name {key[:40]!r} in {path}")
            yield from _limit_faults(item, shape.value, f"{path}[{key[:40]!r}]")
    elif shape.type_name == "list" and isinstance(value, (list, tuple)):
        if maximum is not None and len(value) > maximum:
            yield f"{path} has {len(value)} entries, {maximum} are allowed"
        for number, item in enumerate(value):
            yield from _limit_faults(item, shape.member, f"{path}[{number}]")
    elif shape.type_name == "string" and isinstance(value, str):
        yield from _text(value, shape, path, maximum)
    elif (
        shape.type_name in ("integer", "long")
        and isinstance(value, int)
        and maximum is not None
        and value > maximum
    ):
        yield f"{path} is {value}, at most {maximum} is allowed"


def _text(value: str, shape: Any, path: str, maximum: int | None) -> Iterator[str]:
    if maximum is not None and len(value) > maximum:
        yield f"{path} has {len(value)} characters, {maximum} are allowed"
    elif shape.enum and value not in shape.enum:
        yield f"{path} is {value!r}, which the installed botocore does not know"
    elif (pattern := shape.metadata.get("pattern")) and not _matches(pattern, value):
        yield f"{path} does not match {pattern}"


def _matches(pattern: str, value: str) -> bool:
    # Java's character classes in the model, which are always within brackets, in Python's spelling.
    for java, python in (
        ("\\p{L}", r"\w"),
        ("\\p{N}", r"\w"),
        ("\\p{Alnum}", r"\w"),
        ("\\p{Z}", r"\s"),
    ):
        pattern = pattern.replace(java, python)
    return re.fullmatch(pattern, value) is not None


def _documented_limits(request: dict[str, Any]) -> Iterator[str]:
    for key, value in request.get("HyperParameters", {}).items():
        if len(value) > HYPERPARAMETER_VALUE:
            yield (
                f"HyperParameters[{key!r}] has {len(value)} characters, {HYPERPARAMETER_VALUE} are"
                " documented"
            )
