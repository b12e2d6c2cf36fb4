"""The records of S3 on disk: one SQLite file of buckets and object versions, written after every
change.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from moto.s3 import models

from smtrain.core.files import disk_number
from smtrain.plane.client import ACCOUNT
from smtrain.plane.files import make_folder, make_way, set_aside
from smtrain.plane.server import disk_reserve
from smtrain.plane.server.blobs import BlobFolder

# Attributes of a FakeKey in a record, next to name, body, times, metadata and tags.
VERSION_ATTRIBUTES = (
    "_etag",
    "contentsize",
    "_storage_class",
    "_version_id",
    "_is_versioned",
    "encryption",
    "kms_key_id",
    "bucket_key_enabled",
    "checksum_algorithm",
    "checksum_value",
    "checksum_type",
    "checksum_parts",
)
BUCKET = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,253}[a-zA-Z0-9]")
BUCKETS = "SELECT name, record FROM buckets"
OBJECTS = "SELECT bucket, key, record FROM objects"


class ObjectIndex:
    """One row per object version; `ordinal` keeps the order of versions of a key."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.db = sqlite3.connect(path, check_same_thread=False)
        self.db.text_factory = bytes  # so that one text outside UTF-8 does not spoil the query
        self.db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;CREATE TABLE IF NOT EXISTS buckets"
            " (name TEXT PRIMARY KEY, record TEXT NOT NULL);CREATE TABLE IF NOT EXISTS objects"
            " (bucket TEXT, key TEXT, ordinal INTEGER, record TEXT NOT NULL, PRIMARY KEY (bucket,"
            " key, ordinal));"
        )
        self._keys: set[tuple[str, str]] = set()
        self._bodies: list[Path] = []
        """Keys whose records are not written yet, and the bodies to remove afterwards."""

    def put_bucket(self, name: str, record: dict[str, Any] | None) -> None:
        """Write a bucket's record; None removes it with its objects."""

        def write() -> None:
            with self.db:
                self.db.execute("DELETE FROM buckets WHERE name = ?", (name,))
                if record is None:
                    self.db.execute("DELETE FROM objects WHERE bucket = ?", (name,))
                else:
                    self.db.execute("INSERT INTO buckets VALUES (?, ?)", (name, json.dumps(record)))

        with self.lock:
            disk_reserve.retry_without_reserve(write)

    def put_keys(
        self,
        backend: models.S3Backend,
        keys: set[tuple[str, str]],
        bodies: list[Path],
        *,
        is_deletion: bool,
    ) -> None:
        """Write the present state of these keys, then remove `bodies`, which no record names any
        more.

        The state is read under the lock, so the last writer is right. Keys that could not be
        written are retried with the next change. With `is_deletion` the bodies go first if
        the disk has no room for the record.
        """
        with self.lock:
            self._keys |= keys
            self._bodies += bodies
            try:
                disk_reserve.retry_without_reserve(lambda: self._write(backend))
            except sqlite3.Error as error:
                if not is_deletion or disk_number(error) is None:
                    raise
                self._remove()
                self._write(backend)
            self._keys = set()
            self._remove()

    def _write(self, backend: models.S3Backend) -> None:
        with self.db:
            for bucket, key in self._keys:
                self.db.execute("DELETE FROM objects WHERE bucket = ? AND key = ?", (bucket, key))
                if bucket not in backend.buckets:
                    continue
                versions = backend.buckets[bucket].keys.getlist(key, [])
                rows = [
                    (bucket, key, i, json.dumps(_record(backend, v)))
                    for i, v in enumerate(versions)
                ]
                self.db.executemany("INSERT INTO objects VALUES (?, ?, ?, ?)", rows)

    def _remove(self) -> None:
        while self._bodies:
            self._bodies[-1].unlink(missing_ok=True)
            self._bodies.pop()

    def close(self) -> None:
        """Fold the write-ahead log into the file, for good: the lock is not released."""
        self.lock.acquire()
        self.db.close()


def open_index(folder: Path) -> ObjectIndex:
    """Open the index of this folder; one that SQLite cannot read is set aside with all bodies, and
    a new one begun.
    """
    path = folder / "index.sqlite"
    for file in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        make_way(file)
    try:
        index = disk_reserve.retry_without_reserve(lambda: ObjectIndex(path))
        fault = index.db.execute("PRAGMA quick_check").fetchone()[0].decode(errors="replace")
        if fault == "ok":
            index.db.execute(OBJECTS + " LIMIT 1").fetchall()
            index.db.execute(BUCKETS + " LIMIT 1").fetchall()
            return index
        index.close()
    except (sqlite3.Error, ValueError, TypeError) as error:
        if disk_number(error) is not None:
            raise
        fault = str(error)
    aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
    folder.rename(aside)
    folder.mkdir()
    print(
        f"warning: {path} is damaged ({fault}); S3 starts empty, and all it held is in {aside}",
        flush=True,
    )
    return ObjectIndex(path)


