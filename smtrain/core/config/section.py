"""The base of all sections of a config."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from smtrain.core.config.error_messages import key_of, sentence_of
from smtrain.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

_HUGE = 2**63
_POWER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")


class _Called(ModelMetaclass):
    """Makes a section built by hand raise the sentences of `load_config` instead of
    pydantic's report.

    `model_validate`, which loading uses, does not pass through here.
    """

    def __call__(self, *args: Any, **values: Any) -> Any:
        section = cast("type[BaseModel]", self)
        if args:
            words = (
                "takes its keys by name, as in"
                f" {section.__name__}({next(iter(section.model_fields))}=...)"
            )
            raise ConfigError(
                f"{section.__name__}: {words}; smtrain.load_config takes a file or a mapping",
                code="call.invalid",
            )
        if not values and not any(field.is_required() for field in section.model_fields.values()):
            # Defaults need no validation. Else the default sections of JobConfig would build the
            # validator of every section at import.
            return section.model_construct()
        try:
            return super().__call__(**values)
        except ValidationError as error:
            details = error.errors()
        raise ConfigError([sentence_of(section, key_of(detail)[1], detail) for detail in details])


class Section(BaseModel, metaclass=_Called):
    """Base of all sections: numbers are finite, and true and false are not numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{name}: a config is not changed in place; smtrain.load_config(config, set_=[...])"
            " makes another",
            code="call.invalid",
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # pydantic 2.9 serializes a default section with its own serializer, which defer_build has
        # not built yet.
        for field in cls.model_fields.values():
            if isinstance(field.default, BaseModel):
                type(field.default).model_rebuild()
        schema = handler(core)
        keys = handler.resolve_ref_schema(schema).get("properties", {})
        for key, text in descriptions(cls).items():
            keys[key]["description"] = text
        return schema

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        allowed_types = kinds(cls, info.field_name or "")
        items = value if isinstance(value, (list, tuple)) else (value,)
        if (
            allowed_types & {int, float}
            and bool not in allowed_types
            and any(isinstance(item, bool) for item in items)
        ):
            raise ValueError("a number is needed here, not true or false")
        if allowed_types & {int, float} and any(
            isinstance(n, int | float) and _HUGE < abs(n) < inf for n in items
        ):
            raise ValueError(f"the number is too large; give one below {_HUGE:.0e}")
        # YAML 1.1 reads `1e4` as text; for a key that takes a whole number it means 10000.
        if (
            int in allowed_types
            and str not in allowed_types
            and isinstance(value, str)
            and _POWER.fullmatch(value)
        ):
            return float(value)
        return value


@cache
def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """The description of each key: the docstring below it.

    pydantic's `use_attribute_docstrings` would read the source of all sections whenever a config is
    loaded.
    """
    by_name: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section) or base is Section:
            continue
        (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for statement, docstring in pairwise(cast("ast.ClassDef", class_node).body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(docstring, ast.Expr)
            ):
                by_name[statement.target.id] = inspect.cleandoc(ast.literal_eval(docstring.value))
    return by_name


def kinds(section: type[BaseModel], field: str) -> frozenset[type]:
    """The plain types that a field takes, also as items of a list."""

    def leaf_types(annotation: Any) -> set[Any]:
        inner = get_args(annotation)
        return set().union(*map(leaf_types, inner)) if inner else {annotation}

    return frozenset(leaf_types(section.model_fields[field].annotation))


class Secret(Section):
    """A secret by its name; the container reads it with the job's role, and its value is in no
    request, log or file.
    """

    secret: str | None = None
    """Name or ARN in Secrets Manager."""
    ssm: str | None = None
    """Name or ARN of an SSM parameter."""
    key: str | None = None
    """The field to read if the secret is a JSON object."""
