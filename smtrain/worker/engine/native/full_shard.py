"""AdamW with full sharding: weights, gradients and optimizer state of a stage are cut over the
data-parallel ranks (`sharded_weights`).

Each rank has rows of every parameter in fp32, which AdamW updates. Checkpoints have the files of
ZeRO-1, whose parts are made from the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.base import OptimizerOptions
from smtrain.worker.engine.native.comm import ProcessMesh, ReplicaGroup
from smtrain.worker.engine.native.gradients import FlatParameters
from smtrain.worker.engine.native.norms import Range, is_finite, merge, part_of
from smtrain.worker.engine.native.optimizer import AdamWSteps
from smtrain.worker.engine.native.replicas import GradientCopies
from smtrain.worker.engine.native.sharded_weights import (
    ShardedRows,
    ShardedWeights,
    shard_fully,
)
from smtrain.worker.engine.native.stage import Stage


@dataclass
class FlatPart:
    """A rank's part of the optimizer's state in the order of files, on the host: fp32 [shard]."""

    table: FlatTable
    start: int
    shard: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The whole parameters by name, on the first of the ranks that share them."""

    def overlap(self, at: int, size: int) -> tuple[int, int]:
        """[start, stop) within a parameter, `size` numbers at `at` of the table, of this part."""
        return max(0, self.start - at), max(0, min(size, self.start + self.shard - at))


