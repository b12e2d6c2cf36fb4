"""Count what runs on the devices: operators with their dtypes, and the bytes of living tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Call(NamedTuple):
    """A kind of call: its operator, the dtypes of its tensors, and the kind of device that they are on."""

    operator: str
    dtypes: str
    device: str


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: Counter[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        device = next(iter(kinds - {"cpu"}), "cpu")  # single numbers of the host go along with tensors of a device
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        self._calls[Call(str(function).removesuffix(".default"), ", ".join(dtypes), device)] += 1
        return out


@contextmanager
def counted_operators() -> Iterator[Counter[Call]]:
    """Count the calls of aten operators within the block, forward and backward, as torch's dispatcher sees them."""
    calls: Counter[Call] = Counter()
    with _Counting(calls):
        yield calls


def fell_back() -> list[str]:
    """The operators that ran on the CPU because the device has no kernel for them, if its backend says so."""
    try:
        # TorchNeuron's own list (torch-neuronx 2.13 and later).
        return sorted(map(str, import_module("torch_neuronx").get_fallback_ops()))
    except (ImportError, AttributeError):
        return []


class HeldBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living tensors of one kind of device, from the operator that made each to its end.

    That is the peak of a caching allocator without the scratch memory of kernels, also on devices without statistics.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.top = 0
        self._device, self._known = device, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device:
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            weakref.finalize(storage, self._gone, key, size)
            self.now += size
            self.top = max(self.top, self.now)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
