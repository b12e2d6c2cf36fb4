"""Read the files of a native checkpoint that are folders of torch.distributed.checkpoint."""

from __future__ import annotations

import threading
from math import prod

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.dcp.module_names import module_tensors
from smtrain.worker.checkpoint.dcp.reader import DcpSource
from smtrain.worker.checkpoint.dtypes import FP32, Bits, DType, cast
from smtrain.worker.checkpoint.huggingface.expert_tensors import ExpertRows
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.storage import Place
from smtrain.worker.checkpoint.tensor_ranges import Slab, Tally
from smtrain.worker.checkpoint.training_state import Kind, Window, whole_window


class DcpFiles:
    """The fp32 weights and AdamW's moments under Hugging Face names.

    Raises `CheckpointError` if a parameter is missing or of another shape than the manifest says.
    """

    def __init__(self, location: Place, manifest: Manifest) -> None:
        root = manifest.root.rstrip("/")
        place = location.subfolder(root) if root else location
        self._source = DcpSource(place, manifest.config)
        index = self._source.optimizer_index()
        if index is None:
            raise CheckpointError(
                f"{place} has no optimizer state: take another checkpoint",
                code="checkpoint.damaged",
            )
        self._index = index
        modules = module_tensors(self._source.text_shape)
        self._modules = {part: module for module in modules for part in module.parts}
        self._moments: dict[tuple[Kind, str], Slab] = {}
        self._lock = threading.Lock()

    def weights(self, name: str, window: Window | None, dtype: DType) -> Bits:
        """Read a window of a parameter, rounded to `dtype` as the run rounds its masters."""
        return cast(self.state("master", name, window), FP32, dtype)

    def state(self, kind: Kind, name: str, window: Window | None = None) -> Bits:
        """Read a window of a parameter's state, in fp32; default: all of it."""
        bounds = window or whole_window(self._source.shape(name))
        if kind == "master":
            return self._source.bits(name, bounds)
        return self._moment(kind, name).bits(bounds)

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises `CheckpointError` if a parameter's bytes do not match their checksums."""
        self._source.check(name, tally)

    def _moment(self, kind: Kind, name: str) -> Slab:
        module = self._modules[name]
        with self._lock:
            if (kind, name) not in self._moments:
                key = f"optimizer.state.{module.name}.{kind}"
                if self._index.sizes.get(key) != module.shape:
                    raise CheckpointError(
                        f"{self._source.location} has no {kind} of {name}: take another checkpoint",
                        code="checkpoint.damaged",
                    )
                slab, at = self._source.slab_of(self._index, key), 0
                for part in module.parts:
                    shape = self._source.shape(part)
                    is_whole = not module.is_stack
                    self._moments[kind, part] = slab if is_whole else ExpertRows.of(slab, at, shape)
                    at += prod(shape)
            return self._moments[kind, name]
