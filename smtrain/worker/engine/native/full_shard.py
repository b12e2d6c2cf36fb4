"""Full sharding: weights, gradients and optimizer state of a stage are cut over the data-parallel
ranks by torch's FSDP2 (`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023, arXiv 2304.11277).

Each rank has equal rows of every parameter in fp32, which AdamW updates. FSDP2 gathers a layer's
weights in the precision of the run before its forward and backward pass, drops them afterwards, and
sums the gradients of each micro-batch into the ranks' rows in fp32. Embedding, final norm and
output matrix are one group, gathered from the first layer's forward pass to the end of the backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from smtrain.core.model.layout import FlatTable
from smtrain.worker.engine.base import OptimizerOptions
from smtrain.worker.engine.native.comm import ProcessMesh, gather_into
from smtrain.worker.engine.native.gradients import FlatParameters
from smtrain.worker.engine.native.norms import Range, merge, part_of
from smtrain.worker.engine.native.optimizer import AdamWSteps
from smtrain.worker.engine.native.replicas import GradientCopies
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
    """The stage's whole parameters by name, on the first of the ranks that share them."""

    def overlap(self, at: int, size: int) -> tuple[int, int]:
        """[start, stop) within a parameter, `size` numbers at `at` of the table, of this part."""
        return max(0, self.start - at), max(0, min(size, self.start + self.shard - at))


