"""A cache of compiled graphs between a node's own folder and one that all nodes of a Slurm cluster see."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from compile_cache import CompileCache

from smtrain.core.config.schema import GRAPHS_COMPLETE


class GraphsInFolder(CompileCache):
    """One folder."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._shared = Path(uri)

    def fetch(self, folder: Path) -> None:
        if self._shared.is_dir():
            with self.refusals():
                shutil.copytree(
                    self._shared, folder, ignore=shutil.ignore_patterns(GRAPHS_COMPLETE, ".*.part"), dirs_exist_ok=True
                )

    def put(self, name: str, content: Path | bytes) -> None:
        path = self._shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        part.replace(path)

    def refusal(self, error: Exception) -> str | None:
        return f"({error})" if isinstance(error, OSError) else None
