"""A call of the Python API that its signature does not allow, as one sentence: before anything is done.

What there is to check is read from the function's own annotations; a type that is neither plain nor
ours is let through.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from smtrain.core.near import nearest

_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def misuse(function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]) -> str | None:
    """What is wrong with a call, None if it can be made."""
    signature, annotations = _described(function)
    name = function.__qualname__
    if args and "self" in signature.parameters:  # an inherited method is called by the name of the caller's class
        name = f"{type(args[0]).__name__}.{function.__name__}"
    name = name.removesuffix(".__init__")
    try:
        given = signature.bind(*args, **keywords)
    except TypeError as error:
        known = [one for one in signature.parameters if one != "self"]
        near = [meant for key in keywords if key not in known and (meant := nearest(key, known))]
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'nothing'}"
        return f"{name}(): {error}; {hint}"
    for key, value in given.arguments.items():
        if key in annotations and not _fits(value, annotations[key]):
            shown = repr(value)
            shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
            like = nearest(value, _literals(annotations[key])) if isinstance(value, str) else None
            meant = f"; did you mean {like}?" if like else ""
            return f"{key}: got {shown}; {name}() takes {_words(annotations[key])}{meant}"
    return None


@cache
def _described(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Signature and annotations; those that are known to type checkers alone are left out."""
    signature = inspect.signature(function)
    known: dict[str, Any] = {}
    names = vars(sys.modules[function.__module__])
    for key, parameter in signature.parameters.items():
        if parameter.annotation is inspect.Parameter.empty or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        try:
            known |= get_type_hints(SimpleNamespace(__annotations__={key: parameter.annotation}), names)
        except NameError:
            continue
    return signature, known


def _literals(wanted: Any) -> list[str]:
    """The words that an annotation allows by name."""
    if get_origin(wanted) is Literal:
        return [one for one in get_args(wanted) if isinstance(one, str)]
    return [word for inner in get_args(wanted) for word in _literals(inner)]


def _fits(value: Any, wanted: Any) -> bool:
    kind, inner = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Literal or not isinstance(kind, type) or kind is object:
        return kind is not Callable or callable(value)  # the words that there are are told by the function itself
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return isinstance(value, (tuple, list)) and len(value) == len(inner) and all(map(_fits, value, inner))
    if issubclass(kind, os.PathLike):
        return isinstance(value, os.PathLike)
    if kind in _PLAIN or issubclass(kind, Mapping) or kind.__module__.startswith("smtrain"):
        return isinstance(value, kind)
    if issubclass(kind, Collection) or kind is Iterable:
        return (
            not isinstance(value, (str, bytes, Mapping))
            and isinstance(value, Iterable)
            and (not inner or not isinstance(value, (list, tuple)) or all(_fits(item, inner[0]) for item in value))
        )
    return True


def _words(wanted: Any) -> str:
    kind, inner = get_origin(wanted) or wanted, get_args(wanted)
    if kind in (Union, UnionType):
        *rest, last = dict.fromkeys(map(_words, inner))
        return f"{', '.join(rest)} or {last}" if rest else last
    if kind is Literal:
        return " or ".join(map(repr, inner))
    if kind in _PLAIN:
        return _PLAIN[kind]
    if not isinstance(kind, type):
        return "a function" if kind is Callable else "another kind of value"
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return f"({', '.join(map(_words, inner))})"
    if issubclass(kind, os.PathLike):
        return "a path"
    if issubclass(kind, Mapping):
        return "a mapping"
    if issubclass(kind, Collection) or kind is Iterable:
        return f"a list of {_words(inner[0])}" if inner else "a list"
    return f"a {kind.__name__}"
