"""A folder of an object store, of which only the files that are read are copied to this machine."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.jobs.copies import StoreCopy
from smtrain.worker.checkpoint.storage import LocalPlace


class RemoteFolder:
    """A `worker.checkpoint.storage.Place` below an s3:// or oss:// URI."""

    def __init__(self, store: Backend, uri: str) -> None:
        self.copy, self._below = StoreCopy(store, uri), ""
        self._local = LocalPlace(self.copy.folder)

    def __str__(self) -> str:
        return f"{self.copy.uri}{self._below}".rstrip("/")

    @property
    def folder(self) -> Path:
        """The copies."""
        return self.copy.folder / self._below

    def files(self) -> dict[str, int]:
        start = len(self._below)
        return {
            f[start:]: object_stat.size
            for f, object_stat in self.copy.files.items()
            if f.startswith(self._below)
        }

    def stamp(self) -> list[list[Any]]:
        return [
            [file, size, self.copy.files[self._below + file].etag]
            for file, size in self.files().items()
        ]

    def read(self, file: str, start: int, stop: int) -> memoryview:
        if self._below + file in self.copy.files:
            self.copy.fetch_file(self._below + file)
        return self._local.read(self._below + file, start, stop)

    def subfolder(self, folder: str) -> RemoteFolder:
        below = copy(self)
        below._below = f"{self._below}{folder}/"
        return below

    def contains(self, accepts: Callable[[str], bool]) -> Callable[[str], bool]:
        """Whether a file of the whole copy is below this place and `accepts` by its path below
        it.
        """
        return lambda file: file.startswith(self._below) and accepts(file[len(self._below) :])

    def path(self) -> Path | None:
        return None
