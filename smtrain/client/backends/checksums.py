"""Digests of local files in the forms that object stores give them, to compare a file with its copy
in a store.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

from smtrain.client.backends.base import Body

_BLOCK = 1 << 20


def blocks_of(body: Body, size: int = _BLOCK) -> Iterator[bytes]:
    """The content in blocks of `size` bytes; the last one may be shorter."""
    if isinstance(body, bytes):
        yield from (body[start : start + size] for start in range(0, len(body), size))
        return
    with body.open("rb") as content:
        while block := content.read(size):
            yield block


def sha256_of(body: Body) -> str:
    """SHA-256 in hex."""
    hasher = hashlib.sha256()
    for block in blocks_of(body):
        hasher.update(block)
    return hasher.hexdigest()


def etag_of(body: Body, part: int | None) -> str:
    """S3's ETag without SSE-KMS: the MD5 in hex, and `MD5 of the parts' MD5s-number` of an
    object sent in parts.

    Args:
        body: A file that nothing writes to, or bytes.
        part: Bytes of a part; None if the object was sent in one piece.
    """
    digest, parts = _digest_of(body, part, "md5")
    return f"{digest.hex()}-{parts}" if parts else digest.hex()


def checksum_of(body: Body, part: int | None) -> str:
    """S3's ChecksumSHA256: base64, and of an object sent in parts the SHA-256 of their SHA-256s
    with their number.
    """
    digest, parts = _digest_of(body, part, "sha256")
    base64_digest = base64.b64encode(digest).decode()
    return f"{base64_digest}-{parts}" if parts else base64_digest


def _digest_of(body: Body, part: int | None, algorithm: str) -> tuple[bytes, int]:
    if isinstance(body, bytes):
        return _compute_digest(body, part, algorithm)
    stat = body.stat()
    return _cached_digest(body, part, algorithm, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1 << 16)  # several stages of a run read the same files
def _cached_digest(
    body: Path, part: int | None, algorithm: str, _stamp: tuple[int, int, int]
) -> tuple[bytes, int]:
    return _compute_digest(body, part, algorithm)


def _compute_digest(body: Body, part: int | None, algorithm: str) -> tuple[bytes, int]:
    """A digest, and the number of parts (0 if the object is in one piece)."""
    new = partial(hashlib.new, algorithm, usedforsecurity=False)

    hasher = new()
    if part is None:
        for block in blocks_of(body):
            hasher.update(block)
        return hasher.digest(), 0
    assert part % _BLOCK == 0, part
    digests: list[bytes] = []
    current, part_bytes = new(), 0
    for block in blocks_of(body):
        current.update(block)
        part_bytes += len(block)
        if part_bytes == part:
            digests.append(current.digest())
            current, part_bytes = new(), 0
    if part_bytes:
        digests.append(current.digest())
    hasher.update(b"".join(digests))
    return hasher.digest(), len(digests)
