"""Places that hold files: a folder of this machine, or a prefix in S3 (any URI that fsspec opens).

Ranges are read in place; nothing is copied first.
"""

from __future__ import annotations

import errno
import mmap
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from smtrain.core.errors import CheckpointError, first_line
from smtrain.core.extras import missing_module
from smtrain.core.files import parse_json
from smtrain.core.model.remedies import HEAD, misfit
from smtrain.worker.object_store import retry

T = TypeVar("T")
Bounds = Sequence[tuple[int, int]]
"""(start, stop) along every dimension."""
_MAX_MAPS = (
    128  # files mapped at a time: each takes a descriptor, and xser has a file for every tensor
)


class UnreachableError(CheckpointError):
    """A store fails, not the checkpoint in it: finished work is kept, and the same command
    resumes.
    """


def patient(call: Callable[[], T]) -> T:
    """Call a client of fsspec until the store answers, for about a minute.

    Raises the client's last error.
    """
    return retry(call, min_wait=_least_wait)


def _least_wait(error: Exception) -> float | None:
    """0 if another try may succeed. Clients of fsspec share no class for a lost network."""
    # Credentials that have expired stay so: a minute of tries would only hide the reason.
    if isinstance(error, (FileNotFoundError, PermissionError)) or "expired" in str(error).lower():
        return None
    if isinstance(error, OSError):
        return None if error.errno in (errno.ENOSPC, errno.EISDIR, errno.ENOTDIR) else 0.0
    # Classes of botocore and aiohttp, which are no OSError; by name, since both are optional.
    names = {error_class.__name__ for error_class in type(error).__mro__}
    return (
        0.0 if names & {"HTTPClientError", "ClientConnectionError", "ClientPayloadError"} else None
    )


class Place(Protocol):
    """A tree of files, known by their paths relative to its root."""

    def files(self) -> dict[str, int]:
        """Relative path -> size of all files below the root, as of the first call."""
        ...

    def stamp(self) -> list[list[Any]]:
        """[path, size, time or version] of every file; equal as long as nothing has changed."""
        ...

    def read(self, file: str, start: int, stop: int) -> memoryview:
        """Read bytes `start:stop` of a file.

        Raises CheckpointError if it has fewer, or cannot be read.
        """
        ...

    def subfolder(self, folder: str) -> Place: ...

    def path(self) -> Path | None:
        """The folder on this machine; None for a remote place."""
        ...


def is_uri(path: object) -> bool:
    return "://" in str(path)


def place(root: Place | Path | str) -> Place:
    """Make a place of a path or URI.

    Raises CheckpointError for a scheme whose client is not installed.
    """
    if isinstance(root, (str, Path)):
        return RemotePlace(str(root)) if is_uri(root) else LocalPlace(Path(root))
    return root


def filesystem(uri: str) -> tuple[Any, str]:
    """fsspec's file system of a URI, and the path in it."""
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(uri)
    except ImportError as error:
        reason = (
            missing_module("s3fs")
            if uri.startswith("s3://")
            else f"{error}; or give a folder or an s3:// URI"
        )
        raise CheckpointError(f"{uri} cannot be opened: {reason}") from None
    except ValueError:
        scheme = uri.partition("://")[0]
        raise CheckpointError(
            f"{uri}: weights are not read from {scheme}://; give a folder or an s3:// URI"
        ) from None
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

    def subfolder(self, folder: str) -> LocalPlace:
        return LocalPlace(self._root / folder)

    def files(self) -> dict[str, int]:
        if self._files is None:
            self._files = {str(path): size for path, size, _ in self.stamp()}
        return self._files

    def stamp(self) -> list[list[Any]]:
        out = []
        for path in sorted(self._root.rglob("*")):
            if path.is_file():
                file_stat = path.stat()
                out.append(
                    [
                        path.relative_to(self._root).as_posix(),
                        file_stat.st_size,
                        file_stat.st_mtime_ns,
                    ]
                )
        return out

    def read(self, file: str, start: int, stop: int) -> memoryview:
        try:
            view = memoryview(self._map(file))[start:stop] if stop > start else memoryview(b"")
        except PermissionError:
            raise CheckpointError(
                f"{self._root / file} cannot be read by this user; give the right to read it (chmod"
                " u+r)."
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self._root / file} cannot be read ({first_line(error)}); copy this file again.",
                code="checkpoint.damaged",
            ) from None
        if len(view) != stop - start:
            raise CheckpointError(
                f"{self._root / file} is cut short: it ends before byte {stop}; copy this file"
                " again.",
                code="checkpoint.damaged",
            )
        return view

    def _map(self, file: str) -> mmap.mmap:
        with self._lock:
            mapping = self._maps.pop(file, None)
            if mapping is None:
                with open(self._root / file, "rb") as raw:
                    mapping = _map(raw.fileno())
            self._maps[file] = mapping
            if len(self._maps) > _MAX_MAPS:
                self._maps.popitem(last=False)  # views of it keep it open
            return mapping


