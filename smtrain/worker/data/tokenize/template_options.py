"""Options of a chat template: those of a record, and the variables that a template reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from smtrain.core.errors import first_line
from smtrain.core.model.chat_options import RESERVED_NAMES
from smtrain.worker.data.tokenize.turns import RecordFault, read_json, refuse_no_json

KWARGS = "chat_template_kwargs"
OPTIONS: dict[str, type | tuple[type, ...]] = {
    "enable_thinking": bool,
    "thinking": bool,
    "preserve_thinking": bool,
    "clear_thinking": bool,
    "thinking_budget": (int, float),
    "reasoning_effort": str,
    "documents": list,
    "builtin_tools": list,
    "date_string": str,
}
"""Fields of a record that are options of published templates, and their types."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


def read_options(row: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The options of a record: name in the template -> (field of the record, value).

    Raises RecordFault.

    `chat_template_kwargs`, an object or JSON in a string, wins over a field of the record.
    """
    options = {
        name: (name, row[name])
        for name, kind in OPTIONS.items()
        if isinstance(row.get(name), kind) and (kind is bool or not isinstance(row[name], bool))
    }
    values = read_json(row.get(KWARGS), repr(KWARGS)) or {}
    if not isinstance(values, dict) or RESERVED_NAMES & values.keys():
        raise RecordFault(f"{KWARGS!r} is no object of values for the chat template")
    refuse_no_json([*values.values(), *(value for _, value in options.values())], repr(KWARGS))
    # A row of a table has the names of all rows, with null.
    return options | {
        name: (f"{KWARGS}.{name}", value) for name, value in values.items() if value is not None
    }


def option_fields(options: Mapping[str, tuple[str, Any]]) -> set[str]:
    """The fields of a record that hold these options."""
    return {field.partition(".")[0] for field, _ in options.values()}


def values_of(options: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """The options by name, as a template takes them."""
    return {name: value for name, (_, value) in options.items()}


def ignored_options(options: Mapping[str, Any], variables: Collection[str]) -> str:
    """A clause about options for all records that a template does not read; "" if it reads all."""
    unused_names = sorted(options.keys() - set(variables))
    return (
        f"the chat template does not read {', '.join(unused_names)} of chat_template_kwargs"
        if unused_names
        else ""
    )


LONGEST = 200_000
"""Characters of a chat template; published ones have at most 40,000.

Jinja takes seconds to parse a million.
"""


@cache
def template_fault(source: str) -> str | None:
    """The fault with which a template can write no record: its length or its syntax."""
    from jinja2 import TemplateSyntaxError

    if len(source) > LONGEST:
        return f"it has {len(source):,} characters, more than {LONGEST:,}"
    try:
        _environment().parse(_GENERATION.sub("", source))
    except TemplateSyntaxError as error:
        return f"line {error.lineno} is not valid Jinja: {first_line(error)}"
    return None


def _environment() -> Any:
    """The parser of templates, without the tags of transformers that mark answers."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])


@cache
def template_variables(source: str) -> frozenset[str]:
    """The names that a template reads from its caller; every word of one that does not parse."""
    from jinja2 import TemplateError, meta

    source = _COMMENT.sub("", _GENERATION.sub("", source))
    try:
        free_variables = meta.find_undeclared_variables(_environment().parse(source))
    except TemplateError:
        return frozenset(re.findall(r"\w+", source))
    return frozenset(name for name in free_variables if not _is_set_first(name, source))


def _is_set_first(name: str, source: str) -> bool:
    """Whether a template sets a name before it reads it, as jinja reports names that are set in a
    branch too.
    """
    first = re.search(rf"(?<![.\w'\"]){name}\b(?!['\"])", source)
    if not first or not re.search(r"\bset\s+$", source[: first.start()]):
        return False
    return not re.match(
        rf"[^%]*(?<![.\w'\"]){name}\b", source[first.end() :]
    )  # not `x = x | default(...)`
