"""torch's pickles read as data: no torch, no pickle module, and nothing that a file names is ever
imported.

An interpreter of the opcodes that torch.save writes (pickle protocols 2 to 5), each with a small
handler in `_OPCODES`. Every name that a file may use is in one table, `_NAMES`, which leads to a
function of ours; tensors become `Slab`s, which hold the place of a tensor. If the caller is
lenient, any other name makes an `Opaque`, which only holds that name.
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
_SYSTEM_MODULES = {
    "os",
    "posix",
    "nt",
    "builtins",
    "__builtin__",
    "sys",
    "subprocess",
    "shutil",
    "socket",
    "runpy",
    "importlib",
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
}
"""Modules of Python whose functions an attack uses and a file of weights does not."""
StorageReader = Callable[[str, DType, int], Slab]
"""(key, type, number of elements) of a storage -> all of it as a flat slab.

Raises ValueError if it does not fit.
"""


class Reference:
    """Stands for tensor number `tid` of an xser shard's `.tensors` folder."""

    tid: Any = None


class Opaque:
    """Stands for an object of a class, or the result of a call, outside `_NAMES`."""

    def __init__(self, name: str, arguments: Any = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None
        """Its attributes: a dict, or what its class makes of them."""


class CutShortError(ValueError):
    """The bytes end before the pickle does."""

    def __init__(self) -> None:
        super().__init__("its pickle is cut short")


class OfObjectsError(ValueError):
    """The pickle is whole and holds objects of Python besides tensors."""

    def __init__(self, name: str) -> None:
        reason = f"it would call {name[:200]}, which is no part of a checkpoint of tensors"
        if name.split(".")[0] in _SYSTEM_MODULES:
            super().__init__(
                f"is not safe: {reason}; do not load it, and take the model's safetensors"
            )
        else:
            super().__init__(
                f"holds more than tensors: {reason}; load it in the program that wrote it, if you"
                " trust it, and save only its tensors: torch.save(model.state_dict(), FILE)"
            )


class _UnknownName(str):
    """The name of a class or function outside `_NAMES`: text, so that no handler can call
    it.
    """


def unpickle(data: bytes, read_storage: StorageReader, lenient: bool = False) -> Any:
    """Read a pickle as dicts, lists and tuples, with a `Slab` for each tensor and a `Reference` for
    each of xser's.

    Unknown names are an error or, if `lenient`, make an `Opaque`. Raises ValueError, which says
    what is wrong, or whatever a damaged pickle leads to.
    """
    return unpickle_at(data, 0, read_storage, lenient)[0]


def unpickle_at(
    data: bytes, at: int, read_storage: StorageReader, lenient: bool = False
) -> tuple[Any, int]:
    """Read the pickle that begins at a byte; returns its content and its end."""
    machine = _Machine(data, at, read_storage, lenient)
    # A pickle can build in few bytes what takes forever to build, so its operations are counted.
    for _ in range(_STEPS):
        opcode = machine.take(1)
        if opcode == b".":  # STOP
            return machine.stack.pop(), machine.at
        handler = _OPCODES.get(opcode)
        if handler is None:
            raise ValueError(
                f"its pickle has the opcode {opcode!r}, which torch.save does not write"
            )
        handler(machine)
    raise ValueError(f"its pickle has more than {_STEPS:,} operations")


class _Machine:
    """The state of an unpickling: bytes, stack, marks and memo."""

    def __init__(self, data: bytes, at: int, read_storage: StorageReader, lenient: bool) -> None:
        self.data, self.at, self.stored, self.lenient = data, at, read_storage, lenient
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def take(self, size: int) -> bytes:
        self.at += size
        # A slice would silently be shorter: a cut file must not pass for a small number.
        if size < 0 or self.at > len(self.data):
            raise CutShortError
        return self.data[self.at - size : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        return self.take(self.data.index(b"\n", self.at) - self.at + 1)[:-1].decode()

    def since_mark(self) -> list[Any]:
        # Marks are kept aside, not on the stack, so no opcode can take one for a value.
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


Handler = Callable[[_Machine], None]


def _constant(value: Any) -> Handler:
    return lambda machine: machine.stack.append(value)


def _unpack_handler(form: str) -> Handler:
    size = struct.calcsize(form)
    return lambda machine: machine.stack.append(struct.unpack(form, machine.take(size))[0])


def _text(length: int, *decoding: str) -> Handler:
    return lambda machine: machine.stack.append(
        machine.take(machine.number(length)).decode(*decoding)
    )


def _bytes(length: int) -> Handler:
    return lambda machine: machine.stack.append(machine.take(machine.number(length)))


def _put(size: int) -> Handler:
    return lambda machine: machine.memo.__setitem__(machine.number(size), machine.stack[-1])


def _get(size: int) -> Handler:
    return lambda machine: machine.stack.append(machine.memo[machine.number(size)])


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _long(machine: _Machine) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.number(1)), "little", signed=True))


