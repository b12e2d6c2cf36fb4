"""Device and process group, the mesh, and the tensor-parallel collectives with their gradients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smtrain.core.errors import ConfigError
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.saving import local_rank, raise_any
from smtrain.worker.engine.step_timing import part

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "neuron": "neuron"}
# torch 2.13 renamed the two collectives on one tensor; older ones are met in today's Neuron images.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SEQ = 1  # the sequence dimension of hidden states [B, S, H]
COMPILATION = timedelta(hours=2)
"""Time limit of a collective on Neuron, as other stages compile for up to 50 minutes (AWS's
tutorial of Wan 2.2).
"""
_WORD = 1 << 12
"""A count travels as two fp32 numbers, its multiple of this and the rest, whose sums are exact up
to 2**24 each.
"""


def init_distributed(device_type: str | None = None) -> torch.device:
    """Join the job that torchrun describes in the environment, or be a job of one; returns this
    rank's device.

    `device_type` defaults to this machine's accelerator, or the CPU. Safe to call twice. Raises
    `ConfigError` if more processes run on this host than it has devices, or the device is of a kind
    unknown.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = device_type or (accelerator.type if accelerator is not None else "cpu")
    if kind not in BACKENDS:
        raise ConfigError(
            [
                f"the native engine has no backend for device {kind!r}: take one of"
                f" {', '.join(BACKENDS)}"
            ],
            code="config.wrong_value",
        )
    if not dist.is_initialized():
        options: dict[str, Any] = {"timeout": COMPILATION} if kind == "neuron" else {}
        if "RANK" not in os.environ:
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        # Before the first use of the device: TorchNeuron gives the process its core here.
        dist.init_process_group(BACKENDS[kind], **options)
        if kind == "cpu":
            # gloo connects here, before a rank that fails at once can close a connection that
            # another still opens
            dist.barrier()
    if kind == "cpu":
        return torch.device("cpu")
    local, count = local_rank(), torch.accelerator.device_count()
    if local >= count:
        raise ConfigError(
            [
                f"this host has {count} {kind} devices and more processes: run at most {count}"
                " processes on a host"
            ],
            code="config.combination",
        )
    torch.accelerator.set_device_index(local)
    return torch.device(kind, local)


def current_device() -> torch.device:
    """The device of this rank's process group."""
    kind = next(k for k, backend in BACKENDS.items() if backend == dist.get_backend())
    return (
        torch.device("cpu")
        if kind == "cpu"
        else torch.device(kind, torch.accelerator.current_device_index())
    )


def be_deterministic(deterministic: bool) -> None:
    """Use only kernels that return the same bits each time, on accelerators; CPUs do so anyway.

    Otherwise threads add to the same number in any order, above all in the backward passes of
    embeddings and attention. torch raises RuntimeError later, naming the operation, if it has no
    such kernel.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # saves a pass over memory


_host_group: tuple[Any, dist.ProcessGroup] | None = None


def host_group() -> dist.ProcessGroup | None:
    """The group of all ranks over gloo, for what must not wait for the device; None: the job's own
    group is that.

    Collective at its first call in a job.
    """
    global _host_group
    if dist.get_backend() == "gloo":
        return None
    if _host_group is None or _host_group[0] is not dist.group.WORLD:
        _host_group = dist.group.WORLD, dist.new_group(backend="gloo")
    return _host_group[1]


def gather(value: Any) -> list[Any]:
    """Everyone's `value`, by rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value, group=host_group())
    return out


class ReplicaGroup(NamedTuple):
    """The ranks that hold the same parameters: they add up gradients and share the optimizer's
    state.
    """

    size: int
    rank: int
    """The place of this rank among them."""
    group: dist.ProcessGroup | None
    """None if this rank is the only one."""


