"""The errors a user can cause, each one sentence that names the key or file and the remedy.

The command line prints them without a traceback and leaves with status 2. Everything else is a defect of ours.

    SmtrainError
    ├── ConfigError       a config that cannot be run: holds every fault found
    ├── DataError         text, tokens or a prepared dataset that cannot be used
    ├── CheckpointError   weights or a checkpoint that cannot be read or do not fit
    ├── JobError          a job that cannot be submitted, found, followed or that failed
    └── LocalError        the local control plane cannot start or cannot honour a request
"""

from __future__ import annotations

from smtrain.core.text import clean


class SmtrainError(Exception):
    """Base of every error that a user can mend. Its text is clean: it may repeat what a job or AWS said."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(clean(arg) if isinstance(arg, str) else arg for arg in args))

    def _render_traceback_(self) -> list[str]:
        """IPython's own hook: a notebook shows the sentence in place of a traceback; `%debug` has that still."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(SmtrainError):
    """A config that cannot be run; `faults` holds one sentence per fault, in the order of the keys."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = [clean(fault) for fault in faults]
        super().__init__("\n".join(self.faults))


class DataError(SmtrainError):
    """Text, tokens or a prepared dataset that cannot be used as asked."""


class CheckpointError(SmtrainError):
    """Weights or a checkpoint that cannot be read, or that do not fit the model or the mesh."""


class JobError(SmtrainError):
    """A job that cannot be submitted, found or followed, or that ended badly."""


class LocalError(SmtrainError):
    """The local control plane cannot start, or cannot honour what a request asks for."""


def first_line(error: BaseException) -> str:
    """What an error of a library or of the system says, short enough to be part of a sentence."""
    if isinstance(error, OSError) and error.strerror and isinstance(error.errno, int):
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
