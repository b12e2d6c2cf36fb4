"""Weights of a stage whose rows are cut over the data-parallel ranks by torch's FSDP2
(`torch.distributed.fsdp.fully_shard`; Zhao et al. 2023, arXiv 2304.11277).

FSDP2 gathers a layer's weights in the precision of the run before its forward and backward pass,
drops them afterwards, and sums the gradients of each micro-batch into the ranks' rows in fp32. The
frozen weights under an adapter are cut in the same way.
Embedding, final norm and output matrix are one group, gathered from the first layer's forward pass
to the end of the backward pass. With expert parallelism the experts of a layer are another group
than the rest of it, cut over the ranks that have the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from smtrain.worker.engine.native.comm import ProcessMesh, ReplicaGroup, gather_into
from smtrain.worker.engine.native.gradients import FlatParameters
from smtrain.worker.engine.native.local_experts import LocalExperts
from smtrain.worker.engine.native.stage import Stage


class ShardedRows:
    """This rank's rows of one parameter of the model."""

    def __init__(
        self, parameter: nn.Parameter, names: list[tuple[str, int, int]], replicas: ReplicaGroup
    ) -> None:
        """`parameter` is FSDP2's sharded one; `names` are the parameters in files of which it
        consists, with the place and size of each in the table. `replicas` divide it.
        """
        self._parameter, self.names = parameter, names
        dtensor: Any = parameter
        local: torch.Tensor = dtensor.to_local().detach()
        self.master = local.view(-1)
        """The rows themselves; of trained weights in fp32."""
        self._replicas = replicas
        rows, self._size = len(parameter), parameter.numel()
        # FSDP2 cuts the first dimension as torch.chunk does: equal parts, of which the last ranks
        # may have fewer rows, or 0.
        self._padded_size = -(-rows // replicas.size) * (self._size // rows)
        self.start = min(replicas.rank * self._padded_size, self._size)

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
        if self._replicas.group is None:
            return rows
        padded_rows = rows.new_zeros(self._padded_size)
        padded_rows[: len(rows)] = rows
        gathered_rows = rows.new_empty(self._padded_size * self._replicas.size)
        gather_into(gathered_rows, padded_rows, group=self._replicas.group)
        return gathered_rows[: self._size]

    def put(self, rows: torch.Tensor, pieces: torch.Tensor) -> None:
        """Fill `rows` from pieces [numel] of the host, of which each rank has other numbers and 0
        elsewhere.

        Collective. Summed as bits: none changes, not even the sign of a zero.
        """
        group = self._replicas.group
        if group is None:
            rows.copy_(pieces)
            return
        bits = pieces.view(torch.int32)
        if rows.device.type == "neuron":
            # Its collectives sum fp32 only, in which sums of 16 bits are exact.
            halves = torch.cat([(bits >> 16) & 0xFFFF, bits & 0xFFFF]).float().to(rows.device)
            dist.all_reduce(halves, group=group)
            high, low = halves.cpu().long().chunk(2)
            bits = (high << 16 | low).to(torch.int32)
        else:
            bits = bits.to(rows.device)
            dist.all_reduce(bits, group=group)
        rows.copy_(bits.view(torch.float32)[self.start : self.start + len(rows)])


AnyRows = TypeVar("AnyRows", bound=ShardedRows)


class ShardedWeights(Generic[AnyRows]):
    """This rank's rows of parameters of a stage that the same ranks divide."""

    def __init__(
        self,
        flat_parameters: FlatParameters,
        parameters: Mapping[str, nn.Parameter],
        rows_type: type[AnyRows],
    ) -> None:
        """`parameters` are those of `shard_fully`."""
        names: dict[str, list[tuple[str, int, int]]] = {}
        for entry in flat_parameters.table.entries:
            names.setdefault(flat_parameters.first_name(entry[0]), []).append(entry)
        replicas = flat_parameters.replicas
        self.rows = {name: rows_type(parameters[name], names[name], replicas) for name in names}
        """By the first name in files of each parameter of the model."""
        self._first_names = {entry[0]: name for name in names for entry in names[name]}

    def rows_with(self, name: str) -> AnyRows:
        """The rows of the model's parameter that has one of files."""
        return self.rows[self._first_names[name]]

    def take(self, name: str, values: torch.Tensor) -> None:
        """Start from a parameter's fp32 values, if it is one of these."""
        if name not in self._first_names:
            return
        rows, flat = self.rows_with(name), values.reshape(-1)
        for piece_name, start, stop, offset in rows.pieces():
            if piece_name == name:
                rows.master[start:stop].copy_(flat[offset : offset + stop - start])


def shard_fully(stage: Stage, mesh: ProcessMesh) -> dict[str, nn.Parameter]:
    """Make the rows of the parameters that a stage has on `meta`, and shard its modules: FSDP2 has
    them from now on.

    Returns FSDP2's parameters by their first name in files. One layer exists in full at a time.
    """
    places = _places(stage, stage.dense) | _places(stage, stage.experts)
    # Frozen weights need no masters: their rows are in the precision of the run already.
    half = stage.dtype if stage.dtype != stage.dense.flat.dtype else None
    # `cast_forward_inputs` would round rotary embeddings and masks.
    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*stage.blocks, stage):
        _make_values(module, mesh.device)
        for part in module.modules() if mesh.ep > 1 else ():
            if isinstance(part, LocalExperts) and not isinstance(part, FSDPModule):
                # Also if the group is one rank, which cuts nothing: it keeps fp32 masters so.
                fully_shard(part, mesh=mesh.expert_mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh.shard_mesh, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the labels of all ranks, so gradients are sums.
            module.set_gradient_divide_factor(1.0)
            # Else NCCL multiplies before it adds, and gloo has no such sum.
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(stage, "run_gathered")
    return {name: getattr(module, key) for name, (module, key) in places.items()}


def _places(stage: Stage, flat_parameters: FlatParameters) -> dict[str, tuple[nn.Module, str]]:
    """The module and the attribute of each parameter of the model, by its first name in files."""
    by_id = {
        id(flat_parameters.leaf(name)): flat_parameters.first_name(name)
        for name, _, _ in flat_parameters.table.entries
    }
    owners: dict[str, tuple[nn.Module, str]] = {}
    for module in stage.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in by_id:
                owners.setdefault(by_id[id(parameter)], (module, key))
    return {name: owners[name] for name in dict.fromkeys(by_id.values())}


def _make_values(group: nn.Module, device: torch.device) -> None:
    """Replace a group's parameters on `meta` by zeros; a tied matrix stays one parameter."""
    new_parameters: dict[int, nn.Parameter] = {}
    for module in group.modules():
        for key, parameter in [*module.named_parameters(recurse=False)]:
            if parameter.is_meta:
                values = new_parameters.get(id(parameter))
                if values is None:
                    zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                    values = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
                    new_parameters[id(parameter)] = values
                setattr(module, key, values)
