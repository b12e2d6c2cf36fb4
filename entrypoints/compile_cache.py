"""What every cache of compiled graphs does, wherever it lies: the order of its files, and refusals as sentences."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smtrain.core.config.schema import GRAPHS_COMPLETE
from smtrain.core.errors import SmtrainError


class CompileCache(ABC):
    """One place for graphs. Every method raises `SmtrainError` where it cannot be used."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @abstractmethod
    def fetch(self, folder: Path) -> None:
        """Copy all graphs into a folder, so that only what is new is compiled."""

    def store(self, folder: Path, files: list[Path]) -> None:
        """Copy files of a folder; what says that a graph is whole comes after the rest of it."""
        with self.refusals():
            for path in sorted(files, key=lambda p: (p.parent, p.suffix in (".neff", ".done"), p.name)):
                self.put(path.relative_to(folder).as_posix(), path)

    def complete(self, told: dict[str, Any]) -> None:
        """Say that all graphs are there."""
        with self.refusals():
            self.put(GRAPHS_COMPLETE, (json.dumps(told, indent=1) + "\n").encode())

    @abstractmethod
    def put(self, name: str, content: Path | bytes) -> None:
        """A file of the cache: all of it is there, or nothing."""

    @abstractmethod
    def refusal(self, error: Exception) -> str | None:
        """Why the cache cannot be used, and what to do; None for an error that is none of its own."""

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of the place into a sentence."""
        try:
            yield
        except Exception as error:
            if (why := self.refusal(error)) is None:
                raise
            raise SmtrainError(f"the compile cache {self.uri} cannot be used {why}") from None
