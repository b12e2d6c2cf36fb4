"""Compressed files whose first bytes differ from their name, and windows of zstd."""

from __future__ import annotations

import pytest

from smtrain.core.config.compressed import LARGEST_WINDOW, compressed_fault, window_of

ZSTD = b"\x28\xb5\x2f\xfd"


@pytest.mark.parametrize(
    ("head", "window"),
    [
        ("04a8", 2 << 30),  # --ultra --long=31, from a pipe
        ("0488", 128 << 20),  # --long=27
        ("0489", 144 << 20),
        ("2405", 5),  # one segment: its size
        ("64e803", 1000 + 256),
        ("a500000000", 0),  # a dictionary of one byte before the size
        ("a507ffffff0f", 0x0FFFFFFF),
        ("e40000000001000000", 1 << 32),
        ("04", 0),
        ("", 0),
    ],
)
def test_the_window_of_a_frame(head: str, window: int) -> None:
    made = ZSTD + bytes.fromhex(head)
    assert window_of(made) == window
    assert (compressed_fault("a.zst", made) is not None) == (window > LARGEST_WINDOW)


@pytest.mark.parametrize(
    ("name", "head", "fault"),
    [
        ("a.jsonl.gz", b"\x1f\x8b\x08", None),
        ("a.jsonl.zst", b"\x50\x2a\x4d\x18\x04", None),  # pzstd
        ("a.jsonl", b"{", None),
        ("a.jsonl.gz", b"", None),
        ("a.jsonl.gz", ZSTD, "is compressed by zstd, not by gzip; name it a.jsonl.zst"),
        ("a.jsonl.zstd", b"\x1f\x8b", "is compressed by gzip, not by zstd; name it a.jsonl.gz"),
        (
            "a.jsonl.bz2",
            b'{"text"',
            "is not compressed by bz2, by its first bytes; if it is plain, name it a.jsonl",
        ),
        (
            "a.jsonl.lz4",
            bytes(18),
            "begins with zero bytes: its download or copy did not end; copy the original again",
        ),
        (
            "a.zst",
            ZSTD + b"\x04\xa8",
            "is compressed with a window of 2,048 MiB, and at most 128 MiB are read; ",
        ),
    ],
)
def test_each_cause_has_its_own_remedy(name: str, head: bytes, fault: str | None) -> None:
    assert (compressed_fault(name, head) or "").startswith(fault or "")
    assert (compressed_fault(name, head) is None) == (fault is None)
