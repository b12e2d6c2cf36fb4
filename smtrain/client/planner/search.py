"""Search all legal meshes for the machines, fastest first, and explain why a mesh does not fit or
is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush

from smtrain.client.planner.fastest import ROOM, FastestMeshes, SharedFigures
from smtrain.client.planner.machines import (
    GIB,
    RECOMPUTE,
    Machine,
    Mesh,
    Recompute,
    Work,
    layers_of,
    mesh_faults,
    untiled_group,
)
from smtrain.client.planner.memory import CoreMemory, worst_core
from smtrain.client.planner.throughput import (
    Coefficients,
    StageTimes,
    least_product_seconds,
    step_time,
)
from smtrain.core.model.lora import Lora, linears
from smtrain.core.model.quantized import cut_faults

BUBBLE = 0.2  # warn if the pipeline waits for more than this share of a step
SHORTEST = 8192  # tokens of a part of a row: shorter rows are not worth the messages
RANK = 16  # rank of proposed adapters: the config's default
SLOWER = 1.25  # warn if a mesh is slower by more than this than the best one of the same machines


@dataclass(frozen=True)
class Candidate:
    """A mesh that fits, and its step time."""

    machine: Machine
    mesh: Mesh
    step_s: float
    core_bytes: float
    shards_fully: bool = False
    """Whether its ranks divide weights and gradients too (`parallel.shard: full`)."""


def tensor_degrees(work: Work, machine: Machine) -> list[int]:
    """Powers of two that divide the model evenly and stay inside a host."""
    degrees, tp = [], 1
    while tp <= machine.cores:
        # tp outside a host is legal in a config but never proposed: `mesh_warnings` calls it
        # unwise.
        legal = machine.cores % tp == 0 and not work.shape.mesh_faults(tp, 1)
        if legal and not (work.quantizes and [*cut_faults(work.shape, tp)]):
            degrees.append(tp)
        tp *= 2
    return degrees


def search(
    work: Work, machines: Iterable[Machine], *, recompute: tuple[Recompute, ...] = RECOMPUTE
) -> list[Candidate]:
    """The fastest candidate for each legal (machine, tp, cp, pp) that fits, fastest first.

    Only the best micro-batch, recomputation and, with experts, ep of each (tp, pp) is kept.
    Sequence parallelism is used whenever tp > 1 divides the sequence: it saves memory and moves the
    same bytes (Korthikanti et al. 2022).
    """
    return [*fastest_first([(MachineSearch(work, recompute), machines)])]


def fastest_first(
    groups: Iterable[tuple[MachineSearch, Iterable[Machine]]],
    speed_up: Callable[[Machine], float] = lambda machine: 1.0,
) -> Iterator[Candidate]:
    """The candidates of `search` for all machines, fastest first, their seconds divided by
    `speed_up` of their machine.

    Machines are searched lazily, in the order of a lower bound of their steps: a caller who wants
    the first few candidates does not wait for far slower machines.
    """
    queue: list[tuple[float, int]] = []
    searches: list[tuple[MachineSearch, Machine, float]] = []
    for group, machines in groups:
        for machine in machines:
            factor = speed_up(machine)
            queue.append((group.least_seconds(machine) / factor, len(searches)))
            searches.append((group, machine, factor))
    heapify(queue)
    ready: list[tuple[float, int, int, Candidate]] = []
    while queue or ready:
        # Of equal seconds the bound comes first: an earlier machine may have an equal candidate.
        if queue and (not ready or queue[0][0] <= ready[0][0]):
            _, number = heappop(queue)
            group, machine, factor = searches[number]
            for place, candidate in enumerate(group.candidates(machine)):
                seconds = candidate.step_s / factor
                heappush(ready, (seconds, number, place, replace(candidate, step_s=seconds)))
        else:
            yield heappop(ready)[-1]


class MachineSearch:
    """The search over the meshes of single machines for one work, with figures for all of them."""

    def __init__(self, work: Work, recompute: tuple[Recompute, ...]) -> None:
        self._work, self._recompute, self._figures = work, recompute, SharedFigures()
        self._tables: dict[Machine, tuple[FastestMeshes, list[int]]] = {}

    def least_seconds(self, machine: Machine) -> float:
        """A lower bound of a step's seconds on all meshes of a machine: its products with weights,
        shared equally by all processes, without recomputation and messages.
        """
        k = Coefficients.for_machine(machine)
        return least_product_seconds(self._work, machine, k) * (1 - 1e-9)  # float rounding

    def candidates(self, machine: Machine) -> Iterator[Candidate]:
        """The candidates of `search` for a machine, in the order of tp, cp and pp."""
        work = self._work
        table, degrees = self._table(machine)
        for tp, cp in [(t, c) for t in degrees for c in context_degrees(work, machine, t)]:
            for pp, dp in _splits(machine.world // (tp * cp), work.shape.layers, work.global_batch):
                if not _torus_connects(work, machine, tp, pp, dp, cp):
                    continue
                best = None
                for ep in expert_degrees(work, machine, tp, dp * cp):
                    if ep == 1 or _torus_connects(work, machine, tp, pp, dp, cp, ep):
                        way = table.fastest(tp, pp, dp, ep, cp)
                        best = (
                            way if best is None or (way is not None and way[1] < best[1]) else best
                        )
                if best is not None:
                    yield Candidate(machine, *best, work.shards_fully)

    def _table(self, machine: Machine) -> tuple[FastestMeshes, list[int]]:
        # The number of hosts changes the time of a slot only for GPUs: a single host uses its
        # links, not the network.
        small_machine = replace(machine, count=min(machine.count, 2) if machine.link else 1)
        if small_machine not in self._tables:
            self._tables[small_machine] = (
                FastestMeshes(self._work, small_machine, self._recompute, self._figures),
                tensor_degrees(self._work, small_machine),
            )
        return self._tables[small_machine]


def _torus_connects(
    work: Work, machine: Machine, tp: int, pp: int, dp: int, cp: int, ep: int | None = None
) -> bool:
    """Whether the torus of the machine's chips, if there is one, connects all groups of a mesh;
    without ep also those of neighbouring stages.
    """
    if machine.torus_chip is None:
        return True
    mesh = Mesh(tp, pp, dp, cp=cp, ep=ep or 1)
    return untiled_group(work, machine, mesh, neighbours=ep is None) is None


def context_degrees(work: Work, machine: Machine, tp: int) -> list[int]:
    """Powers of two into which long rows can be cut; unlike those of tp, its messages may leave the
    host.
    """
    degrees, cp = [1], 2
    while not work.gathers_again and work.seq_len // cp >= SHORTEST and tp * cp <= machine.world:
        parts = cp * (tp if tp > 1 and work.seq_len % tp == 0 else 1)
        if not (
            work.seq_len % parts
            or machine.world % (tp * cp)
            or work.shape.mesh_faults(tp, 1, cp=cp)
        ):
            degrees.append(cp)
        cp *= 2
    return degrees


def expert_degrees(work: Work, machine: Machine, tp: int, shards: int) -> list[int]:
    """Powers of two that divide the experts and dp x cp, within a host: messages are many times
    those of tp.
    """
    degrees, ep = [1], 2
    while work.shape.experts is not None and ep * tp <= machine.cores and shards % ep == 0:
        if not work.shape.mesh_faults(1, 1, ep):
            degrees.append(ep)
        ep *= 2
    return degrees


@cache
def _splits(ranks: int, layers: int, batch: int) -> list[tuple[int, int]]:
    """(pp, dp) whose product is `ranks`, with at least one layer per stage and a batch that dp
    divides.
    """
    # pp need not divide the layers: stages may have different numbers of them.
    pairs = ((pp, ranks // pp) for pp in range(1, min(ranks, layers) + 1) if ranks % pp == 0)
    return [(pp, dp) for pp, dp in pairs if batch % dp == 0]


def refusals(work: Work, machine: Machine, mesh: Mesh) -> Iterator[str]:
    """Reasons why a mesh cannot be used: it is illegal, or needs too much memory."""
    illegal = list(mesh_faults(work, machine, mesh))
    yield from illegal
    if illegal:
        return
    stage, need = worst_core(work, machine, mesh)
    if need.total > machine.core_bytes:
        hint = ""
        for name, adapter_work in adapter_ways(work, machine):
            bytes_ = worst_core(adapter_work, machine, mesh)[1].total
            if (
                not hint
                and bytes_ <= machine.core_bytes
                # Adapters add rules: tp must not cut a block of quantized weights in two.
                and not [*mesh_faults(adapter_work, machine, mesh)]
            ):
                hint = f"; or train.adapter: {name} needs {bytes_ / GIB:.1f} GiB"
        yield shortfall(stage, need, machine) + hint


def adapter_ways(work: Work, machine: Machine) -> Iterator[tuple[str, Work]]:
    """Ways to train with less memory, by name: LoRA on all linears at the config's defaults, then
    QLoRA.
    """
    if work.lora is None:
        yield (
            f"LoRA of rank {RANK}",
            replace(work, lora=Lora(RANK, 2.0 * RANK, targets=linears(work.shape))),
        )
    if not machine.neuron and not work.gathers_again and not work.quantizes:
        lora = work.lora or Lora(RANK, 2.0 * RANK, targets=linears(work.shape))
        shard = ", parallel.shard: optimizer" if work.shards_fully else ""
        yield (
            f"QLoRA (quantize: nf4{shard})",
            replace(work, lora=replace(lora, quantize="nf4"), shards_fully=False),
        )


def shortfall(stage: int, need: CoreMemory, machine: Machine) -> str:
    """Explain a lack of memory: by how much, and which part is the largest."""
    parts = {
        n: getattr(need, n)
        for n in ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    }
    largest = max(parts, key=lambda n: parts[n])
    wider = (
        "raise tp or pp"
        if machine.torus_chip is None
        else "take a larger tp x pp that the torus connects"
    )
    return (
        f"memory: a core of pipeline stage {stage} needs {need.total / GIB:.1f} GiB and has"
        f" {machine.core_bytes / GIB:.1f}, short by {(need.total - machine.core_bytes) / GIB:.1f}"
        f" GiB; most of it is {largest} ({parts[largest] / GIB:.1f} GiB): {wider}, recompute more,"
        " or take smaller micro-batches"
    )


def mesh_warnings(
    work: Work, machine: Machine, mesh: Mesh, best: Candidate | None
) -> Iterator[str]:
    """Warnings about a mesh that fits, each with a number."""
    step = step_time(work, machine, mesh)
    need = worst_core(work, machine, mesh)[1].total
    if ROOM * machine.core_bytes < need <= machine.core_bytes:
        yield f"tight: {need / machine.core_bytes:.1%} of a core's memory would be used"
    if mesh.tp > machine.cores:
        yield (
            f"unwise: tensor parallelism over {mesh.tp} cores leaves the host, which has"
            f" {machine.cores}; its collectives take {step.tensor_parallel / step.total:.0%} of a"
            " step"
        )
    if step.bubble_share > BUBBLE:
        slots = work.global_batch // (mesh.dp * mesh.micro_batch)
        lower = (
            "lower pp" if machine.torus_chip is None else "take a lower pp that the torus connects"
        )
        yield (
            f"unwise: the pipeline waits {step.bubble_share:.0%} of a step (pp {mesh.pp}, only"
            f" {slots} micro-batches); {lower} or raise the global batch"
        )
    layer_counts = {layers_of(work.shape.layers, mesh.pp, s) for s in range(mesh.pp)}
    if (
        not mesh.layers
        and len(layer_counts) > 1
        and max(layer_counts) / (work.shape.layers / mesh.pp) > 1.1
    ):
        balanced_layers, *_ = StageTimes(
            work, machine, mesh, Coefficients.for_machine(machine)
        ).balance_layers(mesh.pp)
        yield (
            f"unwise: {work.shape.layers} layers over pp {mesh.pp} leave {max(layer_counts)} on the"
            f" last stages and {min(layer_counts)} on other stages, which wait; the best is"
            f" parallel.layers_per_stage: {list(balanced_layers)}"
        )
    if best and step.total > SLOWER * best.step_s:
        yield (
            f"unwise: {step.total / best.step_s:.1f} times slower than {best.mesh} on the same"
            " machines"
        )