def restore(index: ObjectIndex, blobs: BlobFolder, backend: models.S3Backend) -> None:
    """Load buckets and objects; a record that cannot be read or has lost its body is left out, with
    a warning.
    """
    used: set[str] = set()
    is_complete = True
    if not index.db.execute(OBJECTS + " LIMIT 1").fetchall() and blobs.has_bodies():
        # The index was lost. Set the bodies aside, or the sweep below would remove all of them.
        set_aside(blobs.root, "holds objects that no index names")
        make_folder(blobs.root)
    # An error leaves out only its own row.
    for row in index.db.execute(BUCKETS).fetchall():
        try:
            name, text = map(_text, row)
            if not BUCKET.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a bucket")
            record = json.loads(text)
            of_type(record, {"region": str, "created": str, "versioning": (str, type(None))})
            bucket = backend.create_bucket(name, record["region"])
            bucket.creation_date = datetime.datetime.fromisoformat(record["created"])
            bucket.versioning_status = record["versioning"]
        except Exception as error:
            print(
                f"warning: the record of bucket {_printable(row[0])} is damaged ({error!r}); it is"
                " left out",
                flush=True,
            )
    for row in index.db.execute(OBJECTS + " ORDER BY bucket, key, ordinal").fetchall():
        try:
            bucket_name, key, text = map(_text, row)
            used |= _restore_version(backend, blobs, bucket_name, key, json.loads(text))
        except Exception as error:
            is_complete = False
            reason = (
                f"its body {error.filename} is gone"
                if isinstance(error, FileNotFoundError)
                else repr(error)
            )
            _hide_older(backend, row)
            uri = "/".join(_printable(column) for column in row[:2])
            print(
                f"warning: s3://{uri} cannot be brought back ({reason}); it is left out", flush=True
            )
    if is_complete:  # else a body may belong to a record that could not be read
        blobs.sweep(used)


def _restore_version(
    backend: models.S3Backend, blobs: BlobFolder, bucket_name: str, key: str, record: dict[str, Any]
) -> set[str]:
    """Load one version; return the names of its bodies."""
    of_type(record, {"modified": str})
    store = backend.buckets[bucket_name].keys
    modified_at = datetime.datetime.fromisoformat(record["modified"])
    if modified_at.utcoffset():
        raise ValueError(f"its time {modified_at} is not of UTC, as ours are")
    used = set()
    if "marker" in record:
        of_type(record, {"marker": str})
        version: Any = models.FakeDeleteMarker(store.get(key))
        version._version_id = record["marker"]
    else:
        of_type(record, {"blob": str, "attributes": dict, "metadata": dict, "tags": dict})
        of_type(record["attributes"], {"contentsize": int, "_etag": str, "_storage_class": str})
        of_type(record["metadata"], dict.fromkeys(record["metadata"], str))
        of_type(record["tags"], dict.fromkeys(record["tags"], str))
        path = blobs.path(record["blob"])
        if not path.is_file() or path.stat().st_size != record["attributes"]["contentsize"]:
            raise ValueError(
                f"its body has {path.stat().st_size} bytes, not"
                f" {record['attributes']['contentsize']}"
            )
        adopted_body: Any = Adopted(path)
        version = models.FakeKey(
            key, adopted_body, ACCOUNT, backend.region_name, bucket_name=bucket_name, etag="known"
        )
        vars(version).update(
            {k: v for k, v in record["attributes"].items() if k in VERSION_ATTRIBUTES}
        )
        version.set_metadata(record["metadata"])
        if record["tags"]:
            backend.tagger.tag_resource(
                version.arn, [{"Key": k, "Value": v} for k, v in record["tags"].items()]
            )
        used.add(path.name)
    version.last_modified = modified_at
    store[key] = version
    return used


def _hide_older(backend: models.S3Backend, row: tuple[Any, ...]) -> None:
    """Put a delete marker in place of an excluded version, so that an older one does not
    become current.
    """
    with contextlib.suppress(Exception):
        store = backend.buckets[_text(row[0])].keys
        store[_text(row[1])] = models.FakeDeleteMarker(store[_text(row[1])])


def _text(column: object) -> str:
    """A column as text. Raises ValueError if it is not UTF-8 text."""
    if not isinstance(column, bytes):
        raise ValueError(f"{column!r} is no text")
    return column.decode()


def _printable(column: object) -> str:
    """A column as messages show it."""
    return column.decode(errors="backslashreplace") if isinstance(column, bytes) else repr(column)


def of_type(record: Any, types: dict[str, Any]) -> None:
    """Raise ValueError unless a record has members of these types."""
    if not isinstance(record, dict):
        raise ValueError("it is no object")
    for name, kind in types.items():
        if name not in record or not isinstance(record[name], kind):
            raise ValueError(f"its {name} is {record.get(name)!r:.60}")


class Adopted:
    """A body already in the blob folder."""

    def __init__(self, path: Path) -> None:
        self.path = path


def _record(backend: models.S3Backend, version: Any) -> dict[str, Any]:
    modified_at = version.last_modified.isoformat()
    if isinstance(version, models.FakeDeleteMarker):
        return {"marker": version.version_id, "modified": modified_at}
    return {
        "blob": version.blob.name,
        "modified": modified_at,
        "metadata": dict(version.metadata),
        "tags": backend.tagger.get_tag_dict_for_resource(version.arn),
        "attributes": {name: getattr(version, name) for name in VERSION_ATTRIBUTES},
    }
