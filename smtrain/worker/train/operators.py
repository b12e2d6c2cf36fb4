"""The memory of a step on an accelerator, and on Neuron its operators, and those that were left to
the CPU.

On Neuron an operator without a kernel runs on the CPU, and a copy each way with it. Which ones have
a kernel is AWS's table (docs/torch_api_compatibility.md of aws-neuron/torch-neuronx);
`docs/neuron-operators.md` lists those of a step.
"""

from __future__ import annotations

import importlib
import json
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from smtrain.core.text import Say

RECORD = "operators.json"
"""Next to metrics.jsonl."""
GIB = 2**30


class Call(NamedTuple):
    """A kind of call of an operator."""

    operator: str
    """Without its overload: `aten.mm`."""
    tensors: str
    """The dtype and number of dimensions of each tensor that it is given: `float32[2d]
    float32[2d]`.
    """
    device: str
    """The kind of device of its tensors; single numbers of the host may be among them."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and collectives while entered, as torch calls them: before it splits those
    without a kernel.
    """

    def __init__(self, device: str | None = None) -> None:
        """`device`: the kind of device whose operators count; None: all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs))
        kinds = {x.device.type for x in (*inputs, *_tensors(out))}
        device = next(iter(kinds - {"cpu"}), "cpu")
        if self._device in (None, device):
            tensors = " ".join(f"{str(x.dtype).removeprefix('torch.')}[{x.dim()}d]" for x in inputs)
            self.calls[Call(str(func.overloadpacket), tensors, device)] += 1
        return out


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class HeldBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of living tensors of one kind of device, from the operator that made each to
    its end.

    The result is the peak of a caching allocator without the scratch memory of kernels, also on
    devices without statistics.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.top = 0
        self._device, self._sizes = device, dict[int, int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            # A DTensor's storage is none: it has the size of all ranks' parts, and no memory.
            if tensor.device.type == self._device and not is_traceable_wrapper_subclass(tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that an operator has made, or that has another size now."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.top = max(self.top, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def fallbacks() -> list[str] | None:
    """The operators that TorchNeuron has left to the CPU in this process; None if no library here
    says so.
    """
    try:
        library = importlib.import_module("torch_neuronx")
        return sorted(map(str, library.get_fallback_ops()))
    except (ImportError, AttributeError):
        return None


def peak_memory(device: str) -> int | None:
    """The most bytes that torch has had on this process's device; None if its backend does not
    count.
    """
    counter = getattr(getattr(torch, device, None), "max_memory_allocated", None)
    return int(counter()) if counter is not None and device != "cpu" else None


@dataclass
class StepReport:
    """Counts and reports the operators of the job's second step, the first one after compilation.

    Every rank makes one and enters `step` for each step; rank 0 writes operators.json and lines of
    log. Operators of GPUs are nothing new, and a compiled step has no operators to count. A full
    disk ends the report, not the run.
    """

    device: str
    is_compiled: bool
    folder: Path
    rank: int
    say: Say
    _step: int = 0
    _operators: Operators | None = field(default=None, init=False)

    def step(self) -> AbstractContextManager[object]:
        """Wrap one step."""
        self._step += 1
        if self._step != 2 or self.rank:
            return nullcontext()
        return self._second()

    @contextmanager
    def _second(self) -> Iterator[None]:
        operators = Operators(self.device)
        with nullcontext() if self.is_compiled or self.device == "cuda" else operators:
            yield
        record: dict[str, Any] = {
            "device": self.device,
            "fallback": fallbacks(),
            "peak_bytes": peak_memory(self.device),
        }
        calls = sorted(operators.calls.items())
        record["operators"] = [[call.operator, call.tensors, times] for call, times in calls]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        except OSError as error:
            self.say(
                f"{self.folder / RECORD} cannot be written ({error.strerror}); training continues"
            )
        for line in lines(record):
            self.say(line)


def lines(record: dict[str, Any]) -> Iterator[str]:
    """A report's lines for the log."""
    used = sorted({name for name, _, _ in record["operators"]})
    if used:
        short = ", ".join(name.removeprefix("aten.") for name in used)
        yield f"operators of a step on {record['device']}: {len(used)}: {short}"
    if record["fallback"]:
        yield f"left to the CPU, with a copy each way: {', '.join(record['fallback'])}"
    elif record["fallback"] is not None:
        yield "no operator was left to the CPU"
    if record["peak_bytes"] is not None:
        yield (
            f"device memory: {record['peak_bytes'] / GIB:.2f} GiB at most on rank 0 after two steps"
        )
