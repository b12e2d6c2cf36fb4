"""Write pickles of plain values and of objects by name, without their classes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A class, function or other member of a module."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class New:
    """An object of a class, made without arguments and then given a state, usually its
    attributes.
    """

    kind: Name
    state: Any


@dataclass(frozen=True)
class Called:
    """The result of calling a function or class."""

    function: Name
    arguments: tuple[Any, ...] | Opcodes


@dataclass(frozen=True)
class Opcodes:
    """An already pickled value."""

    data: bytes


def dumps(value: Any) -> bytes:
    """A pickle of protocol 2."""
    # Protocol 2 is torch.save's default.
    return b"\x80\x02" + opcodes(value) + b"."


def opcodes(value: Any) -> bytes:
    """The opcodes that push a value."""
    # Before int, as a bool is one.
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, Opcodes):
        return value.data
    if isinstance(value, str):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        # Room for the sign bit, as LONG1 is signed.
        data = value.to_bytes((value.bit_length() // 8) + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, tuple):
        # Never BINPUT: without numbers of a memo, pieces (`Opcodes`) can be joined in any order.
        return b"(" + b"".join(map(opcodes, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(opcodes, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(opcodes(key) + opcodes(item) for key, item in value.items()) + b"u"
    if isinstance(value, Name):
        return f"c{value.module}\n{value.name}\n".encode()
    if isinstance(value, New):
        # An empty tuple of arguments, NEWOBJ, then BUILD with the state.
        return opcodes(value.kind) + b")\x81" + opcodes(value.state) + b"b"
    if isinstance(value, Called):
        return opcodes(value.function) + opcodes(value.arguments) + b"R"
    raise TypeError(f"{type(value).__name__} is not pickled here")
