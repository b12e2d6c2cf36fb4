"""The source bundle: the code that a job runs, as an archive whose bytes depend only on its
content.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from smtrain.core.protocol.entrypoints import entrypoints_folder

PACKAGE = Path(__file__).resolve().parents[2]
PARTS = ("__init__.py", "version.py", "core", "stages", "worker")
"""The worker half of the package, and what both halves share."""


@dataclass(frozen=True)
class Bundle:
    """The archive and the sha256 of its bytes."""

    data: bytes
    sha256: str


def bundle_files() -> dict[str, Path]:
    """Every file of the bundle by its name in the archive, sorted."""
    files: dict[str, Path] = {}
    for part in PARTS:
        root = PACKAGE / part
        for path in [root] if root.is_file() else root.rglob("*"):
            if path.suffix in (".py", ".toml") and path.is_file():
                files[f"smtrain/{path.relative_to(PACKAGE).as_posix()}"] = path
    for path in entrypoints_folder().iterdir():
        if path.suffix in (".py", ".txt"):
            files[f"entrypoints/{path.name}"] = path
    return dict(sorted(files.items()))


@cache
def build_bundle() -> Bundle:
    """The bundle of the package as it is installed; its bytes are the same on every machine."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(
            fileobj=buffer, mode="wb", mtime=0, compresslevel=4, filename=""
        ) as gzip_file,
        tarfile.open(fileobj=gzip_file, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in bundle_files().items():
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), 0o644, 0
            archive.addfile(entry, io.BytesIO(content))
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest())
