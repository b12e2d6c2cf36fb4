"""torch's pickles read as data: no torch, no pickle module, and nothing that a file names is ever imported.

An interpreter of the opcodes that torch.save writes (pickle protocols 2 to 5). Every name that a file may use stands in
one table here, for a function of ours; what they rebuild are `Slab`s, which say where a tensor lies. Of checkpoints
that keep their settings beside the tensors, any other name makes an `Opaque`, which tells its name and does nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import Any

from smtrain.worker.checkpoint.dtypes import BY_NAME, BY_STORAGE, UINT8, DType
from smtrain.worker.checkpoint.tensor_ranges import Slab

REFERENCE = "torch_xla.utils.serialization.TensorReference"
_STEPS = 20_000_000  # operations of one pickle: a shard of 10,000 tensors takes some 300,000
_DIMENSIONS = 32
_OF_THE_SYSTEM = {
    *("os", "posix", "nt", "builtins", "__builtin__", "sys", "subprocess", "shutil", "socket", "runpy", "importlib"),
    *(
        "ctypes",
        "pty",
        "pickle",
        "webbrowser",
        "code",
        "commands",
        "operator",
        "functools",
        "asyncio",
        "multiprocessing",
    ),
}
"""Modules of Python itself whose functions a file of weights has no use for, and an attack has."""
Stored = Callable[[str, DType, int], Slab]
"""(key, type, how many numbers) of a storage -> all of it as a flat slab. Raises ValueError where it is not so."""


class Reference:
    """Stands for tensor number `tid` of an xser shard's `.tensors` folder."""

    tid: Any = None


class Opaque:
    """Stands for an object of a class, or the result of a call, that a file names and nobody here knows."""

    def __init__(self, name: str, given: Any = ()) -> None:
        self.name, self.given = name, given
        """What it was made of."""
        self.state: Any = None
        """Its attributes: a dict, or what its class makes of them."""


class CutShortError(ValueError):
    """The bytes end before the pickle does."""

    def __init__(self) -> None:
        super().__init__("its pickle is cut short")


class OfObjectsError(ValueError):
    """The pickle is whole and holds objects of Python besides tensors."""

    def __init__(self, name: str) -> None:
        called = f"it would call {name[:200]}, which is no part of a checkpoint of tensors"
        if name.split(".")[0] in _OF_THE_SYSTEM:
            super().__init__(f"is not safe: {called}; do not load it, and take the model's safetensors")
        else:
            super().__init__(
                f"holds more than tensors: {called}; load it in the program that wrote it, if you trust it, and save "
                "only its tensors: torch.save(model.state_dict(), FILE)"
            )


class _Named(str):
    """The name of a class or a function that nobody here knows."""


def unpickle(data: bytes, stored: Stored, lenient: bool = False) -> Any:
    """What a pickle holds: dicts, lists and tuples with a `Slab` for each tensor and a `Reference` for each of xser's.

    Names that nobody knows are an error or, if `lenient`, make an `Opaque`. Raises ValueError, which says what is
    wrong, or whatever a damaged pickle leads to.
    """
    return unpickle_at(data, 0, stored, lenient)[0]


