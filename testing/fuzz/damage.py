"""Damage to files: cut, changed, added and swapped bytes, values of JSON, and things that are no
files.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testing.fuzz.configs import any_value

_BYTES = (
    b"\0",
    b"\n",
    b"\r\n",
    b"\xff",
    b"\xef\xbb\xbf",
    b"{",
    b"]",
    b'"',
    b"\x1b[31m",
    b"\xed\xa0\x80",
    b"-1",
    b"1e999",
    b"NaN",
)
_EXTREMES = (
    b"\xff" * 8,
    b"\xff" * 4,
    b"\0" * 8,
    b"\xff\xff\xff\x7f",
    b"\xff" * 7 + b"\x7f",
    b"\0\0\0\x80",
)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip(data: bytes, rng: random.Random) -> bytes:
    """Change bits, half of them in the head and the end, which locate everything else."""
    content = bytearray(data)
    places = [
        range(len(data)),
        range(min(2000, len(data))),
        range(max(0, len(data) - 2000), len(data)),
    ]
    for _ in range(rng.choice([1, 1, 1, 8])):
        content[rng.choice(rng.choice(places))] ^= 1 << rng.randrange(8)
    return bytes(content)


def _insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice([*_BYTES, rng.randbytes(20)]) + data[at:]


def _drop(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 2, 16, 1000]) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice([data[: len(data) // 2], rng.randbytes(50), b"\0" * 50])


def _number(data: bytes, rng: random.Random) -> bytes:
    """Overwrite four or eight bytes by an extreme number, as lengths and offsets have them."""
    at = rng.randrange(len(data)) // 4 * 4
    number = rng.choice(_EXTREMES)
    return data[:at] + number + data[at + len(number) :]


def _values(data: bytes, rng: random.Random) -> bytes:
    """Change a value of JSON, or of a line of JSON; other bytes are flipped."""
    lines = data.split(b"\n") if data.count(b"\n") > 1 and data.lstrip()[:1] == b"{" else [data]
    n = rng.randrange(len(lines))
    for start in (n, 0):
        try:
            value = json.loads(lines[start])
            lines[start] = json.dumps(change_value(value, rng)).encode()
            return b"\n".join(lines)
        except (ValueError, RecursionError):
            continue
    if len(lines) > 1:
        return _values_of_whole(data, rng)
    return _flip(data, rng)


def _values_of_whole(data: bytes, rng: random.Random) -> bytes:
    try:
        return json.dumps(change_value(json.loads(data), rng)).encode()
    except (ValueError, RecursionError):
        return _flip(data, rng)


def change_value(value: Any, rng: random.Random) -> Any:
    """A JSON value in which one part is another, is missing, or has another name."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        return any_value(rng)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    match rng.randrange(6):
        case 0:
            del value[key]
        case 1:
            value[key] = any_value(rng)
        case 2 if isinstance(value, dict):
            value[f"{key}x"] = value.pop(key)
        case _:
            value[key] = change_value(value[key], rng)
    return value


_DEEP = b"[" * 100_000
_CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _cut,
    _flip,
    _flip,
    _flip,
    _insert,
    _drop,
    _repeat,
    _number,
    _values,
    _values,
    _values,
    _values,
    lambda _, rng: rng.choice(
        [b"", b"{}", b"[]", b"null", b"7", b'"x"', _DEEP, b'{"a":' * 50_000, b"\0" * 4096]
    ),
)


def _replace_file(path: Path, rng: random.Random, pipes: bool) -> str:
    """Something else under the name of a file: nothing, a folder, a pipe, a device, a link to
    nowhere or to itself.
    """
    kind = rng.choice(
        ["nothing", "folder", "device", "nowhere", "itself", *(["pipe"] if pipes else [])]
    )
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "nothing":
        path.symlink_to({"device": "/dev/zero", "nowhere": "nowhere", "itself": path.name}[kind])
    return kind


def damage(path: Path, rng: random.Random, *, pipes: bool) -> str:
    """Damage a file in place; the label of the damage."""
    if rng.random() < 0.1:
        return _replace_file(path, rng, pipes)
    data = path.read_bytes()
    change = rng.choice(_CHANGES)
    path.write_bytes(change(data or b"x", rng))
    return change.__name__.strip("_")
