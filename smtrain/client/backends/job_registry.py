"""Remember the backend of each job, for commands that only name a job: one file a job.

It is needed for backends that no account or login leads to: a Slurm cluster, a storage and
workspace of PAI-DLC. Each has a module `registry` in its folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from smtrain.core.config.section import Section
from smtrain.core.errors import ConfigError
from smtrain.core.files import home, read_object, write_atomically
from smtrain.core.protocol.requests import is_of_run

_LATEST = "latest"
_Kind = TypeVar("_Kind", bound=Section)


@dataclass(frozen=True)
class JobRegistry(Generic[_Kind]):
    """The jobs of one target."""

    folder: str
    """Its folder in smtrain's."""
    section: type[_Kind]
    """The section of a config that describes such a backend."""
    variable: str
    """The variable that names one."""
    parse: Callable[[str], _Kind]
    """Read the variable's value. Raises `ConfigError` for another form."""
    form: str
    """The form of that value, for a sentence."""
    unknown_message: str
    """The sentence without a known one."""

    def remember(self, section: _Kind, job: str) -> None:
        """Note the backend of a job; it is also the default one from now on."""
        for name in (job, _LATEST):
            path = self._file(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, section.model_dump_json(exclude_defaults=True), sync=False)

    def forget(self, job: str) -> None:
        """Remove the note about a job that was deleted."""
        self._file(job).unlink(missing_ok=True)

    def knows(self, job: str) -> bool:
        """True if a job, or a job of a run of this name, was submitted to such a backend from
        here.
        """
        return self._path_of_job(job) is not None

    def section_of(self, job: str | None = None) -> _Kind:
        """The backend of a job, else of the variable, else the one used last.

        Raises `ConfigError` if none is known.
        """
        variable_value = os.environ.get(self.variable)
        if job and (path := self._path_of_job(job)):
            return self._read(path)
        if variable_value:
            try:
                return self.parse(variable_value)
            except ConfigError:
                raise ConfigError(
                    f"{self.variable} is {variable_value!r}; it must look like {self.form}",
                    code="config.wrong_value",
                ) from None
        if self._file(_LATEST).is_file():
            return self._read(self._file(_LATEST))
        raise ConfigError(self.unknown_message, code="config.missing_key")

    def _path_of_job(self, name: str) -> Path | None:
        """The file of a job, or the newest of a run's jobs."""
        if not name or "/" in name or name == _LATEST:
            return None
        if (path := self._file(name)).is_file():
            return path
        of_run = (path for path in path.parent.glob("*.json") if is_of_run(path.stem, name))
        return max(of_run, key=lambda path: path.stat().st_mtime, default=None)

    def _file(self, name: str) -> Path:
        return home() / self.folder / f"{name}.json"

    def _read(self, path: Path) -> _Kind:
        try:
            return self.section.model_validate(read_object(path))
        except ValueError as error:
            raise ConfigError(
                f"{path} cannot be read ({str(error).splitlines()[0]}); delete it",
                code="config.unreadable",
            ) from None