class ShardedRows:
    """This rank's rows of one parameter of the model, with their AdamW state."""

    def __init__(self, parameter: nn.Parameter, names: list[tuple[str, int, int]]) -> None:
        """`parameter` is FSDP2's sharded one; `names` are the parameters in files of which it
        consists, with the place and size of each in the table.
        """
        self._parameter, self.names = parameter, names
        sharded: Any = parameter
        local: torch.Tensor = sharded.to_local().detach()
        self.master = local.view(-1)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        mesh = sharded.device_mesh
        self._group: dist.ProcessGroup = mesh.get_group()
        rows, self._size = len(parameter), parameter.numel()
        # FSDP2 cuts the first dimension as torch.chunk does: equal parts, of which the last ranks
        # may have fewer rows, or 0.
        self._padded_size = -(-rows // mesh.size()) * (self._size // rows)
        self.start = min(mesh.get_local_rank() * self._padded_size, self._size)
        self._of_adamw = nn.Parameter(self.master, requires_grad=False)
        self.state = {
            "step": torch.zeros((), device=local.device),
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        self.grad = torch.zeros_like(self.master)

    @property
    def is_trained(self) -> bool:
        return self._parameter.requires_grad

    @property
    def of_adamw(self) -> nn.Parameter:
        """The rows as a parameter that AdamW updates in place."""
        return self._of_adamw

    def take_gradient(self) -> None:
        """Take the sum of the step's gradients from FSDP2; 0 if no backward pass reached the
        parameter.
        """
        grad: Any = self._parameter.grad
        self._parameter.grad = None
        self.grad = torch.zeros_like(self.master) if grad is None else grad.to_local().view(-1)
        self._of_adamw.grad = self.grad

    def pieces(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, start, stop, offset): numbers [start, stop) of `master` are those of a parameter
        in files from `offset` on.
        """
        at = 0
        for name, _, size in self.names:
            low, high = max(at, self.start), min(at + size, self.start + len(self.master))
            if low < high:
                yield name, low - self.start, high - self.start, low - at
            at += size

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """All ranks' rows of `master`, or of a moment: [numel]. Collective."""
        padded = rows.new_zeros(self._padded_size)
        padded[: len(rows)] = rows
        whole = rows.new_empty(self._padded_size * dist.get_world_size(self._group))
        gather_into(whole, padded, group=self._group)
        return whole[: self._size]

    def put(self, rows: torch.Tensor, pieces: torch.Tensor) -> None:
        """Fill `rows` from pieces [numel], of which each rank has other numbers and 0 elsewhere.

        Collective. Summed as integers: no bit changes, not even the sign of a zero.
        """
        bits = pieces.to(rows.device).view(torch.int32)
        dist.all_reduce(bits, group=self._group)
        rows.copy_(bits.view(torch.float32)[self.start : self.start + len(rows)])


def shard_fully(stage: Stage, mesh: ProcessMesh) -> dict[str, nn.Parameter]:
    """Make the rows of the parameters that a stage has on `meta`, and shard its modules.

    Returns FSDP2's parameters by their first name in files. One layer exists in full at a time.
    """
    flat_parameters = stage.trained
    places = _places(stage, flat_parameters)
    half = stage.dtype if stage.dtype != torch.float32 else None
    # `cast_forward_inputs` would round rotary embeddings and masks.
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*stage.blocks, stage):
        _make_values(module, places, mesh.device)
        fully_shard(module, mesh=mesh.shard_mesh, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the labels of all ranks, so gradients are sums.
            module.set_gradient_divide_factor(1.0)
            # Else NCCL multiplies before it adds, and gloo has no such sum.
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(stage, "gathered")
    return {name: getattr(module, key) for name, (module, key) in places.items()}


def _places(stage: Stage, flat_parameters: FlatParameters) -> dict[str, tuple[nn.Module, str]]:
    """The module and the attribute of each parameter of the model, by its first name in files."""
    by_id = {
        id(flat_parameters.leaf(name)): flat_parameters.first_name(name)
        for name, _, _ in flat_parameters.table.entries
    }
    found: dict[str, tuple[nn.Module, str]] = {}
    for module in stage.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in by_id:
                found.setdefault(by_id[id(parameter)], (module, key))
    return {name: found[name] for name in dict.fromkeys(by_id.values())}


def _make_values(
    group: nn.Module, places: dict[str, tuple[nn.Module, str]], device: torch.device
) -> None:
    """Replace a group's parameters on `meta` by fp32 zeros; a tied matrix stays one parameter."""
    made: dict[int, nn.Parameter] = {}
    for module in group.modules():
        for key, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.is_meta:
                values = made.get(id(parameter))
                if values is None:
                    zeros = torch.zeros(parameter.shape, dtype=torch.float32, device=device)
                    values = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                    made[id(parameter)] = values
                setattr(module, key, values)


class FullShard:
    """This rank's rows of all parameters of a stage."""

    def __init__(self, stage: Stage, mesh: ProcessMesh, options: OptimizerOptions) -> None:
        self._stage, self._mesh, self._device = stage, mesh, mesh.device
        flat_parameters = stage.trained
        self.table = flat_parameters.table
        names: dict[str, list[tuple[str, int, int]]] = {}
        for entry in self.table.entries:
            names.setdefault(flat_parameters.first_name(entry[0]), []).append(entry)
        parameters = shard_fully(stage, mesh)
        self.rows = {name: ShardedRows(parameters[name], names[name]) for name in names}
        self._row_of = {entry[0]: name for name in names for entry in names[name]}
        self._copies = GradientCopies(stage, flat_parameters, mesh)
        self._by_part: dict[bool, list[tuple[ShardedRows, Range]]] = {}
        self._shape = flat_parameters.layout.shape
        self._adamw = self._make_adamw(options)

    def _make_adamw(self, options: OptimizerOptions) -> torch.optim.AdamW:
        decayed, exempt = list[nn.Parameter](), list[nn.Parameter]()
        for rows in self.rows.values():
            is_decayed = rows.names[0][1] < self.table.decay_end
            if rows.is_trained and len(rows.master):
                (decayed if is_decayed else exempt).append(rows.of_adamw)
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in ((decayed, options.weight_decay), (exempt, 0.0))
            if parameters
        ]
        # A rank may have rows of no parameter.
        groups = groups or [{"params": [nn.Parameter(torch.zeros(0, device=self._device))]}]
        adamw = torch.optim.AdamW(groups, betas=options.betas, eps=options.eps, fused=True)
        for rows in self.rows.values():
            adamw.state[rows.of_adamw] = rows.state
        return adamw

    def take(self, name: str, values: torch.Tensor) -> None:
        """Start from a parameter's fp32 values."""
        rows, flat = self.rows[self._row_of[name]], values.reshape(-1)
        for piece_name, start, stop, offset in rows.pieces():
            if piece_name == name:
                rows.master[start:stop].copy_(flat[offset : offset + stop - start])

    def last_backward(self) -> None:
        """FSDP2 sums the gradients of every micro-batch."""

    def complete(self) -> None:
        """Take the gradients, and add them up over tensor-parallel ranks and both ends of the
        pipeline: each of those ranks has the same rows.
        """
        for rows in self.rows.values():
            rows.take_gradient()
        self._copies.sum({name: self.rows[self._row_of[name]].grad for name in self._copies.names})

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

    def _ranges(self, by_part: bool) -> list[tuple[ShardedRows, Range]]:
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
                        part_of(self._shape, name) if by_part else "",
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
        return all(bool(torch.isfinite(rows.master).all()) for rows in self.rows.values())

    def empty_part(self) -> FlatPart:
        """This rank's part in the order of files, of zeros: an equal part of the flat buffer that
        ZeRO-1 cuts.
        """
        ranks = self._mesh.replicas
        shard = max(1, -(-self.table.size // ranks.size))
        master, exp_avg, exp_avg_sq = torch.zeros(3, shard, device="cpu")
        return FlatPart(self.table, ranks.rank * shard, shard, master, exp_avg, exp_avg_sq)

    @torch.no_grad()
    def collect(self) -> FlatPart:
        """This rank's part in the order of files; the first rank also gets the stage's weights.

        Collective. One parameter exists in full on the device at a time.
        """
        out, layout = self.empty_part(), self._stage.trained.layout
        for rows in self.rows.values():
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                whole, offset = rows.gather(getattr(rows, kind)), 0
                for name, at, size in rows.names:
                    values = whole[offset : offset + size]
                    offset += size
                    start, stop = out.overlap(at, size)
                    if start < stop:
                        own = getattr(out, kind)[at + start - out.start : at + stop - out.start]
                        own.copy_(values[start:stop])
                    if kind == "master" and self._mesh.shard_rank == 0:
                        shape = layout.local_shape(name, self._mesh.tp_rank)
                        out.weights[name] = values.view(shape).to(
                            "cpu", self._stage.dtype, copy=True
                        )
        return out

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

    experts = None

    def __init__(self, stage: Stage, mesh: ProcessMesh, options: OptimizerOptions) -> None:
        super().__init__(mesh, options, stage.dtype)
        self.dense = FullShard(stage, mesh, options)
        self.shards = [self.dense]
