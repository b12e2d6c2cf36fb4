"""Gradients of parameters that several tensor-parallel or pipeline ranks hold, and the weight of
each parameter in norms of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.gradients import FlatParameters
from smtrain.worker.engine.native.stage import Stage
from smtrain.worker.engine.step_timing import part


class GradientCopies:
    """The parameters of a stage whose gradients are sums over other ranks than the data-parallel
    ones.
    """

    def __init__(self, stage: Stage, flat_parameters: FlatParameters, mesh: ProcessMesh) -> None:
        """Collective: makes the groups."""
        layout = flat_parameters.layout
        self._tp_group = mesh.tp_group
        kv_heads = [kind.kv_heads for kind in layout.shape.kinds]
        self.weights: dict[str, float] = {}
        """The weight of each number of a parameter in norms, by which it counts once."""
        self._partial: list[str] = []
        self._copied: dict[int, list[str]] = {count: [] for count in kv_heads}
        self._tied: list[str] = []
        for name, _, _ in flat_parameters.table.entries:
            cut = layout.shard(name, mesh.tp_rank)
            self.weights[name] = 1.0 / cut.copies
            if cut.dim is None and (cut.partial or stage.sequence_parallel):
                # A replicated parameter has partial gradients if it is `partial`, or if each rank
                # saw only its tokens.
                self._partial.append(name)
            elif cut.dim is not None and cut.copies > 1:
                self._copied[layout.kind(name).kv_heads].append(name)
            if len(layout.stages(name)) > 1:
                # Tied embeddings live on the first and the last stage: each has part of the
                # gradient, and the first counts it in the norm.
                self._tied.append(name)
                self.weights[name] *= stage.first
        self._copies_groups = {
            count: mesh.subgroup("tp", layout.kv_groups(count)) for count in kv_heads
        }
        ends = [(0, mesh.pp - 1)] if layout.shape.tied and mesh.pp > 1 else []
        self._tied_group = mesh.subgroup("pp", ends)

    @property
    def names(self) -> set[str]:
        """The parameters that `sum` sums; their gradients are complete after it only."""
        return {*self._partial, *self._tied, *(n for names in self._copied.values() for n in names)}

    def sum(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add up the gradients of `names`, or the same part of each on all ranks, in place."""
        with part("tensor parallel"):
            _all_reduce([gradients[name] for name in self._partial], self._tp_group)
            for count, names in self._copied.items():
                _all_reduce([gradients[name] for name in names], self._copies_groups[count])
        with part("pipeline"):
            _all_reduce([gradients[name] for name in self._tied], self._tied_group)


def _all_reduce(views: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum each of `views` over the group, in one message."""
    if not views or group is None or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([v.reshape(-1) for v in views])
    if not len(flat):  # ranks without a row of any of them
        return
    dist.all_reduce(flat, group=group)
    at = 0
    for view in views:
        view.copy_(flat[at : at + view.numel()].view_as(view))
        at += view.numel()