class TrainedRows(ShardedRows):
    """This rank's fp32 rows of one trained parameter, with their gradient and AdamW state."""

    def __init__(
        self, parameter: nn.Parameter, names: list[tuple[str, int, int]], replicas: ReplicaGroup
    ) -> None:
        super().__init__(parameter, names, replicas)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.of_adamw = nn.Parameter(self.master, requires_grad=False)
        """The rows as a parameter that AdamW updates in place."""
        self.state = {
            "step": torch.zeros((), device=self.master.device),
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        self.grad = self.master[:0]

    @property
    def is_trained(self) -> bool:
        return self._parameter.requires_grad

    def take_gradient(self) -> None:
        """Take the sum of the step's gradients from FSDP2; 0 if no backward pass reached the
        parameter.
        """
        grad: Any = self._parameter.grad
        self._parameter.grad = None
        self.grad = torch.zeros_like(self.master) if grad is None else grad.to_local().view(-1)
        self.of_adamw.grad = self.grad


class FullShard(ShardedWeights[TrainedRows]):
    """This rank's part of the optimizer's state: its rows of parameters that the same ranks
    divide.
    """

    def __init__(
        self,
        stage: Stage,
        flat_parameters: FlatParameters,
        parameters: Mapping[str, nn.Parameter],
        mesh: ProcessMesh,
        options: OptimizerOptions,
    ) -> None:
        super().__init__(flat_parameters, parameters, TrainedRows)
        self._stage, self._mesh, self._device = stage, mesh, mesh.device
        self.table, self._layout = flat_parameters.table, flat_parameters.layout
        self.replicas = flat_parameters.replicas
        self._copies = GradientCopies(stage, flat_parameters, mesh)
        self._by_part: dict[bool, list[tuple[TrainedRows, Range]]] = {}
        self._adamw = self._make_adamw(options)

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        decay_parameters, other_parameters = list[nn.Parameter](), list[nn.Parameter]()
        for rows in self.rows.values():
            is_decayed = rows.names[0][1] < self.table.decay_end
            if rows.is_trained and len(rows.master):
                (decay_parameters if is_decayed else other_parameters).append(rows.of_adamw)
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in (
                (decay_parameters, options.weight_decay),
                (other_parameters, 0.0),
            )
            if parameters
        ]
        # A rank may have rows of no parameter.
        groups = groups or [{"params": [nn.Parameter(torch.zeros(0, device=self._device))]}]
        adamw = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, fused=True)
        for rows in self.rows.values():
            adamw.state[rows.of_adamw] = rows.state
        return adamw

    def last_backward(self) -> None:
        """FSDP2 sums the gradients of every micro-batch."""

    def complete(self) -> None:
        """Take the gradients, and add them up over tensor-parallel ranks and both ends of the
        pipeline: each of those ranks has the same rows.
        """
        for rows in self.rows.values():
            rows.take_gradient()
        self._copies.sum({name: self.rows_with(name).grad for name in self._copies.names})

    def finish(self) -> None:
        """FSDP2 has summed the gradients in the backward passes."""

    def add_squares(self, total: torch.Tensor) -> None:
        """Add the squares of this rank's gradients to `total`."""
        for rows, range_ in self._ranges(by_part=False):
            total += range_.square(rows.grad)

    def squares(self, by_part: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The squares of this rank's trained parameters."""
        for rows, range_ in self._ranges(by_part):
            yield range_.part, range_.square(rows.master)

    def _ranges(self, by_part: bool) -> list[tuple[TrainedRows, Range]]:
        if by_part not in self._by_part:
            self._by_part[by_part] = [
                (rows, range_)
                for rows in self.rows.values()
                if rows.is_trained
                for range_ in merge(
                    (
                        start,
                        stop,
                        self._copies.weights[name],
                        part_of(self._layout.shape, name) if by_part else "",
                    )
                    for name, start, stop, _ in rows.pieces()
                )
                if range_.weight
            ]
        return self._by_part[by_part]

    def update(
        self, lr: float, divisor: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        """Divide the gradients by `divisor`, and update this rank's rows."""
        adamw: Any = self._adamw
        adamw.found_inf = found_inf  # fused AdamW skips the step, as with GradScaler
        adamw.grad_scale = divisor
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for rows in self.rows.values():
            rows.of_adamw.grad = None
            rows.grad = rows.master[:0]
        self.publish()

    def publish(self) -> None:
        """Drop gathered weights, which are out of date."""
        module: Any = self._stage
        module.reshard()

    def settle(self) -> None:
        """Weights are gathered when a layer needs them."""

    def set_step_count(self, steps: int) -> None:
        """Set the number of updates so far."""
        for rows in self.rows.values():
            rows.state["step"].fill_(steps)

    def is_finite(self) -> bool:
        """Whether this rank's rows are finite numbers."""
        return all(is_finite(rows.master) for rows in self.rows.values())

    def empty_part(self) -> FlatPart:
        """This rank's part in the order of files, of zeros: an equal part of the flat buffer that
        ZeRO-1 cuts.
        """
        shard = max(1, -(-self.table.size // self.replicas.size))
        master, exp_avg, exp_avg_sq = torch.zeros(3, shard, device="cpu")
        return FlatPart(self.table, self.replicas.rank * shard, shard, master, exp_avg, exp_avg_sq)

    @torch.no_grad()
    def collect(self, out: FlatPart) -> None:
        """Fill this rank's part in the order of files; the first rank also gets the whole weights.

        Collective. One parameter exists in full on the device at a time.
        """
        for rows in self.rows.values():
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                parameter, offset = rows.gather(getattr(rows, kind)), 0
                for name, at, size in rows.names:
                    values = parameter[offset : offset + size]
                    offset += size
                    start, stop = out.overlap(at, size)
                    if start < stop:
                        target = getattr(out, kind)[at + start - out.start : at + stop - out.start]
                        target.copy_(values[start:stop])
                    if kind == "master" and self.replicas.rank == 0:
                        shape = self._layout.local_shape(name, self._mesh.tp_rank)
                        if name not in out.weights:
                            out.weights[name] = torch.empty(
                                shape, dtype=self._stage.dtype, device="cpu"
                            )
                        out.weights[name].copy_(values.view(shape))

    @torch.no_grad()
    def distribute(self, flat_part: FlatPart) -> None:
        """Fill the rows of all ranks from their parts in the order of files. Collective."""
        for rows in self.rows.values():
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                pieces, offset = torch.zeros(sum(size for *_, size in rows.names)), 0
                for _, at, size in rows.names:
                    start, stop = flat_part.overlap(at, size)
                    if start < stop:
                        first = at + start - flat_part.start
                        values = getattr(flat_part, kind)[first : first + stop - start]
                        pieces[offset + start : offset + stop] = values
                    offset += size
                rows.put(getattr(rows, kind), pieces)


class FullShardAdamW(AdamWSteps):
    """The optimizer of one rank, which also holds its weights."""

    def __init__(self, stage: Stage, mesh: ProcessMesh, options: OptimizerOptions) -> None:
        super().__init__(mesh, options, stage.dtype)
        parameters, experts = shard_fully(stage, mesh), stage.trained_experts
        self.dense = FullShard(stage, stage.trained, parameters, mesh, options)
        self.experts = (
            None if experts is None else FullShard(stage, experts, parameters, mesh, options)
        )
        self.shards: list[FullShard] = [self.dense, *([self.experts] if self.experts else [])]
