"""A folder of an object store, of which only the files that are read are copied to this machine."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import JobPlace
from smtrain.client.jobs.results import download
from smtrain.core.files import home
from smtrain.core.protocol.uris import split_uri
from smtrain.worker.checkpoint.storage import LocalPlace


def kept_in(store: JobPlace, prefix: str) -> Path:
    """The folder of this machine for copies of what is below a URI that ends with a slash."""
    return home() / "models" / hashlib.sha256(f"{store.name} {prefix}".encode()).hexdigest()[:16]


class FarPlace:
    """A `worker.checkpoint.storage.Place` below an s3:// or oss:// URI."""

    def __init__(self, store: JobPlace, uri: str, folder: Path | None = None) -> None:
        self.store, self.uri = store, f"{uri.rstrip('/')}/"
        self.folder = folder or kept_in(store, self.uri)
        """The copies."""

    def __str__(self) -> str:
        return self.uri.rstrip("/")

    @cached_property
    def _sizes(self) -> dict[str, int]:
        _, prefix = split_uri(self.uri)
        return {item["Key"][len(prefix) :]: int(item["Size"]) for item in self.store.listing(self.uri)}

    def files(self) -> dict[str, int]:
        return self._sizes

    def stamp(self) -> list[list[Any]]:
        return [[file, size, 0] for file, size in self._sizes.items()]

    def read(self, file: str, start: int, stop: int) -> memoryview:
        download(self.store, [(self.uri, self.folder)], overwrite=True, wanted=lambda path: path == file)
        return LocalPlace(self.folder).read(file, start, stop)

    def below(self, folder: str) -> FarPlace:
        below = FarPlace(self.store, f"{self.uri}{folder}", self.folder / folder)
        sizes, skipped = self._sizes.items(), len(folder) + 1
        below._sizes = {file[skipped:]: size for file, size in sizes if file.startswith(f"{folder}/")}
        return below

    def path(self) -> Path | None:
        return None
