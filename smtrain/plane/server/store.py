"""S3 that survives a restart: moto's semantics, with bodies in files (`blobs`) and records in
SQLite (`index`).

`install` changes moto's FakeKey, FakeMultipart and S3Response in this process. Before a changing
request is answered, the records of the keys that it touched are written. Kept: buckets, their
versioning, objects with versions, delete markers, metadata, tags, ETags, checksums. Lost at a
restart: multipart uploads in progress, ACLs, bucket policies and other bucket settings.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import zlib
from base64 import b64encode
from contextlib import nullcontext
from hashlib import md5
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from moto import settings
from moto.s3 import exceptions, models
from moto.s3.responses import S3Response

from smtrain.plane.client import ACCOUNT
from smtrain.plane.server import disk_reserve
from smtrain.plane.server.artifacts import KEY_BYTES
from smtrain.plane.server.blobs import Blob, BlobFolder
from smtrain.plane.server.index import Adopted, ObjectIndex, open_index, restore


class _Request(threading.local):
    """The keys and bodies that this thread's request has touched."""

    def __init__(self) -> None:
        self.lazy = 0
        self.touched: set[tuple[str, str]] = set()
        self.dropped: list[Path] = []


_request = _Request()
_one_by_one = threading.RLock()
_state: Path
_blobs: BlobFolder
_index: ObjectIndex


def _backend() -> models.S3Backend:
    return models.s3_backends[ACCOUNT]["aws"]


def write_changes(bucket: str, key: str | None, *, is_deletion: bool = False) -> None:
    """Write a bucket (key None) or the keys that the request touched, then remove unused bodies.

    A request with `is_deletion` also works on a full disk.
    """
    backend = _backend()
    if key is not None:
        _request.touched.add((bucket, key))
    touched_keys, _request.touched = _request.touched, set()
    unused_bodies, _request.dropped = _request.dropped, []
    if touched_keys or unused_bodies:
        _index.put_keys(backend, touched_keys, unused_bodies, is_deletion=is_deletion)
    if key is None:
        stored_bucket = backend.buckets.get(bucket)
        record = (
            {
                "region": stored_bucket.region_name,
                "created": stored_bucket.creation_date.isoformat(),
                "versioning": stored_bucket.versioning_status,
            }
            if stored_bucket
            else None
        )
        _index.put_bucket(bucket, record)


def close() -> None:
    """Close the index; nothing may be stored afterwards."""
    _index.close()


def install(folder: Path) -> None:
    """Keep moto's S3 in `folder` and load its content."""
    global _blobs, _index, _state
    folder.mkdir(parents=True, exist_ok=True)
    _state, _index, _blobs = folder.parent, open_index(folder), BlobFolder(folder / "blobs")
    key: Any = models.FakeKey
    key.value = property(_read, _write)
    key.dispose = _dispose
    key.__del__ = lambda self: None
    models.FakeMultipart.complete = _complete  # type: ignore[method-assign]
    S3Response._handle_encoded_body = _unchunk_body  # type: ignore[assignment, method-assign]
    # moto keeps every instance for its own tests; a server that lives for days must not.
    model_class: Any
    for model_class in (models.FakeKey, models.FakeMultipart, models.FakeDeleteMarker):
        model_class.instances_tracked = _Nothing()
    _wrap(S3Response, "get_object", _with_blob_value)
    _wrap(models.S3Backend, "copy_object", _with_blob_value)
    _wrap(models.S3Backend, "upload_part_copy", _with_blob_value)
    _wrap(models.S3Backend, "put_object", _note_touched_key)
    _wrap(models.S3Backend, "delete_object", _note_touched_key)
    _wrap(S3Response, "key_response", _write_before_answer)
    _wrap(S3Response, "bucket_response", _write_before_answer)
    backend: Any = models.S3Backend
    backend.url_paths = property(_addresses(backend.url_paths))
    restore(_index, _blobs, _backend())


class _Nothing(list):  # type: ignore[type-arg]
    def append(self, _: Any) -> None:
        pass


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))


def _addresses(moto_property: Any) -> Any:
    """moto's URL patterns, changed so that a dot also matches a line break: a key may contain
    one.
    """

    def url_paths(self: Any) -> dict[str, Any]:
        return {
            re.sub(r"\.(?=[+*])", "[^\0]", pattern): handler
            for pattern, handler in moto_property.fget(self).items()
        }

    return url_paths


