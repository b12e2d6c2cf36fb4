"""Digests of JSON: of a value, and inside a record, so that each reader notices a changed byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"
"""Key of the SHA-256 of all other keys."""


def digest(value: Any) -> str:
    """The SHA-256 (hex) of a JSON value in its shortest form: keys in order, no spaces."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def digest_of(content: Mapping[str, Any]) -> str:
    """The SHA-256 (hex) of a record's JSON as Python writes it by default, with spaces: files have
    it.
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The record, as JSON will give it back, with its digest."""
    plain = json.loads(
        json.dumps(content)
    )  # keys become texts, which are sorted otherwise than numbers
    return {**plain, DIGEST: digest_of(plain)}


def verify_record(record: dict[str, Any]) -> dict[str, Any]:
    """The record without its digest, which earlier releases did not write.

    Raises ValueError if it differs.
    """
    content = {key: value for key, value in record.items() if key != DIGEST}
    if DIGEST in record and record[DIGEST] != digest_of(content):
        raise ValueError("it was changed or damaged after it was written, as its digest says")
    return content
