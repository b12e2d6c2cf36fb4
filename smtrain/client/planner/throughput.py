"""Time of an optimizer step: operations / peak, bytes / bandwidth, pipeline bubble and overhead.

Seven coefficients are fitted to published runs: one set for Neuron cores, and one for each GPU with published runs
(core/facts/throughput_gpu.toml). Three more, for mixtures of experts, are fitted to runs on H100. Each term has a
physical form, so that the few coefficients also hold for shapes that were not published; docs/planner-formulas.md
derives them. If only a bound is known, the slower one is used. On GPUs whose kernels were measured, `kernels` gives the
time of everything but messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from smtrain.client.planner.kernels import Kernels, kernels_of
from smtrain.client.planner.machines import (
    Machine,
    Mesh,
    Work,
    adapter_numbers,
    alike_stages,
    cut,
    distinct_stages,
    expert_share,
    layers_of,
    stage_kinds,
    trained_numbers,
)
from smtrain.core.facts import table
from smtrain.core.model.families import ModelShape

# Passes over a layer's matrix products and over its attention scores: forward 1, backward 2, recomputation 1.
# "selective" repeats only the scores (Korthikanti et al. 2022, arXiv 2205.05198).
_DENSE = {"none": 3, "selective": 3, "full": 4}
_SCORES = {"none": 3, "selective": 4, "full": 4}
# A pipeline stage launches forward and backward separately, a whole model both at once.
_LAUNCHES = 2
# Collectives of a layer (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al.): two all-gathers and two
# reduce-scatters, or two all-reduces of the same bytes, forward; as many backward; the forward ones again if the whole
# layer is recomputed.
_COLLECTIVES = {"none": 8, "selective": 8, "full": 12}


@dataclass(frozen=True)
class Coefficients:
    """Coefficients fitted to the published runs; core/facts/throughput.toml has their values."""

    efficiency: float
    """Share of the peak that large matrix products reach."""
    link_bytes_per_flop: float
    """Rate of tensor-parallel collectives: bytes per second, divided by the core's peak in operations per second."""
    network_share: float
    """Share of a host's network that the gradient exchange reaches."""
    slot_seconds: float
    """Fixed time of a micro-batch on one stage: launching graphs, sending to the next stage."""
    fused_attention: float
    """Time of an operation in fused attention, relative to one in a large matrix product."""
    unfused_attention: float
    """The same if scores are written to memory."""
    yearly_gain: float
    """Log of the speed-up from one Neuron release to the next, up to `MATURE`."""
    expert_products: float = 1.0
    """Time of an operation in the products of experts, relative to one in a large matrix product."""
    routed_bytes_per_flop: float = math.inf
    """Rate of sorting rows by expert and back within a device: bytes of their hidden states per second in each pass,
    divided by the core's peak in operations per second."""
    swap_share: float = 1.0
    """Rate of the all-to-alls that take rows to their experts, relative to collectives over the same link."""
    kernels: Kernels | None = None
    """Engine native's kernels on this GPU, if they were measured or follow from a measurement: then only the numbers
    of messages are used of the above."""

    @classmethod
    def fitted(cls, machine: Machine | None = None) -> Coefficients:
        """The fitted values for Neuron cores; for GPUs and described machines those of their chip, or of the one that
        stands in for it, scaled to their own link."""
        if machine is None or not machine.link:
            return _fitted()
        k, share = _of_chip(machine.chip)
        link = share * machine.link / machine.core_flops
        return replace(k, link_bytes_per_flop=link, kernels=kernels_of(replace(machine, count=1)))


EXPERTS = ("expert_products", "routed_bytes_per_flop", "swap_share")
"""The coefficients that only mixtures of experts need."""
DENSE = tuple(f.name for f in fields(Coefficients) if f.name not in (*EXPERTS, "kernels"))
MATURE = 20  # minor number of Neuron 2.x from which releases are no faster than the one before


def stand_in(chip: str) -> str:
    """The chip whose published runs are used for this one: itself, or one like it (core/facts/throughput_gpu.toml)."""
    facts = table("throughput_gpu")
    name: str = facts["like"].get(chip, chip if chip in facts["chips"] else facts["like"]["other"])
    return name


