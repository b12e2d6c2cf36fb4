"""The keys of a config that differ from their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from smtrain.core.config.schema import JobConfig

_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def changed_keys(config: Mapping[str, Any], section: type[BaseModel] = JobConfig) -> dict[str, Any]:
    """The keys whose values differ from their defaults or have none, in the order of the schema."""
    changed: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        if key not in config:
            continue
        value, default, inner = config[key], None, _section_of(field.annotation)
        if not field.is_required():
            default = _ANY.dump_python(field.get_default(call_default_factory=True), mode="json")
        if isinstance(value, Mapping) and inner:
            inner_keys = changed_keys(value, inner)
            if inner_keys or default is None:  # writing the section switches it on
                changed[key] = inner_keys
        elif field.is_required() or value != default:
            changed[key] = value
    return changed


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in a key's type; None for the type of a plain value."""
    types = (annotation, *get_args(annotation))
    return next((x for x in types if isinstance(x, type) and issubclass(x, BaseModel)), None)
