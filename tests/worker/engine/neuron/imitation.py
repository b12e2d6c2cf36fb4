"""TorchNeuron's place in torch, without its hardware: the device `neuron` in host memory, its
group, its limits.

    imitation.start(Limits(integer_sums=False))

Call `start` before the first backward pass of a process, and after a fork, which autograd's threads
do not survive. The facts that it imitates are those of Neuron 2.33 (docs/trainium.md); its results
have the CPU's bits, so it says nothing about Neuron's numbers, speed or compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SOURCE = Path(__file__).with_name("device.cpp")
KERNELLESS = frozenset(
    f"aten::{name}"
    for name in (
        # Operators of an unfused AdamW, and a running maximum.
        *("_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_sqrt"),
        *(
            "lerp",
            "lerp_",
            "addcmul",
            "addcmul_",
            "addcdiv",
            "addcdiv_",
            "_cummax_helper",
            "cumsum",
        ),
    )
)
"""Operators that TorchNeuron was seen to lack or to send to the CPU (2026-04 and 2026-10)."""
FLAGS = ("-O1", "-g0")


@dataclass(frozen=True)
class Limits:
    """Refusals of the device; by default it has none."""

    devices: int = 4
    visible: int | None = None
    """`device_count()` before `init_process_group`; None: as after it."""
    early_touch: bool = True
    """The device may be chosen, and hold tensors, before `init_process_group`."""
    float64: bool = True
    generators: bool = True
    """There is `torch.Generator("neuron")`."""
    flash: bool = True
    """Attention has a fused kernel; otherwise torch computes it from products."""
    integer_sums: bool = True
    """Ranks can reduce integers (compiler errors NCC_EVRF061 and 063)."""
    strided_writes: bool = True
    """Operators may write into a slice not dense in memory."""
    messages: str = "buffered"
    """`unbuffered`: a message waits for its receiver, in the order of the calls; `none`: no send
    and receive.
    """
    cores_a_chip: int | None = None
    """With a number, a group of ranks that does not tile the 4 x 4 torus of chips is refused."""
    compiler: bool = True
    """torch.compile's backend `neuron` can compile; a changing shape is refused in any case."""
    missing: frozenset[str] = frozenset()
    """Operators that have no kernel, as torch names them, without the overload."""


limits = Limits()
collectives: Counter[str] = Counter()
"""The number of calls of each collective, for example `all_reduce SUM float32[1d]`."""
compiled: Counter[str] = Counter()
"""`graphs`: how many torch.compile has made."""
patience: timedelta | None = None
"""The time limit of the job's group."""
_device: Any = None
_before = 0
_SIDE = 4
"""Chips on a side of the torus."""


def start(chosen: Limits | None = None) -> None:
    """Make `neuron` the accelerator of this process, or only change its limits if it is."""
    global _device, limits
    if _device is None:
        _device = _built()
        torch.utils.rename_privateuse1_backend("neuron")
        torch._register_device_module("neuron", _module())
        torch.utils.generate_methods_for_privateuse1_backend()
        dist.Backend.register_backend("neuron", _group, extended_api=True, devices=["neuron"])
        torch._dynamo.register_backend(_compile, "neuron")
    limits = chosen or Limits()
    _device.limit(
        limits.devices,
        limits.float64,
        limits.generators,
        limits.flash,
        limits.strided_writes,
        set(limits.missing),
    )


def calls() -> Counter[str]:
    """The number of calls of each operator that arrived, by the dtypes and numbers of dimensions of
    its tensors.
    """
    return Counter(_device.calls())


def forget() -> None:
    """Begin to count again."""
    global _before
    _device.forget()
    _before = _device.memory()[0]
    collectives.clear()


def peak() -> int:
    """The most bytes that were allocated at a time since `forget`, more than there were then."""
    most: int = _device.memory()[1] - _before
    return most


