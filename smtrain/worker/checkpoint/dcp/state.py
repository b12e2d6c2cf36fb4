"""Read AdamW's state of a folder of torch.distributed.checkpoint."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role
from smtrain.core.model.footprint import Precision
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dcp.reader import DcpSource
from smtrain.worker.checkpoint.dtypes import BY_PRECISION, FLOATS, FP32, Bits
from smtrain.worker.checkpoint.huggingface.expert_tensors import split_experts
from smtrain.worker.checkpoint.sources import WeightSource, precisions_of
from smtrain.worker.checkpoint.stored_names import plain_names
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files.distributed import DistributedIndex
from smtrain.worker.checkpoint.training_state import Kind, Window, local_part, whole_window

_STATE = "optimizer.state."
_MOMENTS: tuple[Kind, ...] = ("exp_avg", "exp_avg_sq")


class DcpState:
    """AdamW's state as a `TrainingState`.

    A run that resumes from it has no position in the data: it begins with the first sample. Raises
    CheckpointError for another optimizer's state, and if a parameter has none.
    """

    def __init__(self, source: DcpSource, index: DistributedIndex) -> None:
        self._source, self._index = source, index
        self._shape = ModelShape.from_config(source.config)
        self._slabs: dict[tuple[str, str], Slab] = {}
        slabs = self._find_slabs()
        unknown_kinds = sorted({kind for _, kind in slabs} - {*_MOMENTS, "step"})
        if unknown_kinds:
            raise self._error(
                f"holds the optimizer state {', '.join(unknown_kinds)[:200]}, which AdamW does not have"
            )
        names = self._plain({name for name, _ in slabs})
        for (name, kind), slab in slabs.items():
            if kind == "step":
                self._slabs[names[name], kind] = slab
                continue
            for part, part_slab in self._experts({names[name]: slab}).items():
                self._slabs[part, kind] = part_slab
        for spec in self._shape.specs:
            for kind in () if spec.role is Role.ROUTER_BIAS else _MOMENTS:
                moment = self._slabs.get((spec.name, kind))
                if moment is None or moment.shape != spec.shape or moment.dtype not in FLOATS:
                    moment_text = (
                        "no" if moment is None else f"{moment.dtype} {list(moment.shape)} as"
                    )
                    raise self._error(f"has {moment_text} {kind} of {spec.name}")
        self.optimizer_steps = self._steps()
        step = index.value("train_state.step") if "train_state.step" in index.objects else None
        self.step: int = step if type(step) is int and step >= 0 else self.optimizer_steps
        self.loss_scale: dict[str, float] | None = None

    @staticmethod
    def present(source: WeightSource) -> DcpState | None:
        """The optimizer state of a source, if it is such a folder and has some."""
        index = source.optimizer_index() if isinstance(source, DcpSource) else None
        if index is None or not any(key.startswith(_STATE) for key in index.sizes):
            return None
        assert isinstance(source, DcpSource)
        return DcpState(source, index)

    @property
    def precision(self) -> Precision:
        stored_dtypes = precisions_of(self._source)
        precisions = [name for name, dtype in BY_PRECISION.items() if stored_dtypes == {dtype}]
        # With several types the weights are widened to fp32, which holds every number of them.
        return precisions[0] if precisions else "fp32"

    @property
    def loop(self) -> dict[str, Any]:
        # No samples in `step` steps: the data of the run that wrote it is not known here.
        return {"imported": True, "spans": [[self.step, 0]], "samples": 0}

    def check(self) -> None:
        """Raises `CheckpointError` if the bytes of a chunk are not those of its checksum."""
        for (name, kind), slab in self._slabs.items():
            slab.check(f"{kind} of {name}")

    def window(self, kind: Kind, name: str, window: Window | None = None) -> Bits:
        """Read a window of a parameter's state, in fp32; default: all of it."""
        bounds = window or whole_window(self._source.shape(name))
        if kind == "master":
            return dtypes.cast(self._source.bits(name, bounds), self._source.dtype(name), FP32)
        slab = self._slabs[name, kind]
        return dtypes.cast(slab.bits(bounds), slab.dtype, FP32)

    def local(self, kind: Kind, name: str, layout: Layout, tp_rank: int, ep_rank: int = 0) -> Bits:
        """Read the part of a parameter's state on rank (`tp_rank`, `ep_rank`), in fp32."""
        return local_part(layout, name, tp_rank, FP32, partial(self.window, kind, name), ep_rank)

    def _find_slabs(self) -> dict[tuple[str, str], Slab]:
        """(name, kind) -> slab, of every tensor of state."""
        out: dict[tuple[str, str], Slab] = {}
        for key in self._index.sizes:
            if not key.startswith(_STATE):
                continue
            name, _, kind = key.removeprefix(_STATE).rpartition(".")
            slab = self._source.slab_of(self._index, key)
            # A step is a single number, also that of a fused tensor.
            if not self._source.is_titan:
                parts = {name: slab}
            elif kind == "step":
                parts = dict.fromkeys(self._source.titan_names(name, self._shape), slab)
            else:
                parts = self._source.titan_slabs(name, slab, self._shape)
            out |= {(part, kind): part_slab for part, part_slab in parts.items()}
        return out

    def _experts(self, slabs: dict[str, Slab]) -> dict[str, Slab]:
        return slabs if self._shape.experts is None else split_experts(slabs, self._shape)

    def _plain(self, names: set[str]) -> dict[str, str]:
        if self._source.is_titan:
            return {name: name for name in names}
        modules = plain_names(sorted(names), self._shape, self._source.location)
        return {name: self._shape.file_name(module) for name, module in modules.items()}

    def _steps(self) -> int:
        """Updates so far, which must be the same for all parameters."""
        counts = {
            float(np.ravel(dtypes.values(slab.read_all(), slab.dtype))[0])
            for (_, kind), slab in self._slabs.items()
            if kind == "step"
        }
        if len(counts) != 1 or not (count := counts.pop()).is_integer() or count < 0:
            raise self._error("has no number of updates that holds for all parameters")
        return int(count)

    def _error(self, fault: str) -> CheckpointError:
        return CheckpointError(
            f"{self._source.location} {fault}, so training cannot resume from it; convert it to hf,"
            " which takes the weights only.",
            code="checkpoint.other_model",
        )
