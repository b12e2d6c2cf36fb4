"""The peak of tensor memory of a rank: bytes of every storage that an operator made, from its making to its end.

Counted at torch's dispatcher, forward and backward, so it is what an accelerator's caching allocator reports as peak
allocated memory but for scratch inside kernels, and does not depend on the machine. What gloo and Python hold outside
tensors is not in it. (The allocator's own profile, `torch.profiler(profile_memory=True)`, gives the same figures to
0.1 % for one process, but loses count where gloo's threads release what this thread allocated.)
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smtrain.engine.base import OptimizerOptions, ParallelOptions
from smtrain.engine.native import NativeEngine


class Held(TorchDispatchMode):
    """Counts the bytes of living storages."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.top = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
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


def peak(rank: int, config: dict[str, Any], options: ParallelOptions, batch: int, seq_len: int) -> tuple[int, int, int]:
    """(pipeline stage, bytes between steps, peak bytes in a step) of this rank; `batch` samples for each dp rank."""
    with Held() as held:
        engine = NativeEngine(config, options, OptimizerOptions(), None, 0)
        ids = torch.randint(config["vocab_size"], (batch, seq_len), generator=torch.Generator().manual_seed(rank))
        engine.step(ids, ids, 1e-4)
        state, held.top = held.now, held.now
        engine.step(ids, ids, 1e-4)
    return engine.mesh.pp_rank, state, held.top