def _with_blob_value(method: Any) -> Any:
    """Let a key's value be a Blob, not bytes, within this method."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _request.lazy += 1
        try:
            return method(*args, **kwargs)
        finally:
            _request.lazy -= 1

    return run


def _note_touched_key(method: Any) -> Any:
    """Note the key that a backend method changes: put_object and delete_object(bucket, key,
    ...).
    """

    def run(self: Any, bucket_name: str, key_name: str, *args: Any, **kwargs: Any) -> Any:
        _request.touched.add((bucket_name, key_name))
        return method(self, bucket_name, key_name, *args, **kwargs)

    return run


def _write_before_answer(method: Any) -> Any:
    """Write the records of a changing request before it is answered; a full disk becomes an S3
    error.
    """

    def run(self: Any, request: Any, full_url: str, headers: Any) -> Any:
        # In WSGI each character of the path, /bucket/key, is one byte.
        name, _, key = request.environ.get("PATH_INFO", "").lstrip("/").partition("/")
        size, bucket = len(key), _backend().buckets.get(name)
        upload = request.args.get("uploadId")
        if (
            request.method == "POST" and upload and bucket and upload not in bucket.multiparts
        ):  # moto would fail
            body = (
                "<Error><Code>NoSuchUpload</Code><Message>The specified upload does not"
                " exist.</Message></Error>"
            )
            return 404, {"Content-Type": "application/xml"}, body
        if size > KEY_BYTES and request.method in ("PUT", "POST"):
            while request.stream.read(1 << 20):  # a client that still sends would get a broken pipe
                pass
            message = (
                f"the key has {size} bytes and may have {KEY_BYTES} bytes; choose a shorter one"
            )
            body = f"<Error><Code>KeyTooLongError</Code><Message>{message}</Message></Error>"
            return 400, {"Content-Type": "application/xml"}, body
        try:
            with _one_by_one if _is_conditional(request) else nullcontext():
                reply = method(self, request, full_url, headers)
            if request.method in ("PUT", "POST", "DELETE"):
                # moto has parsed the names by now, from virtual hosts and from paths.
                whole_bucket = method.__name__ == "bucket_response"
                is_deletion = request.method == "DELETE" or "delete" in request.args
                write_changes(
                    self.bucket_name,
                    None if whole_bucket else self.parse_key_name(),
                    is_deletion=is_deletion,
                )
        except (OSError, sqlite3.Error) as error:
            sentence = disk_reserve.sentence(error, _state)
            if sentence is None or isinstance(error, PermissionError):
                raise
            body = f"<Error><Code>InsufficientStorage</Code><Message>{escape(sentence)}</Message></Error>"
            return 507, {"Content-Type": "application/xml"}, body
        return reply

    return run


def _unchunk_body(_: Any, body: Any) -> bytes:
    """The content of a body in aws-chunked encoding; moto copies all that came before for every
    chunk.
    """
    stream = BytesIO(body) if isinstance(body, bytes) else body
    chunks: list[bytes] = []
    while stream and (size := int(stream.readline().strip() or b"0", 16)):
        chunks.append(stream.read(size))
        stream.readline()
    return b"".join(chunks)


def _is_conditional(request: Any) -> bool:
    """Whether it is a conditional write. moto checks, then writes: of two at once, one must be
    refused.
    """
    return request.method == "PUT" and (
        "If-Match" in request.headers or "If-None-Match" in request.headers
    )


def _read(self: Any) -> Any:
    blob = Blob(self.blob)
    if _request.lazy:
        return blob
    try:
        return b"".join(blob)
    finally:
        blob.close()


def _write(self: Any, value: Any) -> None:
    etag: str | None = None
    if isinstance(value, Adopted):
        self.blob = value.path
    elif isinstance(value, Blob) and value.start == 0 and len(value) == value.path.stat().st_size:
        self.blob = _blobs.link(value.path)
        if self._etag is None:
            etag = _digest(value)
    elif isinstance(value, Blob):
        self.blob, etag = _blobs.write(value)
    else:
        self.blob, etag = _blobs.write([value.encode() if isinstance(value, str) else value])
    if isinstance(value, Blob):
        value.close()
    self.contentsize = self.blob.stat().st_size
    self._etag = self._etag or etag


def _digest(blob: Blob) -> str:
    digest = md5(usedforsecurity=False)
    for chunk in blob:
        digest.update(chunk)
    return digest.hexdigest()


def _dispose(self: Any, garbage: bool = False) -> None:
    """Remove the body only when the index no longer names it, so that a kill in between loses
    nothing.
    """
    _request.dropped.append(self.blob)
    self.disposed = True


def _complete(
    self: models.FakeMultipart, body: Any
) -> tuple[Any, str, tuple[str, str, int] | None]:
    """Complete an upload as moto does, without the whole object in memory."""
    parts: list[Any] = []
    for number, etag in body:
        part: Any = self.parts.get(number)
        if part is None or part.etag.strip('"') != etag.strip('"'):
            raise exceptions.InvalidPart()
        if parts and parts[-1].contentsize < settings.S3_UPLOAD_PART_MIN_SIZE:
            raise exceptions.EntityTooSmall()
        parts.append(part)
    if not parts:
        raise exceptions.MalformedXML
    path = _blobs.join([part.blob for part in parts])
    digest = md5(b"".join(bytes.fromhex(part._etag) for part in parts), usedforsecurity=False)
    checksum = _checksum(self.metadata, path)
    for part in self.parts.values():
        part.dispose()
    self.parts = {}
    return Adopted(path), f"{digest.hexdigest()}-{len(parts)}", checksum


def _checksum(metadata: Any, path: Path) -> tuple[str, str, int] | None:
    """A whole-object CRC32 if requested; other kinds are left out rather than wrong."""
    if (metadata.get("x-amz-checksum-algorithm"), metadata.get("x-amz-checksum-type")) != (
        "CRC32",
        "FULL_OBJECT",
    ):
        return None
    crc = 0
    for chunk in Blob(path):
        crc = zlib.crc32(chunk, crc)
    return "FULL_OBJECT", b64encode(crc.to_bytes(4, "big")).decode(), 1