@cache
def _of_chip(chip: str) -> tuple[Coefficients, float]:
    """Coefficients of a chip, and the share of its link that collectives reach."""
    row = table("throughput_gpu")["chips"][stand_in(chip)]
    k = Coefficients(**{name: row[name] for name in DENSE} | _of_experts())
    return k, k.link_bytes_per_flop * row["tflops"] * 1e12 / (row["link_gbs"] * 1e9)


@cache
def _fitted() -> Coefficients:
    row = table("throughput")["coefficients"]
    return Coefficients(**{name: row[name] for name in DENSE} | _of_experts())


def _of_experts() -> dict[str, Any]:
    """The coefficients of experts: those of H100 stand for every chip, as no run on another was published."""
    row = table("throughput_gpu")["experts"]
    return {name: row[name] for name in EXPERTS}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part; `total` is their sum."""

    compute: float
    attention: float
    tensor_parallel: float
    bubble: float
    overhead: float
    data_parallel: float
    expert_parallel: float = 0.0
    """Messages that take tokens to their experts and back."""
    context_parallel: float = 0.0
    """Messages of keys and values of rows that are cut over ranks."""
    optimizer: float = 0.0
    """Clipping and the optimizer's update; 0 if the fitted coefficients have it in `compute`."""

    @property
    def total(self) -> float:
        parts = self.compute + self.attention + self.tensor_parallel + self.bubble + self.overhead + self.data_parallel
        return parts + self.expert_parallel + self.context_parallel + self.optimizer

    def parts(self) -> dict[str, float]:
        """Seconds by part, with `total`; those that a run may not have are left out if it has not."""
        each = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("expert_parallel", "context_parallel", "optimizer"):
            if not each[name]:
                del each[name]
        return {**each, "total": self.total}

    def faster(self, times: float) -> StepTime:
        """The same step, with every part faster by this factor."""
        return StepTime(*(getattr(self, f.name) / times for f in fields(self)))

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.total


@dataclass(frozen=True)
class Slot:
    """Seconds of one micro-batch, forward and backward, on the slowest stage; `middle`: on a stage with layers only."""

    dense: float
    attention: float
    tensor_parallel: float
    overhead: float
    middle: float
    expert_parallel: float = 0.0
    context_parallel: float = 0.0

    @property
    def total(self) -> float:
        messages = self.tensor_parallel + self.expert_parallel + self.context_parallel
        return self.dense + self.attention + self.overhead + messages


def slot_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> Slot:
    """Time of a micro-batch on the slowest stage.

    It is the last one, which has the output matrix, unless `mesh.layers` gives others more layers to make up for it.
    """
    slot, others = StageTimes(work, machine, mesh, k).slowest(mesh.pp, mesh.layers)
    return replace(slot, middle=others)


