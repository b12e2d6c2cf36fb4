"""crc32 at memory speed: zlib-ng's where it is installed, many times as fast as zlib's on most machines."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