def tiles(ranks: list[int], cores_a_chip: int) -> bool:
    """Whether a group can talk over the torus of its host: whole rows, columns or a rectangle of
    them, or neighbours.

    Each chip must take part with the same cores. Written apart from smtrain.core.facts.trainium2,
    to hold it against.
    """
    hosts: dict[int, list[int]] = {}
    size = _SIDE * _SIDE * cores_a_chip
    for rank in ranks:
        hosts.setdefault(rank // size, []).append(rank % size)
    return all(_tiles(local, cores_a_chip) for local in hosts.values())


def _tiles(local: list[int], cores: int) -> bool:
    chips: dict[int, set[int]] = {}
    for rank in local:
        chips.setdefault(rank // cores, set()).add(rank % cores)
    if len({frozenset(offsets) for offsets in chips.values()}) > 1:
        return False
    places = {divmod(chip, _SIDE) for chip in chips}
    if len(places) == 1:
        return True
    rows, columns = {row for row, _ in places}, {column for _, column in places}
    if len(rows) * len(columns) != len(places):
        return False
    if len(places) == 2:
        apart = max(rows) - min(rows) + max(columns) - min(columns)
        return apart in (1, _SIDE - 1)
    whole = [len(rows) == _SIDE, len(columns) == _SIDE]
    return any(whole) and all(
        full or _adjacent(line) for full, line in zip(whole, (rows, columns), strict=True)
    )


def _adjacent(line: set[int]) -> bool:
    """Whether there is one place of a ring of `_SIDE`, or two neighbours; of three nothing is
    known.
    """
    return len(line) < 3 and any(
        {(first + i) % _SIDE for i in range(len(line))} == line for first in line
    )


def _built() -> Any:
    """The extension, built once for a source and a torch; about 16 s on a quiet core, with g++ and
    ninja.
    """
    key = hashlib.sha256(
        f"{torch.__version__} {sys.version} {FLAGS}".encode() + SOURCE.read_bytes()
    ).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder, name = base / "smtrain-tests" / f"neuron-{key}", "smtrain_test_neuron"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "building", "w") as lock:  # torch waits while there is a file `lock`
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / f"{name}.so"
        if not library.exists():
            from torch.utils import cpp_extension

            # ninja is a package of this environment, whose folder need not be on the path.
            os.environ["PATH"] = os.pathsep.join(
                [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
            )
            return cpp_extension.load(
                name, [str(SOURCE)], extra_cflags=list(FLAGS), build_directory=str(folder)
            )
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module() -> types.ModuleType:
    """`torch.neuron`."""

    def choose(index: Any) -> None:
        place = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        if place is not None and place >= 0:
            _device.choose(place)

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        before = _device.current()
        choose(index)
        try:
            yield
        finally:
            _device.choose(before)

    def count() -> int:
        hidden = limits.visible is not None and not dist.is_initialized()
        return int(limits.visible if hidden else _device.count())  # type: ignore[arg-type]

    neuron: Any = types.ModuleType("torch.neuron")
    neuron.device_count, neuron.current_device, neuron.set_device, neuron.device = (
        count,
        _device.current,
        choose,
        device,
    )
    neuron.is_available, neuron.is_initialized, neuron._is_in_bad_fork = (
        lambda: True,
        lambda: True,
        lambda: False,
    )
    neuron.synchronize = lambda device=None: None
    only_stream = Stream()
    neuron.Stream, neuron.Event = (lambda *_, **__: only_stream), Event
    neuron.current_stream = neuron.default_stream = lambda device=None: only_stream
    neuron.stream = contextlib.nullcontext
    neuron.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    neuron.manual_seed = neuron.manual_seed_all = lambda seed: (
        None
    )  # torch draws from the CPU's default generator
    neuron.get_rng_state = lambda device=None: torch.get_rng_state()
    neuron.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    neuron.memory_allocated = lambda device=None: _device.memory()[0]
    neuron.max_memory_allocated = lambda device=None: _device.memory()[1]
    return neuron  # type: ignore[no-any-return]


class Event:
    """A moment of the only stream, which waits for each operator."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """The only stream: TorchNeuron's default, in which all streams are one (2026-10)."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        return event or Event()


class _Done:
    """Finished work."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    is_completed = wait


_ProcessGroup: Any = dist.ProcessGroup  # its stubs name arguments otherwise than its callers do


class Group(_ProcessGroup):  # type: ignore[misc]
    """Gloo over the device's bytes, so that sums have gloo's bits."""

    def __init__(
        self, store: Any, rank: int, ranks: list[int], timeout: timedelta, size: int
    ) -> None:
        super().__init__(rank, size)
        global patience
        first = not dist.is_initialized()
        patience = timeout if first else patience
        if first and _device.touched() and not limits.early_touch:
            raise AssertionError("neuron: the runtime was initialised before init_process_group")
        if limits.cores_a_chip and not first and not tiles(ranks, limits.cores_a_chip):
            raise RuntimeError(
                f"neuron: failed to init a collective algorithm for ranks {ranks}: no_hier no_mesh"
            )
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._name = ""

    def getBackendName(self) -> str:
        return "neuron"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("neuron")]

    def _take(self, x: Any, what: str, options: Any = None) -> Any:
        """The CPU's view of a tensor, or of lists of them; recorded, or refused."""
        if isinstance(x, (list, tuple)):
            return [self._take(each, what, options) for each in x]
        if x.device.type != "neuron" or not x.is_contiguous():
            raise RuntimeError(
                f"neuron: {what} of a tensor on {x.device}, contiguous: {x.is_contiguous()}"
            )
        dtype = str(x.dtype).removeprefix("torch.")
        reduction = "" if options is None else f" {_reduction(options)}"
        collectives[f"{what}{reduction} {dtype}[{x.dim()}d]"] += 1
        if options is not None and not limits.integer_sums and not x.dtype.is_floating_point:
            raise RuntimeError(
                f"[NCC_EVRF061] {what} of {dtype}: the collective engine sums in float32"
            )
        return _device.on_cpu(x)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._gloo.allreduce(self._take(tensors, "all_reduce", options), options)

    def reduce(self, tensors: Any, options: Any) -> Any:
        return self._gloo.reduce(self._take(tensors, "reduce", options), options)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return self._gloo.broadcast(self._take(tensors, "broadcast"), options)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        whole = [[_device.on_cpu(x) for x in output] for output in outputs]
        return self._gloo.allgather(whole, self._take(inputs, "all_gather"), options)

    def all_gather_single(self, output: Any, own: Any, options: Any) -> Any:
        return self._gloo._allgather_base(
            _device.on_cpu(output), self._take(own, "all_gather_into_tensor"), options
        )

    def reduce_scatter_single(self, output: Any, whole: Any, options: Any) -> Any:
        taken = self._take(whole, "reduce_scatter_tensor", options)
        return self._gloo._reduce_scatter_base(_device.on_cpu(output), taken, options)

    def all_to_all_single(self, output: Any, given: Any, to: Any, of: Any, options: Any) -> Any:
        if len({*to, *of}) > 1:
            raise NotImplementedError("neuron: all_to_all_single takes equal parts only")
        return self._gloo.alltoall_base(
            _device.on_cpu(output), self._take(given, "all_to_all_single"), to, of, options
        )

    # The names of torch before 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def barrier(self, opts: Any = None) -> Any:
        collectives["barrier"] += 1
        return self._gloo.barrier()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._message("send", self._gloo.send, self._gloo.recv, tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        return self._message("recv", self._gloo.recv, self._gloo.send, tensors, peer, tag)

    def _message(
        self,
        what: str,
        move: Callable[..., Any],
        answer: Callable[..., Any],
        tensors: Any,
        peer: int,
        tag: int,
    ) -> Any:
        if limits.messages == "none":
            raise NotImplementedError(f"neuron: no {what}")
        work = move(self._take(tensors, what), peer, tag)
        if (
            limits.messages == "unbuffered"
        ):  # the receiver answers, and only then does the sender continue
            work.wait()
            answer([torch.zeros(1)], peer, tag + (1 << 20)).wait()
            return _Done()  # gloo's work would wait for a second message if it were asked again
        return work


def _compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A graph as it is, if each of its shapes is known."""
    if not limits.compiler:
        raise RuntimeError("neuronx-cc: [NCC_ITEN404] internal error")
    if any(isinstance(x, torch.SymInt) for x in inputs):
        raise RuntimeError("neuron: dynamic=True is not supported")
    compiled["graphs"] += 1
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def _reduction(options: Any) -> str:
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next(name for name in names if options.reduceOp == getattr(dist.ReduceOp, name))


def _group(options: Any, _backend: Any = None) -> Group:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return Group(options.store, options.group_rank, ranks, options.timeout, options.group_size)