def unpickle_at(data: bytes, at: int, stored: Stored, lenient: bool = False) -> tuple[Any, int]:
    """The same of the pickle that begins at a byte; with it, where it ends."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def take(n: int) -> bytes:
        nonlocal at
        at += n
        if n < 0 or at > len(data):
            raise CutShortError
        return data[at - n : at]

    def line() -> str:
        return take(data.index(b"\n", at) - at + 1)[:-1].decode()

    def since_mark() -> list[Any]:
        start = marks.pop()
        found = stack[start:]
        del stack[start:]
        return found

    for _ in range(_STEPS):
        op = take(1)
        if op in _NUMBERS:
            form, size = _NUMBERS[op]
            stack.append(struct.unpack(form, take(size))[0])
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == b"q":  # BINPUT
            memo[take(1)[0]] = stack[-1]
        elif op == b"r":  # LONG_BINPUT
            memo[int.from_bytes(take(4), "little")] = stack[-1]
        elif op == b"h":  # BINGET
            stack.append(memo[take(1)[0]])
        elif op == b"j":  # LONG_BINGET
            stack.append(memo[int.from_bytes(take(4), "little")])
        elif op == b"X":  # BINUNICODE
            stack.append(take(int.from_bytes(take(4), "little")).decode("utf-8", "surrogatepass"))
        elif op == b"\x8c":  # SHORT_BINUNICODE
            stack.append(take(take(1)[0]).decode("utf-8", "surrogatepass"))
        elif op == b"U":  # SHORT_BINSTRING, of Python 2
            stack.append(take(take(1)[0]).decode())
        elif op in _BYTES:
            stack.append(take(int.from_bytes(take(_BYTES[op]), "little")))
        elif op == b"\x94":  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == b"\x95":  # FRAME
            take(8)
        elif op == b"\x8a":  # LONG1
            stack.append(int.from_bytes(take(take(1)[0]), "little", signed=True))
        elif op == b"(":  # MARK
            marks.append(len(stack))
        elif op == b"t":  # TUPLE
            stack.append(tuple(since_mark()))
        elif op in _TUPLES:
            n = _TUPLES[op]
            stack[-n:] = [tuple(stack[-n:])]
        elif op == b"}":  # EMPTY_DICT
            stack.append({})
        elif op == b"]":  # EMPTY_LIST
            stack.append([])
        elif op in (b"s", b"u"):  # SETITEM, SETITEMS
            items = since_mark() if op == b"u" else [stack.pop(-2), stack.pop()]
            if not isinstance(stack[-1], Opaque):
                _a(dict, stack[-1]).update(zip(_keys(items[::2]), items[1::2], strict=True))
        elif op in (b"a", b"e"):  # APPEND, APPENDS
            items = since_mark() if op == b"e" else [stack.pop()]
            if not isinstance(stack[-1], Opaque):
                _a(list, stack[-1]).extend(items)
        elif op == b"\x8f":  # EMPTY_SET
            stack.append([])
        elif op == b"\x90":  # ADDITEMS
            items = since_mark()
            _a(list, stack[-1]).extend(items)
        elif op == b"\x91":  # FROZENSET
            stack.append(tuple(since_mark()))
        elif op == b"c":  # GLOBAL
            stack.append(_known(f"{line()}.{line()}", lenient))
        elif op == b"\x93":  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(_known(f"{_a(str, module)}.{_a(str, name)}", lenient))
        elif op == b"R":  # REDUCE
            given, call = stack.pop(), stack.pop()
            stack.append(Opaque(call, given) if isinstance(call, _Named) else _call(call, given))
        elif op in (b"\x81", b"\x92"):  # NEWOBJ, NEWOBJ_EX
            if op == b"\x92":
                stack.pop()
            given, kind = stack.pop(), stack.pop()
            if isinstance(kind, _Named):
                stack.append(Opaque(kind, given))
            elif kind is Reference and given == ():
                stack.append(Reference())
            else:
                raise ValueError("it makes an object of its own")
        elif op == b"b":  # BUILD
            state = stack.pop()
            if isinstance(stack[-1], Opaque):
                stack[-1].state = state
            elif isinstance(stack[-1], Reference):
                stack[-1].tid = _a(dict, state).get("tid")
            elif not isinstance(stack[-1], dict):  # an OrderedDict's own attributes are of no use
                raise ValueError("it changes what it is made of")
        elif op == b"Q":  # BINPERSID
            kind, storage, key, _, numel = stack.pop()[:5]
            if kind != "storage" or not isinstance(storage, DType):
                raise ValueError(f"it refers to {_shown(kind)}")
            stack.append(stored(_a(str, key), storage, _natural(numel)))
        elif op == b"\x80":  # PROTO
            if not 2 <= take(1)[0] <= 5:
                raise ValueError("its pickle is of another protocol than torch.save's")
        elif op == b".":  # STOP
            return stack.pop(), at
        else:
            raise ValueError(f"its pickle has the opcode {op!r}, which torch.save does not write")
    raise ValueError(f"its pickle has more than {_STEPS:,} operations")


_NUMBERS = {b"J": ("<i", 4), b"K": ("<B", 1), b"M": ("<H", 2), b"G": (">d", 8)}
_CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False, b")": ()}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_BYTES = {b"C": 1, b"B": 4, b"\x8e": 8, b"\x96": 8}


def _a(kind: type, found: Any) -> Any:
    if not isinstance(found, kind):
        raise ValueError(f"it has {type(found).__name__} where {kind.__name__} belongs")
    return found


def _shown(found: Any) -> str:
    """A value in an error; of what holds others its type only: one that holds itself in many ways never ends."""
    return repr(found)[:100] if isinstance(found, (str, int, float)) else type(found).__name__


def _natural(n: Any) -> int:
    if type(n) is not int or not 0 <= n < 1 << 63:
        raise ValueError(f"it has {_shown(n)} where a number of elements belongs")
    return n


def _known(name: str, lenient: bool) -> Any:
    if name not in _NAMES and lenient:
        return _Named(name[:500])
    if name not in _NAMES:
        raise OfObjectsError(name)
    return _NAMES[name]


def _call(call: Any, given: Any) -> Any:
    if call not in _CALLED:
        raise ValueError("it calls what cannot be called")
    return call(*_a(tuple, given))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_rest: Any) -> Slab:
    """torch._utils._rebuild_tensor_v2."""
    whole: Slab = _a(Slab, storage)
    if not all(isinstance(given, tuple) and len(given) <= _DIMENSIONS for given in (size, stride)):
        raise ValueError("it holds a tensor without a shape")
    shape, strides = tuple(map(_natural, size)), tuple(map(_natural, stride))
    held, numel, start = whole.shape[0], prod(shape), _natural(offset)
    reach = sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) + 1
    if numel and start + reach > held:
        raise ValueError("it holds a tensor that reaches beyond its storage")
    at = whole.offset + start * whole.dtype.itemsize
    return Slab(whole.place, whole.file, at, whole.dtype, shape, strides, whole.crc32 if numel == held else None)


def _tensor_of_type(storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any,
                    *_rest: Any) -> Slab:  # fmt: skip
    """torch._utils._rebuild_tensor_v3: of a type, as the 8-bit floats, that no storage class is named after."""
    whole, kind = _a(Slab, storage), _a(DType, dtype)
    held = Slab(whole.place, whole.file, whole.offset, kind, (whole.size // kind.itemsize,), (1,), whole.crc32)
    return _tensor(held, offset, size, stride)


def _first(data: Any, *_rest: Any) -> Any:
    """torch._utils._rebuild_parameter, and torch.Size."""
    return data


def _with_attributes(rebuild: Any, _kind: Any, given: Any, _attributes: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor with attributes, which are left out."""
    return _call(rebuild, given)


def _ordered(pairs: Any = ()) -> dict[Any, Any]:
    items = list(pairs)
    if not all(isinstance(item, (list, tuple)) and len(item) == 2 for item in items):
        raise ValueError("it has a dict that is made of something else than pairs")
    return dict(zip(_keys([key for key, _ in items]), [value for _, value in items], strict=True))


def _keys(keys: list[Any]) -> list[Any]:
    """Of nested tuples, the hash alone would take for ever."""
    if not all(isinstance(key, (str, int, Opaque)) for key in keys):
        raise ValueError("it has keys that are neither names nor numbers")
    return keys


_CALLED = (_tensor, _tensor_of_type, _first, _with_attributes, _ordered)
_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
    "torch._utils._rebuild_parameter": _first,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.nn.parameter.Parameter": None,  # only named, as the type of a tensor
    "torch.Tensor": None,
    "torch.Size": _first,
    "torch.device": _first,
    "collections.OrderedDict": _ordered,
    "torch.storage.UntypedStorage": UINT8,
    REFERENCE: Reference,
    "nemo.collections.nlp.parts.serialization.TensorReference": Reference,
    **{f"torch.{name}": dtype for name, dtype in (*BY_NAME.items(), *BY_STORAGE.items())},
}
