"""List S3 prefixes, and upload files: large ones in parts that a later call resumes, each checked
by its SHA-256.

A file's name in S3 contains the hash of its content, so parts of an earlier call for the same name
belong to the same file; they are compared with the file all the same. The file is hashed again
while it is sent: a file that was edited since its name was made is refused, and nothing of it
stays.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import Body, size_of
from smtrain.client.backends.checksums import checksum_of, etag_of
from smtrain.client.backends.sagemaker.calls import PERSIST_S
from smtrain.client.backends.sagemaker.clients import Clients
from smtrain.client.backends.sagemaker.retry import Patience
from smtrain.core.errors import JobError
from smtrain.core.protocol.uris import objects_at, split_uri

PART = 32 << 20
"""Bytes of a part; smaller files are sent in one call.

S3 requires at least 5 MiB, and at most 10,000 parts.
"""
SENDERS = 4
"""Parts sent at a time; as many are in memory, and one more."""
_MOST_PARTS = 10_000
_MIB = 1 << 20


def owner(target: Clients, bucket: str) -> dict[str, str]:
    """`ExpectedBucketOwner` if the account is known: on this machine, and for SageMaker's default
    bucket, whose name contains it and which another account could have created before.
    """
    if target.name == "local":
        from smtrain.plane.client import ACCOUNT

        return {"ExpectedBucketOwner": ACCOUNT}
    match = re.fullmatch(r"sagemaker-[a-z0-9-]+-(\d{12})", bucket)
    return {"ExpectedBucketOwner": match[1]} if match else {}


def send(target: Clients, bucket: str, key: str, body: Body, sha256: str | None = None) -> int:
    """Upload a file or bytes; returns the number of bytes that an earlier call had already sent.

    Raises `JobError` if the content does not have this `sha256` (hex).
    """
    place = {"Bucket": bucket, "Key": key, **owner(target, bucket)}
    size = size_of(body)
    if isinstance(body, bytes) or _part_of(size) is None:
        content = body if isinstance(body, bytes) else body.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise _file_changed_error(body)
        _persist(
            target.transfers.put_object,
            **place,
            Body=content,
            ChecksumSHA256=_base64_sha256(content),
        )
        return 0
    return _Parts(target, place, body, size, sha256).send()


def _part_of(size: int) -> int | None:
    """Bytes of a part of a file of this size; None if it is sent in one piece."""
    return None if size <= PART else max(PART, -(-size // _MOST_PARTS // _MIB) * _MIB)


def has_content(target: Clients, bucket: str, item: Mapping[str, Any], body: Body) -> bool:
    """Whether an object of a listing has the content of a file or bytes: by its ETag, else by its
    SHA-256.

    With SSE-KMS an ETag says nothing about the content, so S3 is asked for the checksum that came
    with the upload.
    """
    from botocore.exceptions import ClientError

    size = size_of(body)
    if item["Size"] != size:
        return False
    part = None if isinstance(body, bytes) else _part_of(size)
    if item["ETag"].strip('"') == etag_of(body, part):
        return True
    place = {"Bucket": bucket, "Key": item["Key"], **owner(target, bucket)}
    try:
        head = target.s3.head_object(**place, ChecksumMode="ENABLED")
    except ClientError:  # it may not be read here, so it is sent again
        return False
    return bool(head.get("ChecksumSHA256") == checksum_of(body, part))


def _persist(method: Any, stop_event: threading.Event | None = None, /, **arguments: Any) -> Any:
    """Make a call that outlasts the loss of the network for some minutes, until `stop_event`
    is set.
    """

    def pause(seconds: float) -> None:
        assert stop_event
        if stop_event.wait(seconds):
            raise JobError("the upload was stopped")

    patience = Patience(PERSIST_S) if stop_event is None else Patience(PERSIST_S, pause)
    return patience.call(method, **arguments)


def _base64_sha256(content: bytes) -> str:
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def _file_changed_error(body: Body) -> JobError:
    return JobError(
        f"{body!s}: was changed while it was being uploaded; start again when nothing writes to it"
    )


@dataclass
class _Parts:
    target: Clients
    place: dict[str, str]
    file: Path
    size: int
    sha256: str | None
    _stop_event: threading.Event = field(default_factory=threading.Event)

    def send(self) -> int:
        part = _part_of(self.size) or PART
        upload, remote_parts = self._find_unfinished(part)
        if upload is None:
            answer = _persist(
                self.target.s3.create_multipart_upload, **self.place, ChecksumAlgorithm="SHA256"
            )
            upload = str(answer["UploadId"])
        hasher, reused_bytes, completed_parts = hashlib.sha256(), 0, {}
        # An error or Ctrl-C leaves the parts that have arrived: the next call resumes with them.
        with ThreadPoolExecutor(SENDERS) as senders:
            sending: list[Future[dict[str, Any]]] = []
            try:
                for number, content in self._read(part):
                    hasher.update(content)
                    if entry := _matching_part(remote_parts.get(number), content):
                        completed_parts[number], reused_bytes = entry, reused_bytes + len(content)
                        continue
                    sending.append(senders.submit(self._send_part, upload, number, content))
                    if len(sending) >= SENDERS:
                        _take(sending.pop(0), completed_parts)
                for future in sending:
                    _take(future, completed_parts)
            except BaseException:
                self._stop_event.set()
                senders.shutdown(wait=False, cancel_futures=True)
                raise
        if self.sha256 is not None and hasher.hexdigest() != self.sha256:
            self._abort(upload)
            raise _file_changed_error(self.file)
        self._complete(upload, [completed_parts[number] for number in sorted(completed_parts)])
        return reused_bytes

    def _read(self, part: int) -> Iterator[tuple[int, bytes]]:
        with self.file.open("rb") as content:
            number = 0
            while piece := content.read(part):
                number += 1
                yield number, piece

    def _send_part(self, upload: str, number: int, content: bytes) -> dict[str, Any]:
        checksum = _base64_sha256(content)
        answer = _persist(
            self.target.transfers.upload_part,
            self._stop_event,
            **self.place,
            UploadId=upload,
            PartNumber=number,
            Body=content,
            ChecksumSHA256=checksum,
        )
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

    def _find_unfinished(self, part: int) -> tuple[str | None, dict[int, dict[str, Any]]]:
        """The newest unfinished upload of this key with parts of this size, and its parts; other
        uploads are aborted.

        None if there is no such upload, or if the bucket's uploads may not be listed.
        """
        from botocore.exceptions import ClientError

        s3, (bucket, key) = self.target.s3, (self.place["Bucket"], self.place["Key"])
        try:
            request = {"Bucket": bucket, "Prefix": key, **owner(self.target, bucket)}
            pages = s3.get_paginator("list_multipart_uploads").paginate(**request)
            uploads = [
                upload
                for page in pages
                for upload in page.get("Uploads", [])
                if upload["Key"] == key
            ]
            for upload in sorted(uploads, key=lambda upload: upload["Initiated"], reverse=True):
                parts = self._parts_of(str(upload["UploadId"]))
                if all(
                    item["Size"] == min(part, self.size - (n - 1) * part)
                    for n, item in parts.items()
                ):
                    return str(upload["UploadId"]), parts
                self._abort(str(upload["UploadId"]))
        except ClientError as error:
            if error.response["Error"].get("Code") not in ("AccessDenied", "403", "NoSuchUpload"):
                raise
        return None, {}

    def _parts_of(self, upload: str) -> dict[int, dict[str, Any]]:
        pages = self.target.s3.get_paginator("list_parts").paginate(**self.place, UploadId=upload)
        return {part["PartNumber"]: part for page in pages for part in page.get("Parts", [])}

    def _complete(self, upload: str, parts: list[dict[str, Any]]) -> None:
        from botocore.exceptions import ClientError

        s3 = self.target.transfers
        try:
            _persist(
                s3.complete_multipart_upload,
                **self.place,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except ClientError as error:
            if error.response["Error"].get("Code") != "NoSuchUpload":
                raise
            # A first call, whose answer was lost, has completed it, or another launch of the same
            # inputs.
            head = s3.head_object(**self.place)
            item = {"Key": self.place["Key"], "Size": head["ContentLength"], "ETag": head["ETag"]}
            if not has_content(self.target, self.place["Bucket"], item, self.file):
                raise

    def _abort(self, upload: str) -> None:
        from botocore.exceptions import ClientError

        with suppress(ClientError):
            self.target.s3.abort_multipart_upload(**self.place, UploadId=upload)


def _take(sending: Future[dict[str, Any]], completed_parts: dict[int, dict[str, Any]]) -> None:
    part = sending.result()
    completed_parts[part["PartNumber"]] = part


def _matching_part(remote_part: dict[str, Any] | None, content: bytes) -> dict[str, Any] | None:
    """The entry of a part that has arrived, if its content is the same: by SHA-256, or by MD5 if S3
    has only that.
    """
    if remote_part is None or remote_part["Size"] != len(content):
        return None
    checksum = _base64_sha256(content)
    if remote_checksum := remote_part.get("ChecksumSHA256"):
        is_same = remote_checksum == checksum
    else:
        is_same = (
            remote_part["ETag"].strip('"')
            == hashlib.md5(content, usedforsecurity=False).hexdigest()
        )
    return (
        {
            "PartNumber": remote_part["PartNumber"],
            "ETag": remote_part["ETag"],
            "ChecksumSHA256": checksum,
        }
        if is_same
        else None
    )


def list_objects(target: Clients, uri: str) -> list[dict[str, Any]]:
    """The objects under a prefix. Raises `JobError` if it may not be listed."""
    from botocore.exceptions import ClientError

    try:
        return list_prefix(target, uri)
    except ClientError as error:
        raise JobError(
            f"{uri} cannot be listed ({error.response['Error'].get('Code')}); check the URI and the"
            " permissions s3:ListBucket and s3:GetObject",
            code="aws.refused",
        ) from None


def list_prefix(target: Clients, uri: str) -> list[dict[str, Any]]:
    """The objects under a prefix. Raises botocore's `ClientError` if it may not be listed."""
    return list(
        objects_at(partial(target.s3.list_objects_v2, **owner(target, split_uri(uri)[0])), uri)
    )
