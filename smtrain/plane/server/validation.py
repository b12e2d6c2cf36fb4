"""Validation of requests by the service's own model in botocore: required members, lengths, ranges,
patterns.

Invalid requests are refused in the service's words, before our code reads a field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from botocore.validate import ParamValidator

from smtrain.core.botocore_models import service_model
from smtrain.core.facts import instance

MAX_VALUE_LENGTH, CHOICES = (
    60,
    12,
)  # characters of a value, and values of an enumeration, in a message
INSTANCE_TYPES = "TrainingInstanceType"


@cache
def input_shape(service: str, operation: str) -> Any:
    """The input shape of an operation, whatever the user's AWS settings are."""
    return service_model(service).operation_model(operation).input_shape


def fault_of(service: str, operation: str, params: dict[str, Any]) -> str | None:
    """The service's error for these parameters, in one line; None if its model allows them."""
    shape = input_shape(service, operation)
    faults = list(_faults(shape, params, ""))
    if faults:
        count = f"{len(faults)} validation error{'s' if len(faults) > 1 else ''} detected"
        return f"{count}: {'; '.join(faults)}"
    report = ParamValidator().validate(params, shape)
    return " ".join(report.generate_report().split()) if report.has_errors() else None


def _faults(shape: Any, value: Any, path: str) -> Iterator[str]:
    """Faults of a value and of all below it; wrong types are left to botocore."""
    kind = shape.type_name
    if kind == "structure" and isinstance(value, dict):
        for name in shape.required_members:
            if value.get(name) is None:
                yield (
                    f"Value null at '{_member_path(path, name)}' failed to satisfy constraint:"
                    " Member must not be null"
                )
        for name, member in shape.members.items():
            if value.get(name) is not None:
                yield from _faults(member, value[name], _member_path(path, name))
        return
    if broken_rules := list(_broken_rules(shape, value)):
        yield (
            f"Value '{_format_value(value)}' at '{path}' failed to satisfy constraint:"
            f" {broken_rules[0]}"
        )
    if kind == "list" and isinstance(value, list):
        for number, entry in enumerate(value, 1):
            yield from _faults(shape.member, entry, f"{path}.{number}.member")
    elif kind == "map" and isinstance(value, dict):
        for part_name, part, entries in (
            ("key", shape.key, value),
            ("value", shape.value, value.values()),
        ):
            for entry in entries:
                if rules := list(_broken_rules(part, entry)):
                    yield (
                        f"Value '{_format_value(entry)}' at '{path}' failed to satisfy constraint: "
                        f"Map {part_name} must satisfy constraint: [{', '.join(rules)}]"
                    )


def _broken_rules(shape: Any, value: Any) -> Iterator[str]:
    """The rules of one shape that a value breaks."""
    minimum, maximum = shape.metadata.get("min"), shape.metadata.get("max")
    sized_type = {"string": str, "list": list, "map": dict}.get(shape.type_name)
    if sized_type and isinstance(value, sized_type):
        measure, size = "length", len(value)
    elif shape.type_name in ("integer", "long", "float", "double") and isinstance(
        value, (int, float)
    ):
        measure, size = "value", value
    else:
        return
    if minimum is not None and size < minimum:
        yield f"Member must have {measure} greater than or equal to {minimum}"
    if maximum is not None and size > maximum:
        yield f"Member must have {measure} less than or equal to {maximum}"
    if not isinstance(value, str):
        return
    pattern = shape.metadata.get("pattern")
    if pattern and not _compile_pattern(pattern).fullmatch(value):
        yield f"Member must satisfy regular expression pattern: {pattern}"
    choices = list(getattr(shape, "enum", []))
    if choices and value not in choices and not (shape.name == INSTANCE_TYPES and instance(value)):
        suffix = f", and {len(choices) - CHOICES} more" if len(choices) > CHOICES else ""
        yield f"Member must satisfy enum value set: [{', '.join(choices[:CHOICES])}{suffix}]"


_SIGNS = r"!-/:-@\[-`{-~\u0080-\U0010ffff"
_CLASSES = {
    r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{Alnum}": "a-zA-Z0-9",
    r"\p{M}": _SIGNS, r"\p{S}": _SIGNS, r"\p{P}": _SIGNS,
}  # fmt: skip


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """A Java pattern of the service for Python, with coarser Unicode classes; one that Python
    cannot read fits all.
    """
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    try:
        return re.compile(pattern)
    except re.error:
        return re.compile("(?s:.*)")


def _member_path(path: str, name: str) -> str:
    """The path of a member as the service writes it: outputDataConfig.s3OutputPath."""
    return f"{path}.{name[0].lower()}{name[1:]}".lstrip(".")


def _format_value(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
