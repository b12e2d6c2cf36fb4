"""The records of S3 on disk: one SQLite file with buckets and object versions, written after every change."""

from __future__ import annotations

import datetime
import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from moto.s3 import models

from smtrain.aws.local_plane import ACCOUNT
from smtrain.disk import disk_number
from smtrain.local import room
from smtrain.local.blobs import BlobFolder

# What a record holds of a FakeKey beside name, body, times, metadata and tags: its own attribute names.
KEPT = (
    "_etag", "contentsize", "_storage_class", "_version_id", "_is_versioned", "encryption", "kms_key_id",
    "bucket_key_enabled", "checksum_algorithm", "checksum_value", "checksum_type", "checksum_parts",
)  # fmt: skip


class ObjectIndex:
    """One row per object version; `ordinal` keeps the order of versions of a key."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.db = sqlite3.connect(path, check_same_thread=False)
        self.db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
            "CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, record TEXT NOT NULL);"
            "CREATE TABLE IF NOT EXISTS objects (bucket TEXT, key TEXT, ordinal INTEGER, record TEXT NOT NULL,"
            " PRIMARY KEY (bucket, key, ordinal));"
        )
        self._keys: set[tuple[str, str]] = set()
        self._bodies: list[Path] = []
        """What could not be written down yet, and the bodies that may go once it is."""

    def put_bucket(self, name: str, record: dict[str, Any] | None) -> None:
        """Write a bucket's record; None removes it with all it holds."""

        def write() -> None:
            with self.db:
                self.db.execute("DELETE FROM buckets WHERE name = ?", (name,))
                if record is None:
                    self.db.execute("DELETE FROM objects WHERE bucket = ?", (name,))
                else:
                    self.db.execute("INSERT INTO buckets VALUES (?, ?)", (name, json.dumps(record)))

        with self.lock:
            room.insist(write)

    def put_keys(
        self, backend: models.S3Backend, keys: set[tuple[str, str]], bodies: list[Path], *, gone: bool
    ) -> None:
        """Write the present state of these keys, then remove `bodies`, which no record names any more.

        The state is read under the lock, so the last writer is right. What could not be written is tried again with
        the next change; with `gone` (a deletion) the bodies go first where the disk has no room for the record.
        """
        with self.lock:
            self._keys |= keys
            self._bodies += bodies
            try:
                room.insist(lambda: self._write(backend))
            except sqlite3.Error as error:
                if not gone or disk_number(error) is None:
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
                rows = [(bucket, key, i, json.dumps(_record(backend, v))) for i, v in enumerate(versions)]
                self.db.executemany("INSERT INTO objects VALUES (?, ?, ?, ?)", rows)

    def _remove(self) -> None:
        while self._bodies:
            self._bodies[-1].unlink(missing_ok=True)
            self._bodies.pop()

    def close(self) -> None:
        """Fold the write-ahead log into the file; nothing may be stored afterwards."""
        self.lock.acquire()
        self.db.close()


def opened(folder: Path) -> ObjectIndex:
    """The index of this folder; one that SQLite cannot read is set aside together with all bodies, and said."""
    path = folder / "index.sqlite"
    try:
        found = room.insist(lambda: ObjectIndex(path))
        fault = found.db.execute("PRAGMA quick_check").fetchone()[0]
        if fault == "ok":
            return found
        found.close()
    except sqlite3.DatabaseError as error:
        if disk_number(error) is not None:
            raise
        fault = str(error)
    aside = folder.with_name(f"{folder.name}.damaged-{time.time_ns()}")
    folder.rename(aside)
    folder.mkdir()
    print(f"warning: {path} is damaged ({fault}); S3 begins anew, and all it held lies in {aside}", flush=True)
    return ObjectIndex(path)


def restore(index: ObjectIndex, blobs: BlobFolder, backend: models.S3Backend) -> None:
    """Bring back buckets and objects; a record that cannot be read or has lost its body is left out, and said."""
    used: set[str] = set()
    whole = True
    for name, text in index.db.execute("SELECT name, record FROM buckets").fetchall():
        try:
            record = json.loads(text)
            bucket = backend.create_bucket(name, record["region"])
            bucket.creation_date = datetime.datetime.fromisoformat(record["created"])
            bucket.versioning_status = record["versioning"]
        except (ValueError, KeyError, TypeError) as error:
            print(f"warning: the record of bucket {name} is damaged ({error!r}); it is left out", flush=True)
    rows = index.db.execute("SELECT bucket, key, record FROM objects ORDER BY bucket, key, ordinal").fetchall()
    for bucket_name, key, text in rows:
        try:
            used |= _restore_version(backend, blobs, bucket_name, key, json.loads(text))
        except (ValueError, KeyError, TypeError, OSError) as error:
            whole = False
            said = f"its body {error.filename} is gone" if isinstance(error, FileNotFoundError) else repr(error)
            print(f"warning: s3://{bucket_name}/{key} cannot be brought back ({said}); it is left out", flush=True)
    if whole:  # else a body may belong to what could not be read
        blobs.sweep(used)


def _restore_version(
    backend: models.S3Backend, blobs: BlobFolder, bucket_name: str, key: str, record: dict[str, Any]
) -> set[str]:
    """Bring back one version; gives the name of its body."""
    store = backend.buckets[bucket_name].keys
    modified = datetime.datetime.fromisoformat(record["modified"])
    used = set()
    if "marker" in record:
        version: Any = models.FakeDeleteMarker(store.get(key))
        version._version_id = record["marker"]
    else:
        path = blobs.path(record["blob"])
        adopted: Any = Adopted(path)
        version = models.FakeKey(key, adopted, ACCOUNT, backend.region_name, bucket_name=bucket_name, etag="known")
        vars(version).update(record["attributes"])
        version.set_metadata(record["metadata"])
        if record["tags"]:
            backend.tagger.tag_resource(version.arn, [{"Key": k, "Value": v} for k, v in record["tags"].items()])
        used.add(path.name)
    version.last_modified = modified
    store[key] = version
    return used


class Adopted:
    """A body that already lies in the blob folder."""

    def __init__(self, path: Path) -> None:
        self.path = path


def _record(backend: models.S3Backend, version: Any) -> dict[str, Any]:
    modified = version.last_modified.isoformat()
    if isinstance(version, models.FakeDeleteMarker):
        return {"marker": version.version_id, "modified": modified}
    return {
        "blob": version.blob.name,
        "modified": modified,
        "metadata": dict(version.metadata),
        "tags": backend.tagger.get_tag_dict_for_resource(version.arn),
        "attributes": {name: getattr(version, name) for name in KEPT},
    }