def _mark(machine: _Machine) -> None:
    machine.marks.append(len(machine.stack))


def _tuple_of(size: int) -> Handler:
    def handler(machine: _Machine) -> None:
        machine.stack[-size:] = [tuple(machine.stack[-size:])]

    return handler


def _tuple(machine: _Machine) -> None:  # FROZENSET too: hashing what a file holds may take forever
    machine.stack.append(tuple(machine.since_mark()))


def _empty(kind: type) -> Handler:
    return lambda machine: machine.stack.append(kind())


def _set_items(machine: _Machine, items: list[Any]) -> None:
    # An unknown class may be a dict; its content is of no use, and it must not become one of
    # ours.
    if not isinstance(machine.stack[-1], Opaque):
        _a(dict, machine.stack[-1]).update(zip(_keys(items[::2]), items[1::2], strict=True))


def _append_items(machine: _Machine, items: list[Any]) -> None:
    if not isinstance(machine.stack[-1], Opaque):
        _a(list, machine.stack[-1]).extend(items)


def _global(machine: _Machine) -> None:
    machine.stack.append(_resolve_name(f"{machine.line()}.{machine.line()}", machine.lenient))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(_resolve_name(f"{_a(str, module)}.{_a(str, name)}", machine.lenient))


def _reduce(machine: _Machine) -> None:
    """Call a function: one of ours, or none at all."""
    arguments, function = machine.stack.pop(), machine.stack.pop()
    is_unknown = isinstance(function, _UnknownName)
    machine.stack.append(Opaque(function, arguments) if is_unknown else _call(function, arguments))


def _new_object(machine: _Machine) -> None:
    """Make an object of a class: a `Reference`, or an `Opaque` that stands for any other."""
    arguments, kind = machine.stack.pop(), machine.stack.pop()
    if isinstance(kind, _UnknownName):
        machine.stack.append(Opaque(kind, arguments))
    elif kind is Reference and arguments == ():
        machine.stack.append(Reference())
    else:
        raise ValueError("it creates an object")


def _new_object_with_keywords(machine: _Machine) -> None:
    machine.stack.pop()  # keywords
    _new_object(machine)


def _build(machine: _Machine) -> None:
    """Give an object its attributes.

    Nothing of ours takes any but a `Reference`, and that only its number.
    """
    state, target = machine.stack.pop(), machine.stack[-1]
    # State of an unknown object is only held, never applied: nothing of the file runs.
    if isinstance(target, Opaque):
        target.state = state
    elif isinstance(target, Reference):
        target.tid = _a(dict, state).get("tid")
    elif not isinstance(target, dict):  # an OrderedDict's own attributes are of no use
        raise ValueError("it gives attributes to another object")


def _persistent_id(machine: _Machine) -> None:
    """Refer to a storage, the only thing that torch keeps outside of its pickles."""
    # torch's `_legacy_save` adds a sixth value, the metadata of a view.
    kind, storage, key, _, numel = machine.stack.pop()[:5]
    if kind != "storage" or not isinstance(storage, DType):
        raise ValueError(f"it refers to {_format_value(kind)}")
    machine.stack.append(machine.stored(_a(str, key), storage, _natural(numel)))


def _protocol(machine: _Machine) -> None:
    if not 2 <= machine.number(1) <= 5:
        raise ValueError("its pickle is of another protocol than torch.save's")


def _frame(machine: _Machine) -> None:
    machine.take(8)  # its length, a hint for readers of streams


# What is not in this table is refused: no opcode here imports, and none calls but `_reduce`, by
# `_NAMES` only.
_OPCODES: dict[bytes, Handler] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b")": _constant(()),
    b"J": _unpack_handler("<i"),  # BININT
    b"K": _unpack_handler("<B"),  # BININT1
    b"M": _unpack_handler("<H"),  # BININT2
    b"G": _unpack_handler(">d"),  # BINFLOAT
    b"\x8a": _long,  # LONG1
    b"X": _text(4, "utf-8", "surrogatepass"),  # BINUNICODE
    b"\x8c": _text(1, "utf-8", "surrogatepass"),  # SHORT_BINUNICODE
    b"U": _text(1),  # SHORT_BINSTRING, of Python 2
    b"C": _bytes(1),  # SHORT_BINBYTES
    b"B": _bytes(4),  # BINBYTES
    b"\x8e": _bytes(8),  # BINBYTES8
    b"\x96": _bytes(8),  # BYTEARRAY8
    b"q": _put(1),  # BINPUT
    b"r": _put(4),  # LONG_BINPUT
    b"h": _get(1),  # BINGET
    b"j": _get(4),  # LONG_BINGET
    b"\x94": _memoize,
    b"(": _mark,
    b"t": _tuple,
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"\x91": _tuple,  # FROZENSET
    b"}": _empty(dict),
    b"]": _empty(list),
    b"\x8f": _empty(list),  # EMPTY_SET: a list, for the same reason as FROZENSET
    b"s": lambda machine: _set_items(
        machine, [machine.stack.pop(-2), machine.stack.pop()]
    ),  # SETITEM
    b"u": lambda machine: _set_items(machine, machine.since_mark()),  # SETITEMS
    b"a": lambda machine: _append_items(machine, [machine.stack.pop()]),  # APPEND
    b"e": lambda machine: _append_items(machine, machine.since_mark()),  # APPENDS
    b"\x90": lambda machine: _append_items(machine, machine.since_mark()),  # ADDITEMS
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new_object,  # NEWOBJ
    b"\x92": _new_object_with_keywords,  # NEWOBJ_EX
    b"b": _build,
    b"Q": _persistent_id,  # BINPERSID
}


