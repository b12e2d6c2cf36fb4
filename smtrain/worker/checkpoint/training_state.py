"""The optimizer's state next to a model's weights, whatever its files look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np

from smtrain.core.model.footprint import Precision
from smtrain.core.model.layout import Layout
from smtrain.worker.checkpoint.dtypes import Bits, DType

Kind = Literal["master", "exp_avg", "exp_avg_sq"]
KINDS: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")
Window = tuple[tuple[int, int], ...]  # (start, stop) along every dimension


class TrainingState(Protocol):
    """AdamW's state and the fp32 weights of a training, under Hugging Face names."""

    @property
    def step(self) -> int:
        """The step of the training loop."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Updates so far; in fp16 some steps have none."""
        ...

    @property
    def precision(self) -> Precision:
        """The type of the weights; in fp32 they are the masters."""
        ...

    @property
    def loss_scale(self) -> dict[str, float] | None:
        """`Manifest.loss_scale`."""
        ...

    @property
    def loop(self) -> dict[str, Any]:
        """The training loop's own state, `Manifest.state`."""
        ...

    def check(self) -> None:
        """Raises `CheckpointError` if the bytes are not those that were written."""
        ...

    def window(self, kind: Kind, name: str, window: Window | None = None) -> Bits:
        """Read a window of a parameter's state, in fp32; default: all of it."""
        ...

    def local(self, kind: Kind, name: str, layout: Layout, tp_rank: int, ep_rank: int = 0) -> Bits:
        """Read the part of a parameter's state on rank (`tp_rank`, `ep_rank`), in fp32."""
        ...


def whole_window(shape: tuple[int, ...]) -> Window:
    """The window of all elements."""
    return tuple((0, n) for n in shape)


def local_part(
    layout: Layout,
    name: str,
    tp_rank: int,
    dtype: DType,
    read: Callable[[Window], Bits],
    ep_rank: int = 0,
) -> Bits:
    """Assemble the part of a parameter on a rank from windows of the whole, which `read` gives."""
    shard, spec = layout.shard(name, tp_rank), layout.spec(name)
    window = whole_window(spec.shape)
    if spec.is_stacked:
        local_experts = layout.experts(ep_rank)
        window = (local_experts.start, local_experts.stop), *window[1:]
    if shard.dim is None:
        return read(window)
    out: Bits = np.zeros(layout.local_shape(name, tp_rank), dtype.bits)
    along, at = np.moveaxis(out, shard.dim, 0), 0
    for start, stop in shard.ranges:
        if start < stop:
            part = read((*window[: shard.dim], (start, stop), *window[shard.dim + 1 :]))
            along[at : at + stop - start] = np.moveaxis(part, shard.dim, 0)
        at += stop - start
    return out
