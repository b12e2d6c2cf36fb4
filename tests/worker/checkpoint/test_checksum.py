"""Checksums of pieces give the checksum of the whole."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from smtrain.worker.checksum import combine_crcs, crc32


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_of_two_pieces_behind_each_other(first: bytes, second: bytes) -> None:
    assert combine_crcs(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


def test_of_a_large_piece() -> None:
    second = bytes(range(256)) * 40_001
    assert combine_crcs(crc32(b"first"), crc32(second), len(second)) == zlib.crc32(
        b"first" + second
    )
