"""Object bodies as files: written beside and renamed, never changed afterwards, read in ranges without loading them."""

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
    """A range of a stored file, as the body of an answer: sized, sliceable, iterated in chunks, then closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, 0
        self._handle = open(path, "rb", buffering=0)  # noqa: SIM115
        self._length = os.fstat(self._handle.fileno()).st_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> Blob:
        begin, end, _ = part.indices(self._length)
        piece = copy.copy(self)
        # Of the open file, not of its path, which a new version of the object may have taken away by now.
        piece._handle = os.fdopen(os.dup(self._handle.fileno()), "rb", buffering=0)
        piece.start, piece._length = self.start + begin, max(0, end - begin)
        return piece

    def __iter__(self) -> Iterator[bytes]:
        position, left = self.start, self._length
        while left:
            chunk = os.pread(self._handle.fileno(), min(CHUNK, left), position)
            if not chunk:
                raise OSError(f"{self.path} is shorter than its record says")
            yield chunk
            position, left = position + len(chunk), left - len(chunk)
        self.close()

    def close(self) -> None:
        self._handle.close()


@contextlib.contextmanager
def _whole_or_gone(beside: Path, path: Path) -> Iterator[None]:
    """Rename what was written beside; a file that could not be written whole leaves the disk at once."""
    try:
        yield
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


class BlobFolder:
    """The files of all object bodies. A file that no record names is removed at the next start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        make_folder(root)

    def path(self, name: str) -> Path:
        """The path of a body. Raises ValueError for a name that is none of ours."""
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a body")
        return self.root / name[:2] / name

    def write(self, chunks: Iterable[bytes]) -> tuple[Path, str]:
        """Store the chunks; gives the file and the MD5 (hex) of what was written."""
        path = self._new()
        beside = path.with_suffix(".part")
        digest = hashlib.md5(usedforsecurity=False)
        # No fsync: what must survive is a kill of the server, not a loss of power, and every PUT would wait for it.
        with _whole_or_gone(beside, path), open(beside, "wb", buffering=0) as handle:
            for chunk in chunks:
                view = memoryview(chunk)
                digest.update(view)
                while view:
                    view = view[handle.write(view) :]
        return path, digest.hexdigest()

    def join(self, parts: list[Path]) -> Path:
        """Store the concatenation of files."""
        path = self._new()
        beside = path.with_suffix(".part")
        with _whole_or_gone(beside, path), open(beside, "wb") as handle:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, handle, 1 << 20)
        return path

    def link(self, source: Path) -> Path:
        """A second name for a body: a copy that costs nothing, since bodies never change."""
        path = self._new()
        os.link(source, path)
        return path

    def any(self) -> bool:
        """Whether there is a body."""
        return any(NAME.fullmatch(file.name) for file in self.root.glob("??/*"))

    def sweep(self, used: set[str]) -> None:
        """Remove every file that is not named in `used`."""
        for folder in self.root.iterdir():
            if not folder.is_dir():
                continue  # no body: something else has put it there
            for file in folder.iterdir():
                if file.name not in used and NAME.fullmatch(file.stem):
                    file.unlink(missing_ok=True)

    def _new(self) -> Path:
        path = self.path(uuid.uuid4().hex)
        make_folder(path.parent)
        return path
