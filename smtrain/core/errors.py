"""Errors that a user can fix: one sentence that names the key or file and the remedy, and a code
for scripts.

The command line prints the sentence without a traceback and exits with status 2. Any other
exception is a defect of smtrain. Sentences may be reworded; a code, once released, keeps its
meaning (docs/api/errors.md explains each).

    SmtrainError          code `error`
    ├── ConfigError       `config`: a config that cannot run; holds every fault, each with its code
    ├── DataError         `data`: text, tokens or a prepared dataset that cannot be used
    ├── CheckpointError   `checkpoint`: weights or a checkpoint that cannot be read or do not fit
    ├── JobError          `job`: a job that cannot be submitted, found or followed, or that failed
    └── LocalError        `local`: the local control plane cannot start or cannot do what a request asks

The code of an error is, in this order: the keyword `code`, the code of the `Sentence` that it was
raised with, the default of its class. Causes that any class may have (`aws.*`, `disk.*`,
`package.missing`, `model.not_found`, `data.not_found`) have codes that do not depend on the class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from smtrain.core.text import clean

Code = Literal[
    "error",
    "call.invalid",
    "config",
    "config.unknown_key",
    "config.missing_key",
    "config.wrong_value",
    "config.combination",
    "config.secret",
    "config.unreadable",
    "model.not_found",
    "data",
    "data.not_found",
    "checkpoint",
    "checkpoint.missing",
    "checkpoint.damaged",
    "checkpoint.other_model",
    "job",
    "job.not_found",
    "job.failed",
    "job.stopped",
    "local",
    "local.unreachable",
    "aws.no_credentials",
    "aws.quota",
    "aws.capacity",
    "aws.refused",
    "aws.unreachable",
    "disk.full",
    "disk.unwritable",
    "package.missing",
]


class Sentence(str):
    """A sentence that knows its code: an error raised with it has the same code."""

    code: Code

    def __new__(cls, text: str, code: Code) -> Sentence:
        sentence = super().__new__(cls, text)
        sentence.code = code
        return sentence

    def __getnewargs__(self) -> tuple[str, Code]:  # type: ignore[override]  # str's own has one argument
        return str(self), self.code


def reword(sentence: str, text: str) -> str:
    """The text, with the code of the sentence that it replaces."""
    return Sentence(text, sentence.code) if isinstance(sentence, Sentence) else text


_ENDLESS = re.compile(r"(\S{80})\S{1920,}")


def _readable(text: str) -> str:
    """Clean text, in which a word of 2,000 characters or more, such as a value of a config, is cut
    to 80.
    """
    return _ENDLESS.sub(r"\1...", clean(text))


class SmtrainError(Exception):
    """Base of every error that a user can fix.

    Its text is clean: it may repeat what a job or AWS said.
    """

    code: Code = "error"
    """The kind of error, for scripts (docs/api/errors.md)."""

    def __init__(self, *args: object, code: Code | None = None) -> None:
        sentence_code = next((arg.code for arg in args if isinstance(arg, Sentence)), None)
        self.code = code or sentence_code or type(self).code
        super().__init__(*(_readable(arg) if isinstance(arg, str) else arg for arg in args))

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: a notebook shows the sentence instead of a traceback; `%debug` still has
        the traceback.
        """
        return [f"{type(self).__name__}: {self}"]


class ConfigError(SmtrainError):
    """A config that cannot run; `faults` holds one sentence per fault, in the order of the keys."""

    code: Code = "config"
    """Code of the first fault."""
    codes: list[Code]
    """Code of each fault."""
    config: object = None
    """The config, if it lacks nothing but packages on this machine."""

    def __init__(self, faults: str | Iterable[str], *, code: Code | None = None) -> None:
        default = code or type(self).code
        fault_texts = (
            [faults] if isinstance(faults, str) else dict.fromkeys(faults)
        )  # two rules may say the same
        fault_codes = [
            (fault, fault.code if isinstance(fault, Sentence) else default) for fault in fault_texts
        ]
        self.codes = [fault_code for _, fault_code in fault_codes]
        self.faults: list[str] = [
            Sentence(_readable(fault), fault_code) for fault, fault_code in fault_codes
        ]
        super().__init__("\n".join(self.faults), code=next(iter(self.codes), default))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.faults,)  # else a copy would be made from the joined text


class DataError(SmtrainError):
    """Text, tokens or a prepared dataset that cannot be used as requested."""

    code: Code = "data"


class CheckpointError(SmtrainError):
    """Weights or a checkpoint that cannot be read, or that do not fit the model or the mesh."""

    code: Code = "checkpoint"


class JobError(SmtrainError):
    """A job that cannot be submitted, found or followed, or that failed."""

    code: Code = "job"


class LocalError(SmtrainError):
    """The local control plane cannot start, or cannot do what a request asks for."""

    code: Code = "local"


_LONGEST_CAUSE = 300
"""Characters of another program's message in a sentence of ours."""


def first_line(error: BaseException) -> str:
    """The message of a library or of the system, short enough to be part of a sentence."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.errno, int):
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    line = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
    return line if len(line) <= _LONGEST_CAUSE else f"{line[:_LONGEST_CAUSE]}..."


def read_remedy(error: BaseException, otherwise: str) -> str:
    """The remedy for a file that cannot be read: that of the system's error, or `otherwise` if its
    content is bad.
    """
    if isinstance(error, PermissionError):
        return "give this user the right to read it"
    if isinstance(error, FileNotFoundError):
        return "put it back"
    return otherwise