class StageTimes:
    """Times of pipeline stages under one tp, cp, ep, micro-batch and recomputation, each stage timed once.

    The time of a stage depends on its layers, and on whether it is the last of several or the only one. It does not
    depend on the number of stages, so one object serves every pp.
    """

    def __init__(self, work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> None:
        self._work, self._machine, self._mesh, self._k = work, machine, mesh, k
        self.uniform = len(work.shape.kinds) == 1
        self._stages: dict[tuple[frozenset[tuple[ModelShape, int]] | int, bool, bool], Slot] = {}

    def slowest(self, pp: int, layers: tuple[int, ...]) -> tuple[Slot, float]:
        """The slowest of so many stages (`layers` as in `Mesh`), and the mean seconds of the others: the bubble is a
        micro-batch's way through them."""
        last = self.stage(pp, layers, pp - 1)
        if not layers:
            return last, last.middle
        alike = alike_stages(self._work.shape, pp, layers)[:-1]
        slots = {stage: self.stage(pp, layers, stage) for stage in {*alike}}
        seconds = {stage: slot.total for stage, slot in slots.items()}
        totals = [*[seconds[stage] for stage in alike], last.total]
        most = max(totals)
        slowest = totals.index(most)
        rest = sum(totals) - most
        return slots[alike[slowest]] if slowest < len(alike) else last, rest / max(1, pp - 1)

    def stage(self, pp: int, layers: tuple[int, ...], stage: int) -> Slot:
        """One of so many stages."""
        shape = self._work.shape
        if self.uniform:
            kinds: frozenset[tuple[ModelShape, int]] | int = layers_of(shape.layers, pp, stage, layers)
        else:
            kinds = frozenset(stage_kinds(shape, pp, stage, layers).items())
        key = kinds, stage == pp - 1, pp == 1
        if key not in self._stages:
            mesh = replace(self._mesh, pp=pp, layers=layers)
            self._stages[key] = _stage_time(self._work, self._machine, mesh, self._k, stage)
        return self._stages[key]


def _stage_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients, stage: int) -> Slot:
    shape, tokens = work.shape, work.seq_len * mesh.micro_batch // mesh.cp
    if mesh.cp > 1 and machine.neuron:
        work = replace(work, fused_attention=False)  # its kernel takes no masks
    kinds = stage_kinds(shape, mesh.pp, stage, mesh.layers)
    rate, layers = k.efficiency * machine.core_flops, sum(kinds.values())
    dense = attention = middle = launches = 0.0
    for kind, count in kinds.items():
        layer, scores = _layer_time(work.of_kind(kind), mesh, k, tokens, rate)
        layer += _sorting_time(work.of_kind(kind), machine, mesh, k, tokens)
        dense, attention, middle = dense + count * layer, attention + count * scores, middle + count * (layer + scores)
        launches += count * k.kernels.launches(work.of_kind(kind), mesh) if k.kernels else 0.0
    head = _head_time(work, mesh, k, tokens, rate) if stage == mesh.pp - 1 else 0.0
    link = _link(machine, mesh.tp, k)
    moved = _COLLECTIVES[mesh.recompute] * tokens * shape.hidden * work.width * (mesh.tp - 1) / mesh.tp
    collectives = layers * moved / link
    sparse = sum(count for kind, count in kinds.items() if kind.experts is not None)
    swapped = sparse * _swap_time(work, machine, mesh, k, tokens)
    gathered = _gathers(work, mesh, kinds, tokens) / _link(machine, mesh.tp * mesh.cp, k)
    overhead = k.slot_seconds * (1 if mesh.pp == 1 else _LAUNCHES)
    if k.kernels:  # the device waits for the host's launches, if these take longer than its work
        overhead = max(0.0, launches - dense - head - attention)
    return Slot(
        dense=dense + head,
        attention=attention,
        tensor_parallel=collectives,
        overhead=overhead,
        middle=middle + collectives + overhead + swapped + gathered,
        expert_parallel=swapped,
        context_parallel=gathered,
    )


def _head_time(work: Work, mesh: Mesh, k: Coefficients, tokens: int, rate: float) -> float:
    """Seconds of the output matrix, and of the loss if its kernels are known."""
    if k.kernels:
        return k.kernels.head(work, mesh, tokens)
    passes = 2 if work.lora else 3  # one product less without the weight's gradient
    return passes * 2.0 * cut(work.shape, mesh.tp).head * tokens / rate


