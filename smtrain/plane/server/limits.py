"""Limits of S3 and IAM that moto does not have, so that nothing is accepted here that AWS refuses.

Numbers and codes: "Amazon S3 multipart upload limits", "Working with object metadata", "Bucket
naming rules", the pages of PutObject and DeleteObjects (S3 User Guide and API Reference, 2026-11),
and "IAM and AWS STS quotas". `store.py` refuses keys that are too long.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode

Error = tuple[int, str, str]
"""HTTP status, code and message."""
METADATA_BYTES, DELETED_KEYS, PAGE_KEYS = 2048, 1000, 1000
BODY_BYTES = 5 << 30
"""The most that one PutObject or UploadPart sends."""
POLICY_CHARACTERS = {"PutRolePolicy": 10_240, "CreatePolicy": 6_144, "CreatePolicyVersion": 6_144}
"""Without white space; the policies in a role count together on AWS, here each by itself."""
_BUCKET = re.compile(r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--)(?!.*\.\.)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def s3_fault(environ: dict[str, Any], body: bytes) -> Error | None:
    """The error of S3 for a request to it that AWS refuses; None if AWS takes it.

    `body` is empty but for DeleteObjects.
    """
    method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
    bucket, _, key = path.lstrip("/").partition("/")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    if method == "PUT" and not key and not query and not _BUCKET.fullmatch(bucket):
        return 400, "InvalidBucketName", "The specified bucket is not valid."
    if method == "POST" and "delete" in query and body.count(b"<Key>") > DELETED_KEYS:
        return (
            400,
            "MalformedXML",
            "The XML you provided was not well-formed or did not validate against our schema",
        )
    body_size = (
        environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or "0"
    )
    if method == "PUT" and key and body_size.isdigit() and int(body_size) > BODY_BYTES:
        return 400, "EntityTooLarge", "Your proposed upload exceeds the maximum allowed size"
    prefix = "HTTP_X_AMZ_META_"
    metadata = [
        (name.removeprefix(prefix), value)
        for name, value in environ.items()
        if name.startswith(prefix)
    ]
    if sum(len(name) + len(value) for name, value in metadata) > METADATA_BYTES:
        return (
            400,
            "MetadataTooLarge",
            "Your metadata headers exceed the maximum allowed metadata size",
        )
    return None


def cap_page(environ: dict[str, Any]) -> None:
    """Ask for at most a page of keys, as S3 gives no more for a larger `max-keys`."""
    query = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    if any(
        name == "max-keys" and value.isdigit() and int(value) > PAGE_KEYS for name, value in query
    ):
        capped_query = [
            (name, str(PAGE_KEYS) if name == "max-keys" else value) for name, value in query
        ]
        environ["QUERY_STRING"] = urlencode(capped_query)


def iam_fault(operation: str, body: bytes) -> Error | None:
    """The error of IAM for a policy longer than AWS takes; None for any other call."""
    if (max_characters := POLICY_CHARACTERS.get(operation)) is None:
        return None
    policy = parse_qs(body.decode(errors="replace")).get("PolicyDocument", [""])[0]
    if len("".join(policy.split())) <= max_characters:
        return None
    return 409, "LimitExceeded", f"Cannot exceed quota for PolicySize: {max_characters}"