def _map(handle: int) -> mmap.mmap:
    """Map a file privately and writable, since torch warns of read-only memory; it is never written
    to.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
    # MAP_NORESERVE: else the kernel refuses a file larger than memory, as if all of it might be
    # written to
    flags = mmap.MAP_PRIVATE | (0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(handle, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


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

    def subfolder(self, folder: str) -> RemotePlace:
        return RemotePlace(f"{self._uri}/{folder}")

    def files(self) -> dict[str, int]:
        return {path: int(entry["size"]) for path, entry in self._list().items()}

    def stamp(self) -> list[list[Any]]:
        return [
            [path, int(entry["size"]), self.version(entry)] for path, entry in self._list().items()
        ]

    @staticmethod
    def version(entry: dict[str, Any]) -> str:
        """The version of an object: its ETag or its time."""
        return str(entry.get("ETag") or entry.get("LastModified")).strip('"')

    def read(self, file: str, start: int, stop: int) -> memoryview:
        # A range beyond the end gives fewer bytes, which `_cat` would take for a lost network.
        if stop > self.files().get(file, -1):
            raise CheckpointError(
                f"{self._uri}/{file} is cut short: it ends before byte {stop}; copy this file"
                " again.",
                code="checkpoint.damaged",
            )
        try:
            data = patient(lambda: self._cat(file, start, stop)) if stop > start else b""
        except Exception as error:  # each client has its own kinds
            raise self._read_error(f"{self._uri}/{file} cannot be read", error) from None
        # A writable copy: torch.from_numpy warns of read-only memory.
        return memoryview(bytearray(data))

    def _cat(self, file: str, start: int, stop: int) -> bytes:
        data: bytes = self._fs.cat_file(f"{self._prefix}/{file}", start=start, end=stop)
        if len(data) != stop - start:
            raise OSError(f"{len(data)} of {stop - start} bytes arrived")
        return data

    @staticmethod
    def _read_error(message: str, error: Exception) -> CheckpointError:
        if isinstance(error, FileNotFoundError):
            return CheckpointError(f"{message} ({first_line(error)}); check the URI.")
        return UnreachableError(
            f"{message} ({first_line(error)}); check the network and your permissions, and run the"
            " same command again."
        )

    def _find(self) -> dict[str, Any]:
        # fsspec keeps listings for all users of a file system in this process.
        self._fs.invalidate_cache()
        entries: dict[str, Any] = self._fs.find(self._prefix, detail=True)
        return entries

    def _list(self) -> dict[str, Any]:
        if self._listed is None:
            from smtrain.core.protocol.s3_probe import s3_outage  # loads http and ssl

            if reason := s3_outage(self._uri):
                raise CheckpointError(f"{self._uri} cannot be listed: {reason}.")
            try:
                objects = patient(self._find)
            except FileNotFoundError:
                # A prefix without objects does not exist for fsspec; an empty target is no error.
                objects = {}
            except Exception as error:
                raise self._read_error(f"{self._uri} cannot be listed", error) from None
            skip = len(self._prefix) + 1
            files = {key: entry for key, entry in objects.items() if entry.get("type") == "file"}
            self._listed = {
                key[skip:]: entry for key, entry in sorted(files.items()) if len(key) > skip
            }
        return self._listed


def refuse_changed(
    location: Place, expected_stamp: list[list[Any]], output_folders: Sequence[Path] = ()
) -> None:
    """Raise CheckpointError if the files of a place are no longer those of an earlier `stamp`.

    `output_folders`: the caller's own output, which is left out if it is inside the place.
    """
    current_place = (
        RemotePlace(str(location)) if isinstance(location, RemotePlace) else location
    )  # it lists only once
    root = location.path()
    inside = tuple(
        f"{folder.absolute().relative_to(root.absolute()).as_posix()}/"
        for folder in output_folders
        if root is not None and root.absolute() in folder.absolute().parents
    )

    def read_files(stamp: list[list[Any]]) -> list[list[Any]]:
        return [entry for entry in stamp if not entry[0].startswith(inside)]

    if read_files(current_place.stamp()) != read_files(expected_stamp):
        raise CheckpointError(
            f"{location} changed while it was being read; run the same command again."
        )


def read_text(location: Place, file: str, limit: int = 64 << 20) -> str:
    """Read a small file as text; raises CheckpointError if that fails."""
    size = location.files().get(file)
    if size is None:
        raise CheckpointError(f"{location} has no {file}.", code="checkpoint.missing")
    if size > limit:
        raise CheckpointError(
            f"{location}/{file} has {size} bytes, too many for its kind; copy this file again.",
            code="checkpoint.damaged",
        )
    try:
        return bytes(location.read(file, 0, size)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{location}/{file} is not text ({first_line(error)}); copy this file again.",
            code="checkpoint.damaged",
        ) from None


def strange(location: Place, file: str) -> CheckpointError | None:
    """The error for a file whose first bytes belie its name; None if nothing is strange."""
    size = location.files().get(file)
    if size is None:
        return None
    fault = misfit(file, bytes(location.read(file, 0, min(HEAD, size))), size)
    return None if fault is None else CheckpointError(f"{location}/{file} {fault}.")


def read_json(location: Place, file: str, remedy: str = "") -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises CheckpointError, which describes the fault, unless the file is JSON.

    `remedy` ends that sentence with another remedy.
    """
    if fault := strange(location, file):
        raise fault
    try:
        content = parse_json(read_text(location, file))
    except ValueError as error:
        raise CheckpointError(
            f"{location}/{file} is not JSON ({first_line(error)}); mend it there, or copy this file"
            f" again{remedy}.",
            code="checkpoint.damaged",
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{location}/{file} is not a JSON object; copy this file again{remedy}.",
            code="checkpoint.damaged",
        )
    return content


def refuse_overlap(source: Path | str, target: Path | str) -> None:
    """Raises CheckpointError if one folder is or contains the other: writing would change what is
    read.
    """
    if is_uri(source) != is_uri(target):
        return
    a, b = (
        # Links are resolved, or a link to the source would pass for another folder.
        Path(str(p).split("://", 1)[1]) if is_uri(p) else Path(p).resolve()
        for p in (source, target)
    )
    if a == b or a in b.parents or b in a.parents:
        raise CheckpointError(
            f"{target} and the source {source} overlap; write to a folder outside of it."
        )
