"""The values of a config that are part of a job's name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from smtrain.core.config.section import Section


@dataclass(frozen=True)
class AddedLater:
    """Mark of a key that was added after jobs had names: its default is no part of a name, so jobs
    keep theirs.
    """

    same: tuple[Any, ...] = ()
    """Other values that mean the default."""


ADDED_LATER = AddedLater()


def identity_of(section: Section) -> dict[str, Any]:
    """The section's values as plain values, without the defaults of keys that were added later."""
    plain = section.model_dump(mode="json")
    _drop_defaults(section, plain)
    return plain


def _drop_defaults(value: Any, plain: Any) -> None:
    """Delete from `plain`, the plain form of `value`, the keys of its sections that are no part of
    a name.
    """
    if isinstance(value, Section):
        unnamed_keys = _unnamed_values(type(value))
        for key, inner in value:
            if key in unnamed_keys and inner in unnamed_keys[key]:
                del plain[key]
            else:
                _drop_defaults(inner, plain[key])
    elif isinstance(value, (tuple, list)):
        for inner, part in zip(value, plain, strict=True):
            _drop_defaults(inner, part)


@cache
def _unnamed_values(section: type[BaseModel]) -> dict[str, tuple[Any, ...]]:
    """The values without a part in a name, by the key that was added later."""
    return {
        key: (field.get_default(call_default_factory=True), *mark.same)
        for key, field in section.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, AddedLater)
    }
