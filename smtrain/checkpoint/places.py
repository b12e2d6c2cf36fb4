"""Places that hold files: a folder of this machine, or a prefix in S3 (any URI that fsspec opens). Ranges are read in
place; nothing is copied here first.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from smtrain.errors import CheckpointError

Bounds = Sequence[tuple[int, int]]
"""(start, stop) along every dimension."""
_MAPPED = 128  # files mapped at a time: each takes a descriptor, and xser has a file for every tensor
_SMALL = 1 << 14
_BLOCK = 1 << 20


class Place(Protocol):
    """A tree of files, known by their paths relative to its root."""

    def files(self) -> dict[str, int]:
        """Relative path -> bytes, of everything below the root as it was when first asked."""
        ...

    def stamp(self) -> list[list[Any]]:
        """[path, bytes, when or which version] of every file: equal as long as nothing was changed."""
        ...

    def read(self, file: str, start: int, stop: int) -> memoryview:
        """Bytes `start:stop` of a file. Raises CheckpointError where it has fewer, or cannot be read."""
        ...

    def below(self, folder: str) -> Place: ...

    def path(self) -> Path | None:
        """The folder on this machine; None where it is elsewhere."""
        ...


def is_uri(path: object) -> bool:
    return "://" in str(path)


def place(root: Place | Path | str) -> Place:
    """Raises CheckpointError for a scheme whose client is not installed."""
    if isinstance(root, (str, Path)):
        return RemotePlace(str(root)) if is_uri(root) else LocalPlace(Path(root))
    return root


def filesystem(uri: str) -> tuple[Any, str]:
    """fsspec's file system of a URI, and the path in it."""
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{uri} cannot be opened ({error}); pip install s3fs for s3:// URIs.") from None
    return fs, path.rstrip("/")


class LocalPlace:
    """A folder. Ranges are views of mapped pages, which the kernel may drop: no memory of ours."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._maps: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._files: dict[str, int] | None = None

    def __str__(self) -> str:
        return str(self._root)

    def path(self) -> Path:
        return self._root

    def below(self, folder: str) -> LocalPlace:
        return LocalPlace(self._root / folder)

    def files(self) -> dict[str, int]:
        if self._files is None:
            self._files = {str(path): size for path, size, _ in self.stamp()}
        return self._files

    def stamp(self) -> list[list[Any]]:
        out = []
        for path in sorted(self._root.rglob("*")):
            if path.is_file():
                about = path.stat()
                out.append([path.relative_to(self._root).as_posix(), about.st_size, about.st_mtime_ns])
        return out

    def read(self, file: str, start: int, stop: int) -> memoryview:
        try:
            if stop - start <= _SMALL:
                with open(self._root / file, "rb", buffering=0) as raw:
                    data = os.pread(raw.fileno(), stop - start, start)
                view = memoryview(bytearray(data))
            else:
                view = memoryview(self._map(file))[start:stop]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._root / file} cannot be read ({error}); fetch it again.") from None
        if len(view) != stop - start:
            raise CheckpointError(f"{self._root / file} is cut short: it ends before byte {stop}; fetch it again.")
        return view

    def _map(self, file: str) -> mmap.mmap:
        with self._lock:
            found = self._maps.pop(file, None)
            if found is None:
                with open(self._root / file, "rb") as raw:
                    # a private writable map, which nobody writes to: torch wants no read-only memory
                    found = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[file] = found
            if len(self._maps) > _MAPPED:
                self._maps.popitem(last=False)  # views of it keep it open
            return found


class RemotePlace:
    """A prefix in an object store, read by ranges."""

    def __init__(self, uri: str) -> None:
        self._uri = uri.rstrip("/")
        self._fs, self._prefix = filesystem(uri)
        self._listed: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self._uri

    def path(self) -> None:
        return None

    def below(self, folder: str) -> RemotePlace:
        return RemotePlace(f"{self._uri}/{folder}")

    def files(self) -> dict[str, int]:
        return {path: int(about["size"]) for path, about in self._list().items()}

    def stamp(self) -> list[list[Any]]:
        return [[path, int(a["size"]), str(a.get("ETag") or a.get("LastModified"))] for path, a in self._list().items()]

    def read(self, file: str, start: int, stop: int) -> memoryview:
        if stop > self.files().get(file, -1):
            raise CheckpointError(f"{self._uri}/{file} is cut short: it ends before byte {stop}; fetch it again.")
        try:
            data = self._fs.cat_file(f"{self._prefix}/{file}", start=start, end=stop) if stop > start else b""
        except Exception as error:  # each client has kinds of its own
            raise CheckpointError(f"{self._uri}/{file} cannot be read ({error}); see to the access.") from None
        return memoryview(bytearray(data))

    def _list(self) -> dict[str, Any]:
        if self._listed is None:
            try:
                self._fs.invalidate_cache()
                found = self._fs.find(self._prefix, detail=True)
            except FileNotFoundError:
                found = {}
            except Exception as error:
                raise CheckpointError(f"{self._uri} cannot be listed ({error}); see to the access.") from None
            skip = len(self._prefix) + 1
            self._listed = {k[skip:]: v for k, v in sorted(found.items()) if v.get("type") == "file" and len(k) > skip}
        return self._listed


@dataclass(frozen=True)
class Slab:
    """A tensor where it lies in a file."""

    place: Place
    file: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    crc32: int | None = None
    """Of the bytes of its storage, where the file tells it."""

    @property
    def size(self) -> int:
        """Bytes of a contiguous copy."""
        return prod(self.shape) * self.dtype.itemsize

    def window(self, bounds: Bounds) -> torch.Tensor:
        """The part within `bounds`; of a local file, a view of its pages that nobody may write to."""
        shape = [b - a for a, b in bounds]
        if 0 in shape:
            return torch.empty(shape, dtype=self.dtype)
        low = sum(a * s for (a, _), s in zip(bounds, self.strides, strict=True))
        high = sum((b - 1) * s for (_, b), s in zip(bounds, self.strides, strict=True)) + 1
        n = self.dtype.itemsize
        data = self.place.read(self.file, self.offset + low * n, self.offset + high * n)
        return torch.frombuffer(data, dtype=self.dtype).as_strided(shape, self.strides)

    def whole(self) -> torch.Tensor:
        return self.window([(0, n) for n in self.shape])

    def with_crc32(self, crc32: int | None) -> Slab:
        return self if crc32 is None else replace(self, crc32=crc32)

    def check(self, name: str) -> None:
        """Raises CheckpointError where the bytes on this machine's disk are not those of `crc32`.

        An object store keeps checksums of its own, and reading everything twice is not cheap there.
        """
        if self.crc32 is None or self.place.path() is None:
            return
        crc = 0
        for start in range(0, self.size, _BLOCK):
            stop = min(start + _BLOCK, self.size)
            crc = zlib.crc32(self.place.read(self.file, self.offset + start, self.offset + stop), crc)
        if crc != self.crc32:
            raise CheckpointError(
                f"{self.place}/{self.file}: {name} is not what was written (its crc32 differs); fetch the file again."
            )


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def read_text(where: Place, file: str, limit: int = 64 << 20) -> str:
    """A small file as text; raises CheckpointError where it cannot be."""
    size = where.files().get(file)
    if size is None:
        raise CheckpointError(f"{where} has no {file}.")
    if size > limit:
        raise CheckpointError(f"{where}/{file} has {size} bytes, too many for what it should be; fetch it again.")
    try:
        return bytes(where.read(file, 0, size)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}/{file} is not text ({error}); fetch it again.") from None
