"""A digest inside a JSON record, so that each reader notices a changed byte."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

DIGEST = "digest"
"""Key of the SHA-256 of all other keys."""


def digest_of(content: Mapping[str, Any]) -> str:
    """The SHA-256 (hex) of a record's JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The record, as JSON will give it back, with its digest."""
    plain = json.loads(json.dumps(content))  # keys become texts, which are sorted otherwise than numbers
    return {**plain, DIGEST: digest_of(plain)}


def verified(record: dict[str, Any]) -> dict[str, Any]:
    """The record without its digest, which earlier releases did not write. Raises ValueError if it differs."""
    content = {key: value for key, value in record.items() if key != DIGEST}
    if DIGEST in record and record[DIGEST] != digest_of(content):
        raise ValueError("it is not what was written, by its digest")
    return content