def _a(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"it has {type(value).__name__} instead of {kind.__name__}")
    return value


def _format_value(value: Any) -> str:
    """A value for an error; of a container only its type, since the repr of nested ones may never
    end.
    """
    return repr(value)[:100] if isinstance(value, (str, int, float)) else type(value).__name__


def _natural(n: Any) -> int:
    if type(n) is not int or not 0 <= n < 1 << 63:
        raise ValueError(f"it has {_format_value(n)} instead of a number of elements")
    return n


def _resolve_name(name: str, lenient: bool) -> Any:
    if name in _NAMES:
        return _NAMES[name]
    if not lenient:
        raise OfObjectsError(name)
    return _UnknownName(name[:500])


def _call(function: Any, arguments: Any) -> Any:
    # `_NAMES` leads to types too, and a pickle may try to call a number: only these functions are
    # ever called.
    if function not in _CALLABLES:
        raise ValueError("it calls what cannot be called")
    return function(*_a(tuple, arguments))


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_extra: Any) -> Slab:
    """torch._utils._rebuild_tensor_v2."""
    flat: Slab = _a(Slab, storage)
    if not all(isinstance(sizes, tuple) and len(sizes) <= _DIMENSIONS for sizes in (size, stride)):
        raise ValueError("it holds a tensor without a shape")
    shape, strides = tuple(map(_natural, size)), tuple(map(_natural, stride))
    available, numel, start = flat.shape[0], prod(shape), _natural(offset)
    reach = sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) + 1
    if numel and start + reach > available:
        raise ValueError("it holds a tensor that reaches beyond its storage")
    at = flat.offset + start * flat.dtype.itemsize
    return Slab(
        flat.place,
        flat.file,
        at,
        flat.dtype,
        shape,
        strides,
        # The checksum is of the whole storage, so a view of a part has none.
        flat.crc32 if numel == available else None,
    )


def _tensor_of_type(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    *_extra: Any,
) -> Slab:
    """torch._utils._rebuild_tensor_v3: a tensor of a type without a storage class, such as the
    8-bit floats.
    """
    flat, kind = _a(Slab, storage), _a(DType, dtype)
    typed_slab = Slab(
        flat.place,
        flat.file,
        flat.offset,
        kind,
        (flat.size // kind.itemsize,),
        (1,),
        flat.crc32,
    )
    return _tensor(typed_slab, offset, size, stride)


def _first(data: Any, *_extra: Any) -> Any:
    """torch._utils._rebuild_parameter, and torch.Size."""
    return data


def _with_attributes(rebuild: Any, _kind: Any, arguments: Any, _attributes: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor without its attributes."""
    return _call(rebuild, arguments)


def _ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    items = list(pairs)
    if not all(isinstance(item, (list, tuple)) and len(item) == 2 for item in items):
        raise ValueError("it has a dict of other items than pairs")
    return dict(zip(_keys([key for key, _ in items]), [value for _, value in items], strict=True))


def _keys(keys: list[Any]) -> list[Any]:
    """Keys of a dict, as long as they are quick to hash: the hash of nested tuples may take
    forever.
    """
    if not all(isinstance(key, (str, int, Opaque)) for key in keys):
        raise ValueError("it has other keys than names and numbers")
    return keys


_CALLABLES = (_tensor, _tensor_of_type, _first, _with_attributes, _ordered_dict)
_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
    "torch._utils._rebuild_parameter": _first,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.nn.parameter.Parameter": None,  # only named, as the type of a tensor
    "torch.Tensor": None,
    "torch.Size": _first,
    "torch.device": _first,
    "collections.OrderedDict": _ordered_dict,
    "torch.storage.UntypedStorage": UINT8,
    REFERENCE: Reference,
    "nemo.collections.nlp.parts.serialization.TensorReference": Reference,
    **{f"torch.{name}": dtype for name, dtype in (*BY_NAME.items(), *BY_STORAGE.items())},
}
