"""A folder that all machines of a preparation see: on a shared disk, or a prefix in S3.

A file appears whole under its name or not at all. Its content depends on the text and the settings
only, so when two machines write the same file, as after a machine was wrongly taken for lost, it
does not matter which comes last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError, first_line
from smtrain.core.files import write_atomically
from smtrain.worker.data.prepare.spread.checksummed_blocks import DamagedError, read_sealed
from smtrain.worker.object_store import (
    WAITS,
    StorageError,
    explain,
    is_absent,
    is_of_machine,
    is_of_store,
    open_file,
    retry,
)

_COPY = 8 << 20
_STREAMS = 16
_SCRATCH = ".scratch-"


class SharedPlace:
    """One such folder; `uri` is a path or an s3:// URI.

    Raises DataError for another URI, StorageError if it fails.
    """

    def __init__(self, uri: str) -> None:
        from pyarrow import fs

        self.uri = uri
        self.local = Path(uri) if "://" not in uri else None
        if self.local:
            self.local.mkdir(parents=True, exist_ok=True)
            return
        try:
            self._fs, path = retry(
                lambda: fs.FileSystem.from_uri(uri)
            )  # asks for the bucket's region
        except OSError as error:
            raise self._unavailable(error) from error
        except ValueError as error:
            raise DataError(
                f"{uri} cannot be used ({first_line(error)}); check the URI and the region."
            ) from None
        self._base = path.rstrip("/")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for files on their way; on a shared disk inside the place, so that they only
        move.
        """
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=self.local))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def put(self, path: Path, name: str) -> None:
        """Move a file of `scratch` to its name."""
        if self.local:
            path.replace(self.local / name)
            return
        with self._errors():
            retry(lambda: self._send(path, name))
        path.unlink()

    def _send(self, path: Path, name: str) -> None:
        with path.open("rb") as read, self._fs.open_output_stream(f"{self._base}/{name}") as out:
            while data := read.read(_COPY):
                out.write(data)
        self._require_size(name, path.stat().st_size)

    def _require_size(self, name: str, size: int) -> None:
        """Raise OSError if S3 does not have a file that it has said to have: its answer 200 may
        hold an error.
        """
        if self._fs.get_file_info(f"{self._base}/{name}").size != size:
            raise OSError(f"{name} was not stored completely")

    @contextmanager
    def writing(self, name: str) -> Iterator[Callable[[memoryview], object]]:
        """A function that appends to a file, which gets its name at the end; in S3 it is sent
        meanwhile.

        S3 may keep an unfinished file after an error, so that only a record written later tells
        which file is whole.
        """
        if self.local:
            with self.scratch() as folder:
                with (folder / name).open("wb") as file:
                    yield file.write
                (folder / name).replace(self.local / name)
            return
        sent_bytes = 0

        def append(data: memoryview) -> None:
            nonlocal sent_bytes
            sent_bytes += len(data)
            with self._errors():
                stream.write(data)

        with self._errors():
            stream = retry(lambda: self._fs.open_output_stream(f"{self._base}/{name}"))
        yield append
        with self._errors():
            # After a late answer the client completes the upload again, which S3 then does not know
            # any more.
            with suppress(OSError):
                stream.close()
            retry(lambda: self._require_size(name, sent_bytes), WAITS[:4])

    def write(self, name: str, content: bytes) -> None:
        if self.local:
            write_atomically(self.local / name, content, sync=False)
            return

        def send() -> None:
            with self._fs.open_output_stream(f"{self._base}/{name}") as out:
                out.write(content)
            self._require_size(name, len(content))

        with self._errors():
            retry(send)

    def read(self, name: str) -> bytes:
        """A whole file. Raises StorageError if it cannot be read."""
        with self.open(name) as file:
            return bytes(file.read())

    def fingerprint(self, name: str) -> dict[str, Any] | None:
        """Size and SHA-256 of a file; None if it does not exist."""
        file_hash, size = hashlib.sha256(), 0
        try:
            with self._open_file(name) as file:
                while block := file.read(_COPY):
                    file_hash.update(block)
                    size += len(block)
        except OSError as error:
            if is_absent(error):
                return None
            raise self._unavailable(error) from error
        return {"bytes": size, "sha256": file_hash.hexdigest()}

    def read_sealed(self, name: str, record: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start:stop of the content of a sealed file, which `record` says to be complete.

        Raises StorageError; if the file is damaged, it removes the record, so that the file is made
        again.
        """
        try:
            with self.open(name) as file:
                return read_sealed(file, start, stop)
        except DamagedError:
            raise self.damage_error(name, record) from None

    def damage_error(self, name: str, record: str) -> StorageError:
        """The error for a file that differs from the written one; removes its record, so that it is
        made again.
        """
        self.remove(record)
        error = StorageError(f"{name} in {self.uri} is damaged; run the same command again.")
        error.damaged = True
        return error

    def write_record(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file with a checksum."""
        text = json.dumps(content)
        self.write(name, f'{{"crc32": {zlib.crc32(text.encode())}, "record": {text}}}'.encode())

    def record(self, name: str) -> dict[str, Any] | None:
        """The content of `write_record`; None without one, or if it is damaged."""
        try:
            with self._open_file(name) as file:
                read = json.loads(bytes(file.read()))
            content: dict[str, Any] = read["record"]
            return content if read["crc32"] == zlib.crc32(json.dumps(content).encode()) else None
        except (ValueError, TypeError, KeyError):
            return None
        except OSError as error:
            if is_absent(error):
                return None
            raise self._unavailable(error) from error

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        """A seekable file for reading, whose errors while it is open are StorageError."""
        with self._errors(), self._open_file(name) as file:
            yield file

    def _open_file(self, name: str) -> Any:
        return (self.local / name).open("rb") if self.local else self._steady(name)

    def _steady(self, name: str) -> Any:
        return open_file(self._fs, f"{self._base}/{name}", f"{self.uri}/{name}")

    def names(self) -> list[str]:
        """The files, without those in scratch folders."""
        from pyarrow import fs

        if self.local:
            return [entry.name for entry in os.scandir(self.local) if entry.is_file()]
        with self._errors():
            infos = retry(
                lambda: self._fs.get_file_info(fs.FileSelector(self._base, allow_not_found=True))
            )
        return [info.base_name for info in infos if info.type == fs.FileType.File]

    def remove(self, *names: str) -> None:
        """Delete files that may be gone already."""
        if self.local:
            for name in names:
                (self.local / name).unlink(missing_ok=True)
            return
        with self._errors(), ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(lambda name: retry(lambda: self._delete(name)), names))

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.delete_file(f"{self._base}/{name}")

    def clear(self) -> None:
        """Delete everything; records first, so that none is left without its files."""
        names = self.names()
        self.remove(*(name for name in names if name.endswith(".json")))
        self.remove(*(name for name in names if not name.endswith(".json")))
        if self.local:
            shutil.rmtree(self.local, ignore_errors=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.local and not isinstance(error, FileNotFoundError) and not is_of_machine(error):
                raise  # a full disk, say, has its own sentence
            raise self._unavailable(error) from error

    def _unavailable(self, error: OSError) -> StorageError:
        reason = f" ({first_line(error)}); check that every one of them can read and write it"
        if is_of_store(error):
            reason = f": {explain(error)}"
        return StorageError(
            f"{self.uri}, which all machines of a preparation share, cannot be used{reason}, and"
            " run the same command again to resume."
        )


@lru_cache(maxsize=8)
def place(uri: str) -> SharedPlace:
    """The place, once per process."""
    return SharedPlace(uri)
