"""The edge of the package: what a machine, a missing package or AWS refuses leaves it as `SmtrainError`, cause chained.

The command line and the Python API go through here, so no function in between translates such errors for users.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from smtrain.core.calling import misuse
from smtrain.core.errors import JobError, SmtrainError
from smtrain.core.extras import missing
from smtrain.core.files import disk_sentence

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


SPELLERS: list[Callable[[Exception], str | None]] = []
"""Sentences for errors of a library that is loaded only where it is needed."""


def sentence(error: Exception) -> str | None:
    """What a user can mend: the disk, a missing package, AWS. None for anything else, which is a fault of ours."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("smtrain"):
        return missing(error.name)
    if isinstance(error, re.error):
        return f"{error.pattern!r} is not a regular expression ({error.msg})"
    if isinstance(error, OSError) and error.strerror and not type(error).__module__.startswith(("botocore", "urllib")):
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = _REMEDIES.get(error.errno or 0, "name another file or folder")
        if not where and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a write does not say where
            kept = os.environ.get("SMTRAIN_HOME") or "~/.smtrain"
            remedy = f"free space where SMTRAIN_HOME ({kept}), TMPDIR and the output lie"
        return f"{where}{error.strerror[0].lower()}{error.strerror[1:]}; {remedy}"
    return _of_aws(error) or disk_sentence(error)


def _of_aws(error: Exception) -> str | None:
    """What AWS or the way to it refuses, in the words of `smtrain.client.backends.sagemaker.calls`, which every call
    goes through."""
    return next(filter(None, (spell(error) for spell in SPELLERS)), None)


def translated(error: Exception) -> SmtrainError | None:
    """The error of ours that says the same; None for one of ours, and for a fault of ours."""
    if isinstance(error, SmtrainError | BrokenPipeError):  # a reader that has gone is for whoever prints
        return None
    if (of_aws := _of_aws(error)) is not None:
        return JobError(of_aws)
    told = sentence(error)
    return None if told is None else SmtrainError(told)


def public(function: F) -> F:
    """A function of the Python API: a call that it does not take, and what a user's machine or AWS refuses, are raised
    as `SmtrainError`."""
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
            if wrong := misuse(function, args, kwargs):
                raise SmtrainError(wrong)
            try:
                yield from function(*args, **kwargs)
            except Exception as error:
                if told := translated(error):
                    raise told from error
                raise

        return cast(F, generator)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if wrong := misuse(function, args, kwargs):
            raise SmtrainError(wrong)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if told := translated(error):
                raise told from error
            raise

    return cast(F, call)


def public_class(cls: type[T]) -> type[T]:
    """The same for every public method and property of a class."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, property):
            assert member.fget is not None
            setattr(cls, name, property(public(member.fget), member.fset, member.fdel, member.__doc__))
        elif inspect.isfunction(member):
            setattr(cls, name, public(member))
    return cls
