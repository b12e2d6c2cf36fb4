"""Local copies of prefixes in an object store, kept between commands and never mixed with other
content.

The folder of a copy is named by the store, the prefix and a digest of its listing (keys, sizes,
ETags). If the prefix gets other files, a command sees another folder, in which files that did not
change are linked. A copy that no process reads any more is removed when a newer one is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import NamedTuple

from smtrain.client.backends.base import Backend
from smtrain.client.jobs.results import md5_of
from smtrain.core.errors import JobError
from smtrain.core.files import home, read_object
from smtrain.core.protocol.uris import split_uri

_LISTING = "listing.json"
_FILES = "files"
_in_use: dict[Path, int] = {}
"""Descriptors of the locks of the copies that this process reads, until it ends."""


class StoredFile(NamedTuple):
    """The size in bytes and the ETag of an object."""

    size: int
    etag: str


class StoreCopy:
    """A folder of this machine with the objects below a prefix, as they were when the prefix was
    listed.

    Reads the listing at once. Raises `JobError` for a key that leads out of the folder.
    """

    def __init__(self, store: Backend, uri: str) -> None:
        self.store, self.uri = store, f"{uri.rstrip('/')}/"
        self.files = {file: entry for file, entry in _list_files(store, self.uri).items() if file}
        """All objects, by their paths below the prefix."""
        self._wanted: Callable[[str], bool] = lambda _: True
        prefix = hashlib.sha256(f"{store.name} {self.uri}".encode()).hexdigest()[:16]
        listing = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:16]
        self._copies = home() / "models" / prefix
        self._place = self._copies / listing
        self.folder = self._place / _FILES
        """The copied files, at their paths below the prefix."""
        for file in self.files:
            if not (self.folder / file).resolve().is_relative_to(self.folder.resolve()):
                raise JobError(f"{self.uri}{file}: points outside {self.folder}; not downloaded")

    def restrict_to(self, is_wanted: Callable[[str], bool]) -> StoreCopy:
        """The same copy, of which `fetch` takes the files whose path below the prefix
        `is_wanted` accepts.
        """
        restricted_copy = copy(self)
        restricted_copy._wanted = is_wanted
        return restricted_copy

    @property
    def missing_bytes(self) -> int:
        """Bytes that `fetch` would copy."""
        return sum(
            self.files[file].size for file in self._wanted_files() if not self._is_here(file)
        )

    def fetch(self) -> Path:
        """Copy the wanted files that are not here yet; returns the folder.

        Raises `JobError` if there are no files, or if they change meanwhile.
        """
        wanted_files = self._wanted_files()
        if not wanted_files:
            raise JobError(f"{self.uri} is empty; there is nothing to download")
        for file in wanted_files:
            self.fetch_file(file)
        current = _list_files(self.store, self.uri)
        if any(current.get(file) != self.files[file] for file in wanted_files):
            raise self._changed_error()
        self._remove_unused_copies()
        return self.folder

    def fetch_file(self, file: str) -> Path:
        """Copy one file unless it is here.

        Raises `JobError` if it has changed since the prefix was listed.
        """
        path, entry = self.folder / file, self.files[file]
        self._use()
        if self._is_here(file):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            if not self._link_from_older(file, part):
                bucket, prefix = split_uri(self.uri)
                self.store.fetch(bucket, prefix + file, part)
                self._require_unchanged(file, part, entry)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return path

    def _wanted_files(self) -> list[str]:
        return [file for file in self.files if self._wanted(file)]

    def _is_here(self, file: str) -> bool:
        with contextlib.suppress(OSError):
            return (self.folder / file).stat().st_size == self.files[file].size
        return False

    def _require_unchanged(self, file: str, part: Path, entry: StoredFile) -> None:
        """Compare the copy with the ETag if it is its MD5 (no parts, no KMS key), else list the
        object again.
        """
        if part.stat().st_size != entry.size:
            raise self._changed_error()
        is_md5 = len(entry.etag) == 32 and md5_of(part) == entry.etag.lower()
        if not is_md5 and _list_files(self.store, self.uri + file).get("") != entry:
            raise self._changed_error()

    def _changed_error(self) -> JobError:
        return JobError(
            f"{self.uri} changed while it was being copied; run the command again when it is"
            " complete"
        )

    def _link_from_older(self, file: str, part: Path) -> bool:
        """Take the file from another copy of this prefix, if it is the same object."""
        for place in self._copies.iterdir():
            if place == self._place or _read_listing(place).get(file) != list(self.files[file]):
                continue
            older = place / _FILES / file
            with contextlib.suppress(OSError):
                if older.stat().st_size == self.files[file].size:
                    os.link(older, part)
                    return True
        return False

    def _use(self) -> None:
        """Keep this copy from being removed while this process lives."""
        if self._place in _in_use:
            return
        _in_use[self._place] = _lock_shared(self.folder, self._place / "lock")
        part = self._place / f".{_LISTING}.{os.getpid()}.part"
        part.write_text(json.dumps(self.files), "utf-8")
        part.replace(self._place / _LISTING)

    def _remove_unused_copies(self) -> None:
        """Remove other copies of this prefix that no process reads, and those of earlier
        releases.
        """
        for place in list(self._copies.iterdir()):
            if place == self._place or place in _in_use:
                continue
            with contextlib.suppress(OSError):
                if not (place / _LISTING).exists():
                    shutil.rmtree(place) if place.is_dir() else place.unlink()
                    continue
                with (place / "lock").open("ab") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(place)


def _lock_shared(folder: Path, path: Path) -> int:
    """Lock a copy's folder against removal; another process may have removed it a moment before."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
            os.close(lock)


def _list_files(store: Backend, uri: str) -> dict[str, StoredFile]:
    """The objects below a prefix by their paths; the object of exactly this name is the empty
    path.
    """
    _, prefix = split_uri(uri)
    entries = {
        item["Key"][len(prefix) :]: StoredFile(
            int(item["Size"]), str(item.get("ETag", "")).strip('"')
        )
        for item in store.listing(uri)
    }
    return {
        file: entry for file, entry in entries.items() if not file.endswith("/")
    }  # consoles make empty folders


def _read_listing(place: Path) -> dict[str, list[object]]:
    with contextlib.suppress(OSError, ValueError):
        listing = read_object(place / _LISTING)
        return listing if isinstance(listing, dict) else {}
    return {}
