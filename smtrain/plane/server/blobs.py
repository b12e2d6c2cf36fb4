"""Object bodies as files: never changed after they are written, read in ranges without loading
them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from smtrain.plane.files import make_folder

CHUNK = 1 << 18
NAME = re.compile(r"[0-9a-f]{32}")


class Blob:
    """A range of a stored file as the body of an answer: sized, sliceable, iterated in chunks, then
    closed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, 0
        self._handle = open(path, "rb", buffering=0)  # noqa: SIM115
        self._length = os.fstat(self._handle.fileno()).st_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Blob:
        begin, end, _ = part.indices(self._length)
        piece = copy.copy(self)
        # A duplicate of the open file: a new version of the object may have removed its path by
        # now.
        piece._handle = os.fdopen(os.dup(self._handle.fileno()), "rb", buffering=0)
        piece.start, piece._length = self.start + begin, max(0, end - begin)
        return piece

    def __iter__(self) -> Iterator[bytes]:
        position, remaining_bytes = self.start, self._length
        while remaining_bytes:
            chunk = os.pread(self._handle.fileno(), min(CHUNK, remaining_bytes), position)
            if not chunk:
                raise OSError(f"{self.path} is shorter than its record says")
            yield chunk
            position, remaining_bytes = position + len(chunk), remaining_bytes - len(chunk)
        self.close()

    def close(self) -> None:
        self._handle.close()


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield a temporary file; rename it to `path` when it is complete, else remove it.

    `sweep` knows its name after a kill.

    No fsync: bodies must survive a kill of the server, not a loss of power, and every PUT would
    wait for it.
    """
    part = path.with_suffix(".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class BlobFolder:
    """The files of all object bodies. Files that no record names are removed at the next start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_folder(root)

    def path(self, name: str) -> Path:
        """The path of a body. Raises ValueError for an invalid name."""
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a body")
        return self.root / name[:2] / name

    def write(self, chunks: Iterable[bytes]) -> tuple[Path, str]:
        """Store the chunks; return the file and the MD5 (hex) of its content."""
        path, digest = self._new(), hashlib.md5(usedforsecurity=False)
        with _partial(path) as part, open(part, "wb", buffering=0) as handle:
            for chunk in chunks:
                view = memoryview(chunk)
                digest.update(view)
                while view:
                    view = view[handle.write(view) :]
        return path, digest.hexdigest()

    def join(self, parts: list[Path]) -> Path:
        """Store the concatenation of files."""
        path = self._new()
        with _partial(path) as part, open(part, "wb") as handle:
            for part_path in parts:
                with open(part_path, "rb") as source:
                    shutil.copyfileobj(source, handle, 1 << 20)
        return path

    def link(self, source: Path) -> Path:
        """Copy a body by a hard link, which is safe as bodies never change."""
        path = self._new()
        os.link(source, path)
        return path

    def has_bodies(self) -> bool:
        """Whether the folder has a body."""
        return any(NAME.fullmatch(file.name) for file in self.root.glob("??/*"))

    def sweep(self, used: set[str]) -> None:
        """Remove every body that `used` does not name."""
        for folder in self.root.iterdir():
            if not folder.is_dir():
                continue  # not a body: another program put it there
            for file in folder.iterdir():
                if file.name not in used and NAME.fullmatch(file.stem):
                    file.unlink(missing_ok=True)

    def _new(self) -> Path:
        path = self.path(uuid.uuid4().hex)
        make_folder(path.parent)
        return path