def ramp_share(work: Work, machine: Machine, mesh: Mesh, batches: Sequence[tuple[int, int]]) -> float:
    """Mean time of a run's steps, (steps, sequences of each), relative to a step of the whole global batch."""
    k, each = Coefficients.fitted(machine), mesh.dp * mesh.micro_batch
    steps = sum(count for count, _ in batches)
    if not steps or all(size == work.global_batch for _, size in batches):
        return 1.0

    def seconds(size: int) -> float:
        return step_time(replace(work, global_batch=-(-size // each) * each), machine, mesh, k).total

    return sum(count * seconds(size) for count, size in batches) / steps / seconds(work.global_batch)


def balanced(
    work: Work, machine: Machine, mesh: Mesh, k: Coefficients, times: StageTimes | None = None
) -> tuple[int, ...]:
    """Layers of each stage for the shortest time, the output matrix counted; empty if even stages are possible.

    Extra layers go to the stages before the last, of which the later ones keep fewer micro-batches, and the first one
    has the embedding.

    times: those of this work, machine and mesh, if other meshes were timed with them.
    """
    layers, pp = work.shape.layers, mesh.pp
    each, extra = divmod(layers, pp)
    if not extra:
        return ()
    times = times or StageTimes(work, machine, mesh, k)
    best: tuple[int, ...] = ()
    least = math.inf
    for last in range(each + 1, 0, -1):
        counts = _dealt(layers, pp, last)
        if times.uniform:  # the stage before the last has the most layers of those before it
            time = max(times.stage(pp, counts, pp - 2).total, times.stage(pp, counts, pp - 1).total)
        else:
            time = times.slowest(pp, counts)[0].total
        if time < least:
            best, least = counts, time
        elif time > least and times.uniform:
            break  # an earlier stage is the slowest from here on
    return best


@cache
def _dealt(layers: int, pp: int, last: int) -> tuple[int, ...]:
    """Layers of each stage if the last one has so many, and the stages before it as equal numbers as possible."""
    before, more = divmod(layers - last, pp - 1)
    return *[before] * (pp - 1 - more), *[before + 1] * more, last


def _link(machine: Machine, ranks: int, k: Coefficients) -> float:
    """Bytes per second of collectives of so many neighbouring ranks, on each of them."""
    link = k.link_bytes_per_flop * machine.core_flops
    if ranks > machine.cores:  # the ring leaves the host, whose cores share the network
        link = min(link, k.network_share * machine.network / machine.cores)
    return link


def _routed(work: Work, mesh: Mesh, tokens: int) -> float:
    """Bytes of hidden states that a rank sends to experts in one direction: one for each choice of a token, and those
    that fill an expert's capacity."""
    assert work.shape.experts is not None
    hidden = (work.capacity or 1.0) * work.shape.experts.chosen * tokens * work.shape.hidden * work.width
    return hidden / mesh.tp if work.whole_experts else hidden


def _swap_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients, tokens: int) -> float:
    """Seconds of bringing tokens to their experts and back in one layer.

    Two all-to-alls forward and two backward, the forward ones again if the layer is recomputed. Of their bytes 1 / ep
    stay, those to ranks of the same host take its links, and the rest its network.
    """
    if work.shape.experts is None or mesh.ep == 1:
        return 0.0
    passes = 6 if mesh.recompute == "full" else 4
    near = min(mesh.ep, machine.cores if work.whole_experts else max(1, machine.cores // mesh.tp))
    link, network = (_link(machine, ranks, k) for ranks in (1, machine.cores + 1))
    each = (near - 1) / link + (mesh.ep - near) / network
    return passes * _routed(work, mesh, tokens) / mesh.ep * each / k.swap_share


def _sorting_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients, tokens: int) -> float:
    """Seconds of sorting a layer's rows by expert and back, which takes memory's time and no operations."""
    if work.shape.experts is None or k.kernels:  # the kernels count it among their passes
        return 0.0
    return _DENSE[mesh.recompute] * _routed(work, mesh, tokens) / (k.routed_bytes_per_flop * machine.core_flops)


def _gathers(work: Work, mesh: Mesh, kinds: Mapping[ModelShape, int], tokens: int) -> float:
    """Bytes that a rank receives of the other parts of its rows: keys and values, forward, again backward, and their
    gradients; a gated delta net trades its inputs and outputs instead."""
    if mesh.cp == 1:
        return 0.0
    moved = 0.0
    for kind, count in kinds.items():
        if kind.delta is None:
            passes = 4 if mesh.recompute != "none" else 3
            others = float(tokens * (mesh.cp - 1))
            moved += count * passes * 2 * cut(kind, mesh.tp).kv_heads * kind.head_dim * others
        else:
            passes = 3 if mesh.recompute != "none" else 2
            others = tokens * (mesh.cp - 1) / mesh.cp
            moved += count * passes * 2 * (kind.delta.keys + kind.delta.values) / mesh.tp * others
    return moved * work.width


def _layer_time(work: Work, mesh: Mesh, k: Coefficients, tokens: int, rate: float) -> tuple[float, float]:
    """Seconds of a decoder layer's products with weights, and of its scores, at `rate` operations a second.

    2 operations per weight and token; 4 x heads x head size x span per token for the scores and their product with v
    (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B).
    """
    if k.kernels:
        return k.kernels.layer(work, mesh, tokens)
    shape, held = work.shape, cut(work.shape, mesh.tp)
    used: float = held.layer
    factors = 0.0  # those of other linears are small
    if shape.experts is not None:  # as many rows as without ep, if the experts get equal shares
        share = (work.capacity or 1.0) * shape.experts.chosen / shape.experts.count
        used += held.experts * (k.expert_products * share - 1)
        if work.lora is not None and work.lora.of_experts:
            adapted = replace(work.lora, targets=work.lora.of_experts)
            one = replace(mesh, pp=1, ep=1, layers=())
            factors = adapter_numbers(replace(shape, layers=1), adapted, one, 0) * k.expert_products * share
    # With a piece of a row from each end, a rank sees half of the keys, as the only rank of a whole row does. Of rows
    # that are cut once for a rank, the last rank sees nearly all.
    seen = work.seq_len * (2 - 1 / mesh.cp if work.seq_len % (2 * mesh.cp) else 1.0)
    span = min(seen, shape.sliding_window or seen)
    frozen = 1 if work.lora else 0
    again = 0.0
    if mesh.recompute == "selective" and not work.gathers_again:  # engine native repeats the module's matrices
        again = 2.0 * shape.hidden * shape.head_dim * (shape.heads / mesh.tp + held.kv_heads) / used
        if shape.delta is not None:
            again = 2.0 * shape.hidden * (shape.delta.keys + 1.5 * shape.delta.values) / mesh.tp / used
    layer = (_DENSE[mesh.recompute] + again - frozen) * 2.0 * used * tokens / rate
    layer += _DENSE[mesh.recompute] * 2.0 * factors * tokens / rate
    slow = k.fused_attention if work.fused_attention else k.unfused_attention
    passes = _SCORES[mesh.recompute] + (mesh.cp > 1)  # the backward pass over cut rows computes them again
    scores = passes * 4.0 * shape.heads * shape.head_dim / mesh.tp * span * tokens * slow / rate
    if shape.delta is not None:
        # Within chunks, and with the state of the chunk before; once more, as the rule is always computed again.
        key, value = shape.delta.key_dim, shape.delta.value_dim
        each = 6.0 * key * value + 2.0 * shape.delta.CHUNK * (3 * key + 2 * value)
        passes = _SCORES[mesh.recompute] + 1
        scores = passes * shape.delta.value_heads / mesh.tp * each * tokens * k.unfused_attention / rate
    return layer, scores


def exchange_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> float:
    """Time to reduce-scatter fp32 gradients and all-gather weights (ZeRO-1) over the host's network.

    Each number on a host goes once round the ring of data-parallel ranks. The full ring is charged even for a single
    host, which is faster (docs/planner-formulas.md): otherwise twice the hosts could seem slower. GPUs of a single host
    use their own links instead, and a single GPU exchanges nothing.
    """
    alone = machine.link and machine.count == 1  # GPUs of one host: over their own links, all at once
    most = 0.0
    for stage in distinct_stages(work.shape, mesh.pp, mesh.layers) if mesh.layers else (0, mesh.pp - 1):
        own = expert_share(work, mesh, stage)
        shared = trained_numbers(work, mesh, stage) - own
        if mesh.ep == mesh.shards:  # no other rank holds the same experts
            own = 0
        copies = [1, 1] if alone else [min(machine.cores, mesh.tp * mesh.pp * ranks) for ranks in (1, mesh.ep)]
        most = max(most, float(shared * copies[0] + own * copies[1]))
    each = most * (4 + (4 if work.lora else work.width))
    if alone:
        return each / (k.link_bytes_per_flop * machine.core_flops) if machine.cores > 1 else 0.0
    return each / (k.network_share * machine.network)


def once_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> float:
    """Time of what a step does once: `exchange_time` and `update_time`."""
    return exchange_time(work, machine, mesh, k) + update_time(work, mesh, k)


def update_time(work: Work, mesh: Mesh, k: Coefficients) -> float:
    """Time of clipping and the optimizer's update, if it is not in the fitted coefficients."""
    if k.kernels is None:
        return 0.0
    return max(k.kernels.update(work, mesh, stage) for stage in {0, mesh.pp - 1})


def step_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients | None = None) -> StepTime:
    """Seconds of an optimizer step, for a mesh without `mesh_faults`."""
    k = k or Coefficients.fitted(machine)
    slot = slot_time(work, machine, mesh, k)
    slots = work.global_batch // (mesh.dp * mesh.micro_batch)
    return StepTime(
        compute=slots * slot.dense,
        attention=slots * slot.attention,
        tensor_parallel=slots * slot.tensor_parallel,
        bubble=(mesh.pp - 1) * slot.middle,
        overhead=slots * slot.overhead,
        data_parallel=exchange_time(work, machine, mesh, k),
        expert_parallel=slots * slot.expert_parallel,
        context_parallel=slots * slot.context_parallel,
        optimizer=update_time(work, mesh, k),
    )
