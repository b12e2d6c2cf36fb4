"""The edge of the public API: check a call against its signature, and turn errors of the machine, a
missing package or AWS into `SmtrainError`, keeping the cause.

The command line and the Python API both pass through here, so no function in between translates
such errors.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from smtrain.core.aws_errors import spell
from smtrain.core.errors import JobError, Sentence, SmtrainError
from smtrain.core.extras import missing_module
from smtrain.core.files import disk_sentence
from smtrain.core.suggest import nearest
from smtrain.core.text import with_article
from smtrain.core.work import announce_call

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_REMEDIES = {
    errno.ENOSPC: "free space there, or choose another disk",
    errno.EDQUOT: "free space there, or choose another disk",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose one that you may read and write",
    errno.EPERM: "choose one that you may read and write",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_PLAIN = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
}


def sentence(error: Exception) -> str | None:
    """A sentence about an error that a user can fix: the disk, a missing package, AWS.

    None for a defect of smtrain.
    """
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and not error.name.startswith("smtrain")
    ):
        return missing_module(error.name)
    if isinstance(error, re.error):
        return f"{error.pattern!r} is not a regular expression ({error.msg})"
    if (
        isinstance(error, OSError)
        and error.strerror
        and not type(error).__module__.startswith(("botocore", "urllib"))
    ):
        prefix = f"{error.filename}: " if error.filename is not None else ""
        remedy = _REMEDIES.get(error.errno or 0, "name another file or folder")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not prefix and full:  # a write does not name its file
            home = os.environ.get("SMTRAIN_HOME") or "~/.smtrain"
            remedy = f"free space on the disks of SMTRAIN_HOME ({home}), TMPDIR and the output"
        text = f"{prefix}{error.strerror[0].lower()}{error.strerror[1:]}; {remedy}"
        return Sentence(text, "disk.full") if full else text
    return _of_aws(error) or disk_sentence(error)


def _of_aws(error: Exception) -> str | None:
    """The sentence for an error of AWS; None if botocore, which is not imported for this, is not in
    the process.
    """
    return spell(error) if "botocore" in sys.modules else None


def to_smtrain_error(error: Exception) -> SmtrainError | None:
    """The `SmtrainError` for an error; None for a `SmtrainError`, and for a defect of smtrain."""
    if isinstance(
        error, SmtrainError | BrokenPipeError
    ):  # the printer handles a reader that has gone
        return None
    if (of_aws := _of_aws(error)) is not None:
        return JobError(of_aws)
    text = sentence(error)
    return None if text is None else SmtrainError(text)


@contextlib.contextmanager
def _translating(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> Iterator[None]:
    if wrong := misuse(function, args, keywords):
        raise SmtrainError(wrong, code="call.invalid")
    try:
        yield
    except Exception as error:
        if smtrain_error := to_smtrain_error(error):
            raise smtrain_error from error
        raise


def public(function: F) -> F:
    """Decorate a function of the Python API: raise `SmtrainError` for a wrong call and for what the
    machine or AWS refuses.
    """
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with _translating(function, args, kwargs):
                yield from function(*args, **kwargs)

        return cast(F, generator)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        announce_call(function.__qualname__)
        with _translating(function, args, kwargs):
            return function(*args, **kwargs)

    return cast(F, call)


def public_class(cls: type[T]) -> type[T]:
    """Decorate every public method and property of a class with `public`."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            assert member.fget is not None
            setattr(
                cls, name, property(public(member.fget), member.fset, member.fdel, member.__doc__)
            )
        elif inspect.isfunction(member):
            setattr(cls, name, public(member))
    return cls


def misuse(
    function: Callable[..., Any], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> str | None:
    """A sentence about a call that the signature does not allow; None if it does.

    Types are checked as far as the annotations are plain or smtrain's own. pydantic's
    `validate_call` cannot take over: it fails on the 8 of 48 public callables whose annotations
    name types that are imported for type checkers only, takes 0.85 s instead of 0.03 s to read the
    other types, reports one fault per member of a union, has no near word for a keyword, and
    replaces the lists and iterators that it is given.
    """
    signature, annotations = _call_signature(function)
    name = function.__qualname__
    if (
        args and "self" in signature.parameters
    ):  # an inherited method is called by the name of the caller's class
        name = f"{type(args[0]).__name__}.{function.__name__}"
    name = name.removesuffix(".__init__")
    try:
        arguments = signature.bind(*args, **keywords).arguments
    except TypeError as error:
        parameter_names = [parameter for parameter in signature.parameters if parameter != "self"]
        suggestions = [
            meant
            for key in keywords
            if key not in parameter_names and (meant := nearest(key, parameter_names))
        ]
        hint = (
            f"did you mean {suggestions[0]}?"
            if suggestions
            else f"it takes {', '.join(parameter_names) or 'nothing'}"
        )
        return f"{name}(): {error}; {hint}"
    for key, value in arguments.items():
        if key in annotations and not _fits(value, annotations[key]):
            value_text = repr(value)
            value_text = value_text if len(value_text) <= 60 else f"{value_text[:57]}..."
            like = nearest(value, _literals(annotations[key])) if isinstance(value, str) else None
            meant = f"; did you mean {like}?" if like else ""
            return f"{key}: got {value_text}; {name}() takes {_words(annotations[key])}{meant}"
    return None


@functools.cache
def _call_signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Signature and annotations, without those whose types are imported for type checkers only."""
    signature = inspect.signature(function)
    annotations: dict[str, Any] = {}
    names = vars(sys.modules[function.__module__])
    for key, parameter in signature.parameters.items():
        if (
            parameter.annotation is inspect.Parameter.empty
            or parameter.kind is inspect.Parameter.VAR_KEYWORD
        ):
            continue
        try:
            annotations |= get_type_hints(
                SimpleNamespace(__annotations__={key: parameter.annotation}), names
            )
        except NameError:
            continue
    return signature, annotations


def _literals(annotation: Any) -> list[str]:
    """The words that an annotation allows."""
    if get_origin(annotation) is Literal:
        return [literal for literal in get_args(annotation) if isinstance(literal, str)]
    return [word for inner in get_args(annotation) for word in _literals(inner)]


def _fits(value: Any, annotation: Any) -> bool:
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return any(_fits(value, member) for member in inner)
    if kind is Literal or not isinstance(kind, type) or kind is object:
        return kind is not Callable or callable(value)  # the function itself reports a wrong word
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(inner)
            and all(map(_fits, value, inner))
        )
    if issubclass(kind, os.PathLike):
        return isinstance(value, os.PathLike)
    if kind in _PLAIN or issubclass(kind, Mapping) or kind.__module__.startswith("smtrain"):
        return isinstance(value, kind)
    if issubclass(kind, Collection) or kind is Iterable:
        return (
            not isinstance(value, (str, bytes, Mapping))
            and isinstance(value, Iterable)
            and (
                not inner
                or not isinstance(value, (list, tuple))
                or all(_fits(item, inner[0]) for item in value)
            )
        )
    return True


def _words(annotation: Any) -> str:
    kind, inner = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        *leading_words, last = dict.fromkeys(map(_words, inner))
        return f"{', '.join(leading_words)} or {last}" if leading_words else last
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
    return with_article(kind.__name__)
