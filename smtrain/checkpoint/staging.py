"""A folder of files that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smtrain.checkpoint.manifest import sync_folder
from smtrain.errors import CheckpointError


@contextmanager
def whole_folder(target: Path, marker: str, replaces: tuple[str, ...] = ()) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends well; else `target` stays as it was.

    A target that does not exist yet appears by one rename. Into one that exists (it may be a mount, as /opt/ml/model
    is) the files are moved one by one, `marker` last and the old one taken away first, so that readers who ask for the
    marker never meet a mixture; of what was there, only files that match the patterns `replaces` go. Raises
    CheckpointError where the target is a file.
    """
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; give a folder to write to.")
    exists = target.is_dir()
    staging = target / ".partial" if exists else target.parent / f".{target.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed
    staging.mkdir(parents=True)
    try:
        yield staging
        files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
        for file in files:
            _sync(staging / file)
        if not exists:
            for folder in {(staging / file).parent for file in files}:
                sync_folder(folder)
            os.rename(staging, target)
            sync_folder(target.parent)
            return
        (target / marker).unlink(missing_ok=True)
        for pattern in replaces:
            for path in target.glob(pattern):
                path.unlink()
        for file in sorted(files, key=lambda file: file == Path(marker)):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / file, target / file)
            sync_folder((target / file).parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def refuse_overlap(source: Path, target: Path) -> None:
    """Raises CheckpointError where one folder is, or lies in, the other: writing would change what is read."""
    a, b = source.resolve(), target.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise CheckpointError(f"{target} and the source {source} overlap; write to a folder outside of it.")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
