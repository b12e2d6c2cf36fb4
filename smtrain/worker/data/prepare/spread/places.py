"""A folder that all machines of a preparation see: on a shared disk, or a prefix in S3.

A file appears whole under its name or not at all. Its content depends on the text and the settings only, so when two
machines write the same file, as after a machine was wrongly taken for lost, it does not matter which comes last.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError, first_line
from smtrain.core.files import write_atomically

_COPY = 8 << 20
_STREAMS = 16
_UPLOADS = 3
_COMPLETED = "NO_SUCH_UPLOAD"
"""The answer to a client that asks again to complete an upload, if the first answer was late."""
_SCRATCH = ".scratch-"


class SharedPlace:
    """One such folder; `uri` is a path or an s3:// URI. Raises DataError if it cannot be used."""

    def __init__(self, uri: str) -> None:
        from pyarrow import fs

        self.uri = uri
        self.local = Path(uri) if "://" not in uri else None
        if self.local:
            self.local.mkdir(parents=True, exist_ok=True)
            return
        try:
            self._fs, path = fs.FileSystem.from_uri(uri)
        except (OSError, ValueError) as error:
            raise DataError(f"{uri} cannot be used ({first_line(error)}); check the URI and the region.") from None
        self._base = path.rstrip("/")

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for files on their way; on a shared disk inside the place, so that they only move."""
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
            for left in reversed(range(_UPLOADS)):
                try:
                    with path.open("rb") as read, self._fs.open_output_stream(f"{self._base}/{name}") as out:
                        while data := read.read(_COPY):
                            out.write(data)
                    break
                except OSError as error:
                    if _COMPLETED not in str(error) or not left:
                        raise
        path.unlink()

    @contextmanager
    def writing(self, name: str) -> Iterator[Callable[[memoryview], object]]:
        """A function that appends to a file, which gets its name at the end; in S3 it is sent meanwhile.

        S3 may keep an unfinished file after an error, so that only a record that is written later says what is whole.
        """
        if self.local:
            with self.scratch() as folder:
                with (folder / name).open("wb") as file:
                    yield file.write
                (folder / name).replace(self.local / name)
            return
        written = 0

        def append(data: memoryview) -> None:
            nonlocal written
            written += len(data)
            with self._errors():
                stream.write(data)

        with self._errors():
            stream = self._fs.open_output_stream(f"{self._base}/{name}")
        yield append
        with self._errors():
            try:
                stream.close()
            except OSError as error:
                if _COMPLETED not in str(error) or self._fs.get_file_info(f"{self._base}/{name}").size != written:
                    raise

    def write(self, name: str, content: bytes) -> None:
        if self.local:
            write_atomically(self.local / name, content, sync=False)
            return
        with self._errors(), self._fs.open_output_stream(f"{self._base}/{name}") as out:
            out.write(content)

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file. Raises DataError if it cannot be read."""
        with self.open(name) as file, self._errors():
            file.seek(start)
            return bytes(file.read() if size is None else file.read(size))

    def record(self, name: str) -> dict[str, Any] | None:
        """The content of a JSON file; None without one."""
        try:
            content: dict[str, Any] = json.loads(self.read(name))
        except (DataError, ValueError):
            return None
        return content

    def open(self, name: str) -> Any:
        """A seekable file for reading. Raises DataError."""
        with self._errors():
            if self.local:
                return (self.local / name).open("rb")
            return self._fs.open_input_file(f"{self._base}/{name}")

    def names(self) -> list[str]:
        """The files, without those in scratch folders."""
        from pyarrow import fs

        if self.local:
            return [entry.name for entry in os.scandir(self.local) if entry.is_file()]
        with self._errors():
            infos = self._fs.get_file_info(fs.FileSelector(self._base, allow_not_found=True))
        return [info.base_name for info in infos if info.type == fs.FileType.File]

    def remove(self, *names: str) -> None:
        """Delete files that may be gone already."""
        if self.local:
            for name in names:
                (self.local / name).unlink(missing_ok=True)
            return
        with self._errors(), ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(lambda name: self._fs.delete_file(f"{self._base}/{name}"), names))

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
            if self.local and not isinstance(error, FileNotFoundError):
                raise  # a full disk, say, has its own sentence
            raise DataError(
                f"{self.uri}, which all machines of a preparation share, cannot be used ({first_line(error)}); check "
                "that every one of them can read and write it."
            ) from error


@lru_cache(maxsize=8)
def place(uri: str) -> SharedPlace:
    """The place, once per process."""
    return SharedPlace(uri)
