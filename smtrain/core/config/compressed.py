"""Recognise a compressed file whose first bytes differ from its name, or that cannot be
decompressed here.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from smtrain.core.config.textfiles import COMPRESSIONS, compression

HEAD = 18
"""Bytes from the beginning of a file that `compressed_fault` reads: the longest header of a frame
of zstd.
"""
MAGIC = {
    "gzip": b"\x1f\x8b",
    "bz2": b"BZh",
    "xz": b"\xfd7zXZ",
    "zstd": b"\x28\xb5\x2f\xfd",
    "lz4": b"\x04\x22\x4d\x18",
}
LARGEST_WINDOW = 128 << 20
"""Bytes. ZSTD_WINDOWLOG_LIMIT_DEFAULT of zstd.h: a decoder refuses a larger window unless it is
told to take it, and Arrow has no option for that.
"""
# after a byte of 0x50 to 0x5f: a skippable frame of zstd or lz4, as pzstd writes
_SKIPPABLE_FRAME = b"\x2a\x4d\x18"


def compressed_fault(name: str, head: bytes) -> str | None:
    """The fault of a file whose ending names a compression, with the remedy; None if its first
    `HEAD` bytes fit.
    """
    expected_kind = compression(name)
    if expected_kind not in MAGIC or not head or head[1:4] == _SKIPPABLE_FRAME:
        return None
    bare = PurePosixPath(name).with_suffix("").name
    if not head.startswith(MAGIC[expected_kind]):
        actual_kind = next((kind for kind, mark in MAGIC.items() if head.startswith(mark)), None)
        if actual_kind:
            ending = next(ending for ending, kind in COMPRESSIONS.items() if kind == actual_kind)
            return f"is compressed by {actual_kind}, not by {expected_kind}; name it {bare}{ending}"
        if not head.strip(b"\0"):
            return (
                "begins with zero bytes: its download or copy did not end; copy the original again"
            )
        return (
            f"is not compressed by {expected_kind}, by its first bytes; if it is plain, name it"
            f" {bare}, else write it again"
        )
    if expected_kind == "zstd" and (window := window_of(head)) > LARGEST_WINDOW:
        return (
            f"is compressed with a window of {window >> 20:,} MiB, and at most"
            f" {LARGEST_WINDOW >> 20} MiB are read; write it again without --long: `zstd -dc"
            " --long=31 FILE | zstd -o NEW`"
        )
    return None


def window_of(head: bytes) -> int:
    """Bytes of the window that the first frame of zstd needs (RFC 8878, section 3.1.1.1); 0 if it
    is not known.
    """
    descriptor, header_fields = head[4:5], head[5:]
    if not descriptor or not header_fields:
        return 0
    single, dictionary, size = (
        descriptor[0] >> 5 & 1,
        (0, 1, 2, 4)[descriptor[0] & 3],
        descriptor[0] >> 6,
    )
    if not single:
        exponent, mantissa = header_fields[0] >> 3, header_fields[0] & 7
        base = 1 << (10 + exponent)
        return base + base // 8 * mantissa
    count = (1, 2, 4, 8)[size]  # the window is the content
    return int.from_bytes(header_fields[dictionary : dictionary + count], "little") + (
        256 if count == 2 else 0
    )
