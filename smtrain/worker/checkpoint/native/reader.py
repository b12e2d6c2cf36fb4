"""Read any slice of the native engine's checkpoints, of any topology.

Files are safetensors under Hugging Face names. `NativeSource` reads the weights in the precision of
the training, bf16, fp16 or fp32. `StateReader` reads the state that training resumes from, in fp32:
`master` (in an fp32 run, the model files themselves), `exp_avg` and `exp_avg_sq`. torch is needed
only for tensors of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.footprint import Precision
from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import BY_PRECISION, FP32, Bits, DType
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.manifest import NAME, Manifest, fault_at
from smtrain.worker.checkpoint.native.dcp_files import DcpFiles
from smtrain.worker.checkpoint.native.files import EXPERTS, model_file, optimizer_file
from smtrain.worker.checkpoint.sources import ReadCallback, WeightSource
from smtrain.worker.checkpoint.storage import Bounds, Place, place, read_text
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally
from smtrain.worker.checkpoint.training_state import (
    KINDS,
    Kind,
    Window,
    local_part,
    whole_window,
)
from smtrain.worker.checkpoint.verifying import check_hash, verify
from smtrain.worker.checksum import crc32

if TYPE_CHECKING:
    import torch

_READ = 4 << 20  # bytes read at a time: hashed and copied while still in the processor's cache


class _Files:
    """The files of one whole checkpoint and the cut of its parameters."""

    def __init__(self, checkpoint: Place | Path | str) -> None:
        self.place = place(checkpoint)
        reason = fault_at(self.place)
        if reason is not None:
            raise CheckpointError(
                f"the checkpoint {self.place} is not whole: {reason}", code="checkpoint.damaged"
            )
        self.manifest = Manifest.parse(read_text(self.place, NAME), str(self.place))
        self.tp, self.pp, self.dp = (self.manifest.topology[k] for k in ("tp", "pp", "dp"))
        self.layout = self.manifest.layout
        self.dtype = BY_PRECISION[self.manifest.precision]
        self._open: dict[str, dict[str, Slab]] = {}
        self.dcp: DcpFiles | None = None
        """The files, if they are folders of torch.distributed.checkpoint."""
        if self.manifest.storage == "dcp":
            self.dcp = DcpFiles(self.place, self.manifest)

    def slab(self, file: str, name: str) -> Slab:
        path = f"{self.manifest.root}{file}"
        if path not in self._open:
            self._open[path] = safetensors.slabs(self.place, path)
        if name not in self._open[path]:
            raise CheckpointError(
                f"{self.place}/{path} lacks {name}: take another checkpoint",
                code="checkpoint.damaged",
            )
        return self._open[path][name]

    def dtype_of(self, name: str) -> DType:
        """The type of a parameter in the model files."""
        return FP32 if keeps_fp32(name) else self.dtype

    def tensor_names(self, path: str) -> set[str]:
        """Names of the tensors of an opened file."""
        return set(self._open[path])

    def weights(self, name: str, window: Window | None = None) -> Bits:
        """Read a window of a parameter from the model files."""
        if self.dcp is not None:
            return self.dcp.weights(name, window, self.dtype_of(name))
        pp = self.layout.stages(name)[0]

        def local(ep: int | None, tp: int, part: Window) -> Bits:
            slab = self.slab(model_file(tp, pp, ep), name)
            if slab.shape != self.layout.local_shape(name, tp) or slab.dtype != self.dtype_of(name):
                raise CheckpointError(
                    f"{slab.place}/{slab.file}: {name} has another shape or type than {NAME} says;"
                    " take another one",
                    code="checkpoint.damaged",
                )
            return slab.bits(part)

        return _of_experts(self.layout, name, window, local)


def _of_experts(
    layout: Layout,
    name: str,
    window: Window | None,
    local: Callable[[int | None, int, Window], Bits],
) -> Bits:
    """`_assemble` of the parts on expert-parallel ranks; `local` gets the rank, None if all hold
    the same.
    """
    spec = layout.spec(name)
    if layout.ep == 1 or not spec.of_experts:
        return _assemble(layout, name, window, partial(local, None))
    if not spec.is_stacked:
        return _assemble(layout, name, window, partial(local, layout.expert_ranks(name)[0]))
    window = window or whole_window(spec.shape)
    parts = []
    for ep in range(layout.ep):
        local_experts = layout.experts(ep)
        low, high = max(window[0][0], local_experts.start), min(window[0][1], local_experts.stop)
        if low < high:
            # Numbered within the rank's file, which begins with its first expert.
            part = (low - local_experts.start, high - local_experts.start), *window[1:]
            parts.append(_assemble(layout, name, part, partial(local, ep)))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _assemble(
    layout: Layout, name: str, window: Window | None, local: Callable[[int, Window], Bits]
) -> Bits:
    """Assemble a window of a parameter from the tensor-parallel ranks' parts, which `local`
    reads.
    """
    shape = layout.spec(name).shape
    window = window or whole_window(shape)
    dim = layout.shard(name, 0).dim
    if dim is None:
        return local(0, window)
    first, last = window[dim]
    out: Bits | None = None
    read_ranges = set()
    for tp in range(layout.tp):
        shard, at = layout.shard(name, tp), 0
        ranges = (
            () if shard.ranges in read_ranges else shard.ranges
        )  # a copy of key/value heads that were read already
        read_ranges.add(shard.ranges)
        for a, b in ranges:
            low, high = max(a, first), min(b, last)
            if low < high:
                part = local(tp, (*window[:dim], (at + low - a, at + high - a), *window[dim + 1 :]))
                # The window is in one rank's part: no copy.
                if high - low == last - first:
                    return part
                if out is None:
                    out = np.empty([stop - start for start, stop in window], part.dtype)
                np.moveaxis(out, dim, 0)[low - first : high - first] = np.moveaxis(part, dim, 0)
            at += b - a
    assert out is not None
    return out


class NativeSource(WeightSource):
    """The weights of a native checkpoint as a `WeightSource`, in the dtype of the training.

    Raises `CheckpointError` if the checkpoint is not whole. A tied head is not listed.
    """

    def __init__(self, checkpoint: Place | Path | str) -> None:
        self._files = _Files(checkpoint)
        self.manifest = self._files.manifest
        self._checked: set[str] = set()
        self._read: ReadCallback | None = None
        self._lock = threading.Lock()

    @property
    def config(self) -> dict[str, Any]:
        return self._files.manifest.config

    @property
    def has_extended_rope(self) -> bool:
        return "rope" in (self.manifest.state.get("model") or {})

    def names(self) -> list[str]:
        return sorted(s.name for s in self._files.layout.shape.specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.layout.spec(name).shape

    def dtype(self, name: str) -> DType:
        return self._files.dtype_of(name)

    def check(self, name: str, tally: Tally | None = None) -> None:
        files = self._files
        if files.dcp is not None:
            files.dcp.check(name, tally)
            return
        folder = files.place.path()
        spec, ranks = files.layout.spec(name), files.layout.expert_ranks(name)
        experts = ranks if files.layout.ep > 1 and spec.of_experts else (None,)
        for tp, ep in product(range(files.tp), experts) if folder is not None else ():
            path = f"{self.manifest.root}{model_file(tp, files.layout.stages(name)[0], ep)}"
            with self._lock:  # the hash covers a whole file: check it once, not for every tensor
                if path in self._checked:
                    continue
                self._checked.add(path)
            assert folder is not None
            if path not in self.manifest.files:
                raise CheckpointError(
                    f"{folder}/{NAME} lists no {path}: take another checkpoint",
                    code="checkpoint.damaged",
                )
            check_hash(folder, path, self.manifest.files[path])

    def watch(self, read: ReadCallback) -> None:
        self._read = read

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if self._read is not None:
            self._read(name, partial(self.check, name))
        return self._files.weights(name, tuple(bounds))

    @property
    def location(self) -> Place:
        return self._files.place


class StateReader:
    """Optimizer state and fp32 weights of a native checkpoint, cut in any new way.

    Raises `CheckpointError` if the checkpoint is not whole.
    """

    def __init__(self, checkpoint: Place | Path | str) -> None:
        self._files = _Files(checkpoint)
        self.manifest = self._files.manifest
        self._at = [{name: at for name, at, _ in table} for table in self.manifest.flat]
        layout = self._files.layout
        if layout.ep > 1:
            for pp, ep in product(range(layout.pp), range(layout.ep)):
                # The manifest's tables leave out experts, whose offsets begin at 0 in a separate
                # buffer.
                self._at[pp] |= {name: at for name, at, _ in layout.flat_table(pp, ep).entries}

    def read(
        self, kind: Kind, name: str, layout: Layout, tp_rank: int, ep_rank: int = 0
    ) -> torch.Tensor:
        """Read the part of `name` on rank (`tp_rank`, `ep_rank`) of another `layout`, in fp32."""
        return dtypes.tensor(self.local(kind, name, layout, tp_rank, ep_rank), FP32)

    def wide_weight(self, name: str) -> torch.Tensor:
        """Read a whole weight that is fp32 in every precision."""
        return dtypes.tensor(self._files.weights(name), FP32)

    def local(self, kind: Kind, name: str, layout: Layout, tp_rank: int, ep_rank: int = 0) -> Bits:
        """`read`, as bits."""
        return local_part(layout, name, tp_rank, FP32, partial(self.window, kind, name), ep_rank)

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def optimizer_steps(self) -> int:
        return self.manifest.optimizer_steps

    @property
    def precision(self) -> Precision:
        return self.manifest.precision

    @property
    def loss_scale(self) -> dict[str, float] | None:
        return self.manifest.loss_scale

    @property
    def loop(self) -> dict[str, Any]:
        return self.manifest.state

    def own_part(
        self,
        dp_rank: int,
        tp_rank: int,
        pp_rank: int,
        put: Callable[[str, int, Bits], None],
        crc: bool,
    ) -> tuple[str, int | None]:
        """Read one rank's optimizer file from the first byte to the last; returns its name and,
        with `crc`, its crc32.

        `put` gets each kind's fp32 numbers in blocks, with their offset in the flat part; a block
        is valid until it returns. Kinds of experts with a separate part begin with `EXPERTS`.
        An fp32 run has its master weights in the model files. Raises `CheckpointError` if the file
        is damaged.
        """
        optimizer_path = optimizer_file(dp_rank, tp_rank, pp_rank)
        name = f"{self.manifest.root}{optimizer_path}"
        kinds = [kind for kind in KINDS if kind != "master" or self.manifest.precision != "fp32"]
        sizes: dict[str, int] = dict.fromkeys(kinds, self.manifest.shard[pp_rank])
        if self.manifest.ep > 1:
            sizes |= {f"{EXPERTS}{kind}": self._experts_shard(pp_rank) for kind in kinds}
        slabs = {kind: self._files.slab(optimizer_path, kind) for kind in sizes}
        wrong = any((s.dtype, s.shape) != (FP32, (sizes[kind],)) for kind, s in slabs.items())
        # The bytes are read without gaps: one more tensor would shift all that follow.
        if self._files.tensor_names(name) != set(sizes) or wrong:
            raise CheckpointError(
                f"{self._files.place}/{name}: its tensors are not those that {NAME} says; take"
                " another checkpoint",
                code="checkpoint.damaged",
            )
        path = self._files.place.path()
        assert path is not None
        total, buffer = 0, memoryview(bytearray(_READ))
        with open(path / name, "rb", buffering=0) as file:

            def block(size: int) -> memoryview:
                nonlocal total
                view, at = buffer[: min(size, _READ)], 0
                while at < len(view):
                    # An unbuffered read may return fewer bytes than it was asked for.
                    if not (n := file.readinto(view[at:])):
                        raise CheckpointError(
                            f"{path / name} is cut short; take another checkpoint",
                            code="checkpoint.damaged",
                        )
                    at += n
                if crc:
                    total = crc32(view, total)
                return view

            header_bytes = min(slab.offset for slab in slabs.values())
            # The crc32 is of the whole file, so the header counts too.
            while header_bytes:
                header_bytes -= len(block(header_bytes))
            for kind in sorted(sizes, key=lambda kind: slabs[kind].offset):
                at = 0
                while at < sizes[kind]:
                    numbers = np.frombuffer(block((sizes[kind] - at) * FP32.itemsize), FP32.bits)
                    put(kind, at, numbers)
                    at += len(numbers)
        return name, total if crc else None

    def check(self) -> None:
        """Raises `CheckpointError` if a file on this machine's disk is not as it was written."""
        if (folder := self._files.place.path()) is not None:
            verify(folder)

    @staticmethod
    def present(source: WeightSource) -> StateReader | None:
        """The optimizer state of a source, if it is a native checkpoint that has some."""
        if not isinstance(source, NativeSource):
            return None
        root = source.manifest.root
        has_state = source.manifest.storage == "dcp" or any(
            file.startswith(f"{root}optim/") for file in source.manifest.files
        )
        return StateReader(source.location) if has_state else None

    def window(self, kind: Kind, name: str, window: Window | None = None) -> Bits:
        """Read a window of a parameter's state, in fp32; default: all of it."""
        if self._files.dcp is not None:
            return self._files.dcp.state(kind, name, window)
        if kind == "master" and self.manifest.precision == "fp32":
            return self._files.weights(name, window)
        layout, pp = self._files.layout, self._files.layout.stages(name)[0]

        def local(ep: int | None, tp: int, part: Window) -> Bits:
            shape = layout.local_shape(name, tp)
            row = prod(shape[1:])
            (a, b), columns = part[0], part[1:]
            at = self._at[pp][name]
            rows = self._flat(kind, (ep, tp, pp), at + a * row, at + b * row).reshape(
                b - a, *shape[1:]
            )
            return rows[(slice(None), *(slice(c, d) for c, d in columns))]

        return _of_experts(layout, name, window, local)

    def _experts_shard(self, pp: int) -> int:
        """The length of a rank's part of its experts' flat buffer."""
        expert_dp = self.manifest.topology["dp"] // self.manifest.ep
        # At least 1, as in the engine's gradients.py: no rank's part of a buffer is empty.
        return max(1, -(-self._files.layout.flat_table(pp, 0).size // expert_dp))

    def _flat(self, kind: Kind, at: tuple[int | None, int, int], start: int, stop: int) -> Bits:
        """Read numbers `start:stop` of a flat buffer of rank (ep, tp, pp), across the parts of the
        ranks alike.
        """
        ep, tp, pp = at
        n = self.manifest.shard[pp] if ep is None else self._experts_shard(pp)
        stored_kind, first, rank_stride = (
            # Expert-parallel rank ep is every data-parallel rank d with d % ep_size == ep
            # (comm.py).
            (kind, 0, 1) if ep is None else (f"{EXPERTS}{kind}", ep, self.manifest.ep)
        )
        parts = [
            self._files.slab(optimizer_file(first + i * rank_stride, tp, pp), stored_kind).bits(
                [(max(start - i * n, 0), min(stop - i * n, n))]
            )
            for i in range(start // n, (stop - 1) // n + 1)
        ]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]
