"""A cache of compiled graphs between a node's own folder and one that all nodes of a Slurm cluster see."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from smtrain.config.schema import GRAPHS_COMPLETE
from smtrain.errors import SmtrainError


class GraphsInFolder:
    """One folder. Every method raises `SmtrainError` where it cannot be used."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._shared = Path(uri)

    def fetch(self, folder: Path) -> None:
        """Copy all graphs into a folder, so that only what is new is compiled."""
        if self._shared.is_dir():
            with _Refusals(self.uri):
                shutil.copytree(
                    self._shared, folder, ignore=shutil.ignore_patterns(GRAPHS_COMPLETE, ".*.part"), dirs_exist_ok=True
                )

    def store(self, folder: Path, files: list[Path]) -> None:
        """Copy files of a folder; what says that a graph is whole comes after the rest of it."""
        with _Refusals(self.uri):
            for path in sorted(files, key=lambda p: (p.parent, p.suffix in (".neff", ".done"), p.name)):
                self._put(path.relative_to(folder).as_posix(), path.read_bytes())

    def complete(self, told: dict[str, Any]) -> None:
        """Say that all graphs are there."""
        with _Refusals(self.uri):
            self._put(GRAPHS_COMPLETE, (json.dumps(told, indent=1) + "\n").encode())

    def _put(self, name: str, content: bytes) -> None:
        path = self._shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_bytes(content)
        part.replace(path)


class _Refusals:
    """A refusal by the file system becomes a sentence."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, OSError):
            raise SmtrainError(f"the compile cache {self._uri} cannot be used ({error})") from None