class ProcessMesh:
    """The (pp, dp, cp, tp) grid of all ranks, tp innermost, with this rank's place and its groups.

    Ranks that differ in dp and cp only hold the same parameters: they share the optimizer's state
    (`shards`).
    """

    def __init__(self, options: ParallelOptions, device: torch.device) -> None:
        self.tp, self.pp, self.dp, self.cp = options.tp, options.pp, options.dp, options.cp
        self.world_size, self.rank, self.device = dist.get_world_size(), dist.get_rank(), device
        if self.tp * self.pp * self.dp * self.cp != self.world_size:
            names, sizes = "tp x pp x dp", f"{self.tp} x {self.pp} x {self.dp}"
            if self.cp > 1:
                names, sizes = "tp x pp x cp x dp", f"{self.tp} x {self.pp} x {self.cp} x {self.dp}"
            raise ConfigError(
                [f"parallel.{names} = {sizes} must be the number of processes, {self.world_size}"],
                code="config.combination",
            )
        self.shards = self.dp * self.cp
        self._grid: DeviceMesh = init_device_mesh(
            device.type, (self.pp, self.shards, self.tp), mesh_dim_names=("pp", "shard", "tp")
        )
        self.tp_rank, self.pp_rank, self.shard_rank = (
            self._grid.get_local_rank(a) for a in ("tp", "pp", "shard")
        )
        self.tp_group, self.pp_group, self.shard_group = (
            self._grid.get_group(a) for a in ("tp", "pp", "shard")
        )
        self.shard_mesh = self._grid["shard"]
        """The ranks that hold the same parameters, or with full sharding their rows."""
        self.dp_rank, self.cp_rank = divmod(self.shard_rank, self.cp)
        of_cp = [range(first, first + self.cp) for first in range(0, self.shards, self.cp)]
        self.cp_group = self.subgroup("shard", of_cp)
        """The ranks that share this one's sequences; None if cp is 1."""
        self.ep = options.ep
        self.replicas = ReplicaGroup(self.shards, self.shard_rank, self.shard_group)
        self.expert_replicas, self.ep_rank, self.ep_group = self.replicas, 0, self.shard_group
        self.expert_mesh = self.shard_mesh
        """The ranks that hold the same experts, or with full sharding their rows."""
        if self.ep > 1:
            self._divide_experts()
        if self.pp > 1:
            # NCCL makes a group's communicator at its first use, in which all ranks must take part;
            # the pipeline's own first messages go between some of them only.
            dist.all_reduce(torch.zeros(1, device=device), group=self.pp_group)
        self._host = host_group()

    def own_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, S / cp, ...] of whole rows [B, S, ...]."""
        return (
            rows
            if self.cp == 1
            else self.by_rank(rows, 1).chunk(self.cp, 1)[self.cp_rank].contiguous()
        )

    def own_pieces(self, length: int) -> list[tuple[int, int]]:
        """[start, stop) in the row of each piece of this rank's tokens, of a row of `length`
        tokens.
        """
        order = self._order(length)
        size, pieces_per_rank = length // len(order), len(order) // self.cp
        own_numbers = order[self.cp_rank * pieces_per_rank : (self.cp_rank + 1) * pieces_per_rank]
        return [(piece * size, (piece + 1) * size) for piece in own_numbers]

    def by_rank(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Rows whose tokens lie along `dim`, with the tokens of rank 0 first, then those of rank 1,
        and so on.
        """
        order = self._order(rows.shape[dim])
        pieces = rows.chunk(len(order), dim)
        return torch.cat([pieces[piece] for piece in order], dim)

    def in_row_order(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """The opposite of `by_rank`."""
        order = self._order(rows.shape[dim])
        pieces = rows.chunk(len(order), dim)
        return torch.cat([pieces[order.index(piece)] for piece in range(len(order))], dim)

    def _order(self, length: int) -> list[int]:
        """The pieces of a row by the ranks that have them.

        Each rank has a piece near the beginning and one as near the end, so that causal attention
        is the same work for all (the order of Megatron's and torchtitan's context parallelism). A
        row that has no 2 cp equal pieces is cut into cp.
        """
        last = 2 * self.cp - 1
        if length % (last + 1):
            return [*range(self.cp)]
        return [piece for rank in range(self.cp) for piece in (rank, last - rank)]

    def _divide_experts(self) -> None:
        """Make the groups of ranks that divide the experts, which are neighbours, and of those with
        the same ones: a second grid, as torchtitan has it.
        """
        if self.shards % self.ep:
            raise ConfigError(
                f"parallel.ep = {self.ep} must divide parallel.dp x parallel.cp = {self.shards},"
                " whose ranks share the experts",
                code="config.combination",
            )
        size = self.shards // self.ep
        grid = init_device_mesh(
            self.device.type,
            (self.pp, size, self.ep, self.tp),
            mesh_dim_names=("pp", "expert_shard", "ep", "tp"),
        )
        self.ep_rank, self.ep_group = grid.get_local_rank("ep"), grid.get_group("ep")
        self.expert_mesh = grid["expert_shard"]
        group = self.expert_mesh.get_group() if size > 1 else None
        self.expert_replicas = ReplicaGroup(size, self.expert_mesh.get_local_rank(), group)

    def subgroup(self, axis: str, sets: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """The group that links the ranks of one of `sets` along `axis`; None if this rank is in no
        set of two or more.

        Every rank takes part in making every group, as torch requires.
        """
        grid, dim = self._grid.mesh, ("pp", "shard", "tp").index(axis)
        own_group = None
        for line in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist():
            for members in sets:
                ranks = [line[i] for i in members]
                if len(ranks) > 1:
                    group = dist.new_group(ranks)
                    own_group = group if self.rank in ranks else own_group
        return own_group

    def is_any_set(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; over gloo, so that no rank waits for a device."""
        flag_tensor = torch.tensor([int(flag)])
        dist.all_reduce(flag_tensor, op=dist.ReduceOp.MAX, group=self._host)
        return bool(flag_tensor.item())

    def gather(self, value: Any) -> list[Any]:
        """Everyone's `value`, by rank."""
        return gather(value)

    def agree(self, fault: str | None, failure: str) -> None:
        """Raise `CheckpointError` on every rank if any has a `fault`."""
        raise_any(self.gather(fault), failure)


def count_sum(count: int, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The sum of the group's counts as fp32 [2], for `count_of`: exact for sums below 2**36.

    Not as an integer, because Neuron's collectives sum in fp32 and refuse any other type
    (NCC_EVRF061).
    """
    words = to_device(torch.tensor(divmod(count, _WORD), dtype=torch.float32), device)
    with part("data parallel"):
        dist.all_reduce(words, group=group)
    return words


def count_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The count [] of a `count_sum`."""
    return words[0].to(dtype) * _WORD + words[1].to(dtype)


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Everyone's `x`, joined along `dim`."""
    n = dist.get_world_size(group)
    out = x.new_empty((n * x.shape[0], *x.shape[1:]))
    with part("tensor parallel"):
        gather_into(out, x.contiguous(), group=group)
    if dim == 0:
        return out
    if x.shape[:dim].numel() == 1:  # the joined dimension is already outermost in memory: no copy
        return out.view(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
    return torch.cat(out.chunk(n), dim)


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part along `dim` of the sum of everyone's `x`."""
    n = dist.get_world_size(group)
    shape = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    chunks = x.contiguous() if x.shape[:dim].numel() == 1 else torch.cat(x.chunk(n, dim))
    out = x.new_empty(shape)
    with part("tensor parallel"):
        scatter_sum_into(out.view(-1), chunks.view(-1), group=group)
    return out


def _sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # all_reduce writes in place, and autograd may have saved `x` for a backward pass.
    x = x.clone(memory_format=torch.contiguous_format)
    with part("tensor parallel"):
        dist.all_reduce(x, group=group)
    return x


_Move = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


def with_gradient(forward: _Move, backward: _Move) -> _Move:
    """A collective of a tensor over a group whose gradient goes through `backward`."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return backward(grad, ctx.group), None

    apply: _Move = Collective.apply
    return apply


# Megatron's f and g (Shoeybi et al. 2019) and their sequence-parallel forms (Korthikanti et al.
# 2022).
copy_to = with_gradient(lambda x, g: x.view_as(x), _sum)
reduce_from = with_gradient(_sum, lambda x, g: x)
gather_sequence = with_gradient(
    lambda x, g: all_gather(x, g, SEQ), lambda x, g: reduce_scatter(x, g, SEQ)
)
sum_both_ways = with_gradient(_sum, _sum)
"""A sum that every rank uses: its gradient is the sum of theirs."""
scatter_sequence = with_gradient(
    lambda x, g: reduce_scatter(x, g, SEQ), lambda x, g: all_gather(x, g, SEQ)
)


def likeliest(
    logits: torch.Tensor, start: int, valid: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The likeliest token of each row of logits [N, V / tp], int64 [N]; of equals the first.

    The first column is token `start`; `valid` columns are real. `group` None means the logits are
    whole.
    """
    if group is None:
        return logits[:, :valid].argmax(-1)
    infinity = float("inf")
    top = torch.full((len(logits),), float("-inf"), device=logits.device)
    token = torch.full((len(logits),), infinity, device=logits.device)
    if valid:  # the last rank's columns may all be padding
        top, column = logits[:, :valid].float().max(-1)
        token = column.float() + start
    best = top.clone()
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    # A rank without the maximum must not win the minimum of tokens below.
    token = torch.where(top == best, token, infinity)
    dist.all_reduce(token, op=dist.ReduceOp.MIN, group=group)
    return token.long()  # fp32 is exact below 2**24, and no vocabulary is larger


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to the device; the copy is queued, and the host does not wait."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(
        device, non_blocking=True
    )  # torch keeps the pinned memory until it was read


class Numbers:
    """Numbers of the device, fp32, sent to the host in one message as soon as they exist."""

    def __init__(self, values: Sequence[torch.Tensor], previous: Numbers | None = None) -> None:
        """`values` are of one dimension or none; `previous` are the numbers of the step before,
        which are read first.
        """
        self._values, self._event, self._previous = (
            torch.cat([v.reshape(-1) for v in values]),
            None,
            previous,
        )
        self.ready: float | None = None
        """`time.perf_counter()` when the device had them; None before `read`, and if the device
        does not say.
        """
        if self._values.device.type == "cuda":
            pinned_values = torch.empty(
                self._values.shape, dtype=self._values.dtype, pin_memory=True
            )
            self._values = pinned_values.copy_(self._values, non_blocking=True)
            self._event = torch.Event(values[0].device, enable_timing=True)
            self._event.record()

    def read(self) -> list[float]:
        """Wait for the numbers, but not for work that was queued after them."""
        if self._event is not None:
            # Before the wait: if the event is past already, the clock of now says too late a time.
            was_ready = self._event.query()
            self._event.synchronize()
            self.ready = self._ready_after_previous() if was_ready else time.perf_counter()
        # Else each step's numbers would keep those of all steps before alive.
        self._previous = None
        numbers: list[float] = self._values.tolist()
        return numbers

    def _ready_after_previous(self) -> float | None:
        """The time at which the event happened, by the device's clock since that of the step
        before.
        """
        previous = self._previous
        if (
            previous is None
            or previous.ready is None
            or previous._event is None
            or self._event is None
        ):
            return None
        return previous.ready + previous._event.elapsed_time(self._event) / 1e3
