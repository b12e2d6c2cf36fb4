"""Which fields of a config are sections."""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel


@cache
def is_section(annotation: Any) -> bool:
    """Whether a field's type is a section. (In Python 3.10 dict[str, str] counts as a class.)"""
    return (
        isinstance(annotation, type)
        and get_origin(annotation) is None
        and issubclass(annotation, BaseModel)
    )


def section_in(annotation: Any) -> Any:
    """The section that a field holds, possibly as an optional one; None if it holds another
    value.
    """
    inner = [member for member in get_args(annotation) if member is not NoneType]
    annotation = inner[0] if len(inner) == 1 and NoneType in get_args(annotation) else annotation
    return annotation if is_section(annotation) else None
