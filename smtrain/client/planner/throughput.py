"""Time of an optimizer step: operations / peak, bytes / bandwidth, pipeline bubble and overhead.

Seven coefficients are fitted to published runs: one set for Neuron cores, and one for each GPU with
published runs (core/facts/throughput_gpu.toml). Three more, for mixtures of experts, are fitted to
runs on H100. Each term has a physical form, so that the few coefficients also hold for shapes that
were not published; docs/planner-formulas.md derives them. If only a bound is known, the slower one
is used. On GPUs whose kernels were measured, `kernels` gives the time of everything but messages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

from smtrain.client.planner.kernels import Kernels, kernels_of, linear_sizes
from smtrain.client.planner.machines import (
    Machine,
    Mesh,
    Work,
    adapter_numbers,
    alike_stages,
    distinct_stages,
    equal_runs,
    expert_numbers,
    expert_share,
    layers_of,
    sizes_of_rank,
    stage_kinds,
    stage_numbers,
    trained_numbers,
)
from smtrain.core.facts import table
from smtrain.core.model.shape import ModelShape

# Passes over a layer's matrix products and over its attention scores: forward 1, backward 2,
# recomputation 1. "selective" repeats only the scores (Korthikanti et al. 2022, arXiv 2205.05198).
_DENSE = {"none": 3, "selective": 3, "full": 4}
_SCORES = {"none": 3, "selective": 4, "full": 4}
# A pipeline stage launches forward and backward separately, a whole model both at once.
_LAUNCHES = 2
# Collectives of a layer (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al.): two
# all-gathers and two reduce-scatters, or two all-reduces of the same bytes, forward; as many
# backward; the forward ones again if the whole layer is recomputed.
_COLLECTIVES = {"none": 8, "selective": 8, "full": 12}


@dataclass(frozen=True)
class Coefficients:
    """Coefficients fitted to the published runs; core/facts/throughput.toml has their values."""

    efficiency: float
    """Share of the peak that large matrix products reach."""
    link_bytes_per_flop: float
    """Rate of tensor-parallel collectives: bytes per second, divided by the core's peak in
    operations per second.
    """
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
    """Time of an operation in the products of experts, relative to one in a large matrix product.
    """
    routed_bytes_per_flop: float = math.inf
    """Rate of sorting rows by expert and back within a device: bytes of their hidden states per
    second in each pass, divided by the core's peak in operations per second.
    """
    swap_share: float = 1.0
    """Rate of the all-to-alls that take rows to their experts, relative to collectives over the
    same link.
    """
    kernels: Kernels | None = None
    """Engine native's kernels on this GPU, if they were measured or follow from a measurement: then
    only the numbers of messages are used of the above.
    """

    @classmethod
    def for_machine(cls, machine: Machine | None = None) -> Coefficients:
        """The fitted values for Neuron cores; for GPUs and described machines those of their chip,
        or of the one that stands in for it, scaled to their own link.
        """
        if machine is None or not machine.link:
            return _neuron_coefficients()
        k, share = _of_chip(machine.chip)
        link = share * machine.link / machine.core_flops
        return replace(k, link_bytes_per_flop=link, kernels=kernels_of(replace(machine, count=1)))


EXPERTS = ("expert_products", "routed_bytes_per_flop", "swap_share")
"""The coefficients that only mixtures of experts need."""
DENSE = tuple(f.name for f in fields(Coefficients) if f.name not in (*EXPERTS, "kernels"))
MATURE = 20  # minor number of Neuron 2.x from which releases are no faster than the one before


def reference_chip(chip: str) -> str:
    """The chip whose published runs are used for this one: itself, or one like it
    (core/facts/throughput_gpu.toml).
    """
    facts = table("throughput_gpu")
    name: str = facts["like"].get(chip, chip if chip in facts["chips"] else facts["like"]["other"])
    return name


@cache
def _of_chip(chip: str) -> tuple[Coefficients, float]:
    """Coefficients of a chip, and the share of its link that collectives reach."""
    row = table("throughput_gpu")["chips"][reference_chip(chip)]
    k = Coefficients(**{name: row[name] for name in DENSE} | _of_experts())
    return k, k.link_bytes_per_flop * row["tflops"] * 1e12 / (row["link_gbs"] * 1e9)


@cache
def _neuron_coefficients() -> Coefficients:
    row = table("throughput")["coefficients"]
    return Coefficients(**{name: row[name] for name in DENSE} | _of_experts())


def _of_experts() -> dict[str, Any]:
    """The coefficients of experts: those of H100 stand for every chip, as no run on another was
    published.
    """
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
        parts = (
            self.compute
            + self.attention
            + self.tensor_parallel
            + self.bubble
            + self.overhead
            + self.data_parallel
        )
        return parts + self.expert_parallel + self.context_parallel + self.optimizer

    def parts(self) -> dict[str, float]:
        """Seconds by part, with `total`; those that a run may not have are left out if it has
        not.
        """
        seconds = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("expert_parallel", "context_parallel", "optimizer"):
            if not seconds[name]:
                del seconds[name]
        return {**seconds, "total": self.total}

    def speed_up(self, times: float) -> StepTime:
        """The same step, with every part faster by this factor."""
        return StepTime(*(getattr(self, f.name) / times for f in fields(self)))

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.total


@dataclass(frozen=True)
class Slot:
    """Seconds of one micro-batch, forward and backward, on the slowest stage; `middle`: on a stage
    with layers only.
    """

    dense: float
    attention: float
    tensor_parallel: float
    overhead: float
    middle: float
    expert_parallel: float = 0.0
    context_parallel: float = 0.0

    @cached_property
    def total(self) -> float:
        messages = self.tensor_parallel + self.expert_parallel + self.context_parallel
        return self.dense + self.attention + self.overhead + messages


def slot_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> Slot:
    """Time of a micro-batch on the slowest stage.

    It is the last one, which has the output matrix, unless `mesh.layers` gives other stages more
    layers to make up for it.
    """
    slot, mean_others = StageTimes(work, machine, mesh, k).slowest(mesh.pp, mesh.layers)
    return replace(slot, middle=mean_others)


class StageTimes:
    """Times of pipeline stages under one tp, cp, ep, micro-batch and recomputation, each layer and
    stage timed once.

    The time of a stage depends on its layers, and on whether it is the last of several or the only
    one. It does not depend on the number of stages, so one object serves every pp.
    """

    def __init__(self, work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> None:
        tokens = work.seq_len * mesh.micro_batch // mesh.cp
        self._shape = work.shape
        self.uniform = len(work.shape.kinds) == 1
        if mesh.cp > 1 and machine.neuron:
            work = replace(work, fused_attention=False)  # its kernel takes no masks
        self._work, self._machine, self._mesh, self._k, self._tokens = (
            work,
            machine,
            mesh,
            k,
            tokens,
        )
        self._rate = k.efficiency * machine.core_flops
        # Two all-gathers and two reduce-scatters of hidden states a layer, half as many again if it
        # is recomputed (docs/planner-formulas.md); in a ring of t ranks (t - 1) / t of the bytes
        # move.
        self._moved = (
            _COLLECTIVES[mesh.recompute]
            * tokens
            * work.shape.hidden
            * work.width
            * (mesh.tp - 1)
            / mesh.tp
        )
        self._link, self._gather_link = (
            _link(machine, ranks, k) for ranks in (mesh.tp, mesh.tp * mesh.cp)
        )
        self._swap = _swap_time(work, machine, mesh, k, tokens)
        self._head: float | None = None
        self._layers: dict[ModelShape, tuple[float, float, float]] = {}
        self._between: dict[int, Slot] = {}  # by number of layers, if these are alike
        self._last: dict[int, Slot] = {}
        self._alone: dict[int, Slot] = {}
        self._by_kinds: dict[tuple[frozenset[tuple[ModelShape, int]], bool, bool], Slot] = {}

    def slowest(self, pp: int, layers: tuple[int, ...]) -> tuple[Slot, float]:
        """The slowest of so many stages (`layers` as in `Mesh`), and the mean seconds of the rest:
        the bubble is a micro-batch's way through them.
        """
        if not layers:
            last = self.stage(pp, layers, pp - 1)
            return last, last.middle
        stage_groups = alike_stages(self._shape, pp, layers)[:-1]
        # Equal stages are timed once: time depends on a stage's layers, not on its number.
        runs = [(self.stage(pp, layers, first), times) for first, times in equal_runs(stage_groups)]
        runs.append((self.stage(pp, layers, pp - 1), 1))
        slowest_seconds, mean_others = _most_and_others(
            [(slot.total, times) for slot, times in runs]
        )
        return next(slot for slot, _ in runs if slot.total == slowest_seconds), mean_others

    def balance_layers(self, pp: int) -> tuple[tuple[int, ...], float, float]:
        """Layers of each stage for the shortest time, the output matrix counted, with the seconds
        of the slowest stage and the mean ones of the rest; no layers if even stages are possible.

        Extra layers go to the stages before the last, of which the later ones keep fewer
        micro-batches, and the first one has the embedding.
        """
        if self._shape.layers % pp == 0:
            last = self.stage(pp, (), pp - 1)
            return (), last.total, last.middle
        best, best_seconds = _Dealing((), ()), math.inf
        for dealt in _dealings(self._shape.layers, pp):
            if self.uniform:  # the stage before the last has the most layers of those before it
                time = max(self._between_s(dealt.runs[-1][0]), self._last_s(dealt.layers[-1]))
            else:
                time = self.slowest(pp, dealt.layers)[0].total
            if time < best_seconds:
                best, best_seconds = dealt, time
            elif time > best_seconds and self.uniform:
                break  # an earlier stage is the slowest from here on
        if not self.uniform:
            slot, mean_others = self.slowest(pp, best.layers)
            return best.layers, slot.total, mean_others
        runs = [(self._between_s(count), times) for count, times in best.runs]
        return best.layers, *_most_and_others([*runs, (self._last_s(best.layers[-1]), 1)])

    def _between_s(self, count: int) -> float:
        """Seconds of a stage with so many layers, before the last."""
        return (self._between.get(count) or self._of_count(count, False, False)).total

    def _last_s(self, count: int) -> float:
        return (self._last.get(count) or self._of_count(count, True, False)).total

    def stage(self, pp: int, layers: tuple[int, ...], stage: int) -> Slot:
        """One of so many stages."""
        last, is_only = stage == pp - 1, pp == 1
        if self.uniform:
            return self._of_count(layers_of(self._shape.layers, pp, stage, layers), last, is_only)
        kinds = stage_kinds(self._shape, pp, stage, layers)
        key = frozenset(kinds.items()), last, is_only
        if key not in self._by_kinds:
            self._by_kinds[key] = self._time(kinds, last, is_only)
        return self._by_kinds[key]

    def _of_count(self, count: int, last: bool, is_only: bool) -> Slot:
        """A stage with so many layers of a model whose layers are alike."""
        cached_slots = self._alone if is_only else self._last if last else self._between
        slot = cached_slots.get(count)
        if slot is None:
            kinds = {self._shape.by_layer[0]: count} if count else {}
            slot = cached_slots[count] = self._time(kinds, last, is_only)
        return slot

    def _time(self, kinds: Mapping[ModelShape, int], last: bool, is_only: bool) -> Slot:
        layers = sum(kinds.values())
        dense = attention = middle = launches = 0.0
        for kind, count in kinds.items():
            layer, scores, kind_launches = self._layers.get(kind) or self._layer(kind)
            dense, attention = dense + count * layer, attention + count * scores
            middle, launches = middle + count * (layer + scores), launches + count * kind_launches
        head = self._head_time() if last else 0.0
        collectives = layers * self._moved / self._link
        sparse = sum(count for kind, count in kinds.items() if kind.experts is not None)
        expert_seconds = sparse * self._swap
        gather_seconds = _gathers(self._work, self._mesh, kinds, self._tokens) / self._gather_link
        overhead = self._k.slot_seconds * (1 if is_only else _LAUNCHES)
        if (
            self._k.kernels
        ):  # the device waits for the host's launches, if these take longer than its work
            # Only the part of the launches that the device's work does not hide.
            overhead = max(0.0, launches - dense - head - attention)
        return Slot(
            dense=dense + head,
            attention=attention,
            tensor_parallel=collectives,
            overhead=overhead,
            middle=middle + collectives + overhead + expert_seconds + gather_seconds,
            expert_parallel=expert_seconds,
            context_parallel=gather_seconds,
        )

    def _layer(self, kind: ModelShape) -> tuple[float, float, float]:
        """Seconds of a layer but for its scores, of these, and of the host to launch its kernels if
        they are known.
        """
        work, mesh, k = self._work.of_kind(kind), self._mesh, self._k
        layer, scores = _layer_time(work, mesh, k, self._tokens, self._rate)
        layer += _sorting_time(work, self._machine, mesh, k, self._tokens)
        self._layers[kind] = layer, scores, k.kernels.launches(work, mesh) if k.kernels else 0.0
        return self._layers[kind]

    def _head_time(self) -> float:
        """Seconds of the output matrix, and of the loss if its kernels are known."""
        if self._head is None:
            work, mesh = self._work, self._mesh
            if self._k.kernels:
                self._head = self._k.kernels.head(work, mesh, self._tokens)
            else:
                # Forward, gradient of the input, gradient of the weight: 2 operations for each
                # weight and token.
                passes = 2 if work.lora else 3  # one product less without the weight's gradient
                self._head = (
                    passes
                    * 2.0
                    * sizes_of_rank(work.shape, mesh.tp).head
                    * self._tokens
                    / self._rate
                )
        return self._head


def ramp_share(
    work: Work, machine: Machine, mesh: Mesh, batches: Sequence[tuple[int, int]]
) -> float:
    """Mean time of a run's steps, (steps, sequences of each), relative to a step of the whole
    global batch.
    """
    k, batch_unit = Coefficients.for_machine(machine), mesh.dp * mesh.micro_batch
    steps = sum(count for count, _ in batches)
    if not steps or all(size == work.global_batch for _, size in batches):
        return 1.0

    def seconds(size: int) -> float:
        return step_time(
            replace(work, global_batch=-(-size // batch_unit) * batch_unit), machine, mesh, k
        ).total

    return (
        sum(count * seconds(size) for count, size in batches) / steps / seconds(work.global_batch)
    )


@dataclass(frozen=True)
class _Dealing:
    """Layers of each stage, and (layers, stages) of the runs of equal stages before the last."""

    layers: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]


@cache
def _dealings(layers: int, pp: int) -> list[_Dealing]:
    """Ways to deal layers to stages: the last one gets ever fewer, those before it as equal numbers
    as possible.
    """
    dealings = []
    for last in range(layers // pp + 1, 0, -1):
        even_layers, extra_stages = divmod(layers - last, pp - 1)
        runs = (
            ((even_layers, pp - 1 - extra_stages), (even_layers + 1, extra_stages))
            if extra_stages
            else ((even_layers, pp - 1),)
        )
        dealings.append(
            _Dealing(
                (*[even_layers] * (pp - 1 - extra_stages), *[even_layers + 1] * extra_stages, last),
                runs,
            )
        )
    return dealings


def _most_and_others(runs: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Seconds of the slowest stage, and the mean ones of the rest; `runs`: seconds of a stage,
    number of stages.
    """
    totals: list[float] = []
    for seconds, stages in runs:
        totals += [seconds] * stages
    slowest_seconds = max(totals)
    # The bubble passes the other stages once: their mean, not the slowest, sets its length.
    return slowest_seconds, (sum(totals) - slowest_seconds) / max(1, len(totals) - 1)


def _link(machine: Machine, ranks: int, k: Coefficients) -> float:
    """Bytes per second of collectives of so many neighbouring ranks, on each of them."""
    link = k.link_bytes_per_flop * machine.core_flops
    if ranks > machine.cores:  # the ring leaves the host, whose cores share the network
        link = min(link, k.network_share * machine.network / machine.cores)
    return link


def _routed_bytes(work: Work, mesh: Mesh, tokens: int) -> float:
    """Bytes of hidden states that a rank sends to experts in one direction: one for each choice of
    a token, and those that fill an expert's capacity.
    """
    assert work.shape.experts is not None
    row_bytes = (
        (work.capacity or 1.0) * work.shape.experts.chosen * tokens * work.shape.hidden * work.width
    )
    return row_bytes / mesh.tp if work.whole_experts else row_bytes


def _swap_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients, tokens: int) -> float:
    """Seconds of bringing tokens to their experts and back in one layer.

    Two all-to-alls forward and two backward, the forward ones again if the layer is recomputed. Of
    their bytes 1 / ep stay, those to ranks of the same host take its links, and the rest its
    network.
    """
    if work.shape.experts is None or mesh.ep == 1:
        return 0.0
    passes = 6 if mesh.recompute == "full" else 4
    # Ranks of the same host among those that share experts; tensor-parallel neighbours take places
    # of the host too.
    local_ranks = min(
        mesh.ep, machine.cores if work.whole_experts else max(1, machine.cores // mesh.tp)
    )
    link, network = (_link(machine, ranks, k) for ranks in (1, machine.cores + 1))
    # Seconds a byte: ep - 1 of ep parts leave the rank, `near - 1` of them by the host's links.
    seconds_per_byte = (local_ranks - 1) / link + (mesh.ep - local_ranks) / network
    return passes * _routed_bytes(work, mesh, tokens) / mesh.ep * seconds_per_byte / k.swap_share


def _sorting_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients, tokens: int) -> float:
    """Seconds of sorting a layer's rows by expert and back, which takes memory's time and no
    operations.
    """
    if work.shape.experts is None or k.kernels:  # the kernels count it among their passes
        return 0.0
    return (
        _DENSE[mesh.recompute]
        * _routed_bytes(work, mesh, tokens)
        / (k.routed_bytes_per_flop * machine.core_flops)
    )


def _gathers(work: Work, mesh: Mesh, kinds: Mapping[ModelShape, int], tokens: int) -> float:
    """Bytes that a rank receives of the other parts of its rows: keys and values, forward, again
    backward, and their gradients; a gated delta net trades its inputs and outputs instead.
    """
    if mesh.cp == 1:
        return 0.0
    received_numbers = 0.0
    for kind, count in kinds.items():
        if kind.delta is None:
            passes = 4 if mesh.recompute != "none" else 3
            other_tokens = float(tokens * (mesh.cp - 1))
            received_numbers += (
                count
                * passes
                * 2
                * sizes_of_rank(kind, mesh.tp).kv_heads
                * kind.mean_head_dim
                * other_tokens
            )
        else:
            passes = 3 if mesh.recompute != "none" else 2
            other_tokens = tokens * (mesh.cp - 1) / mesh.cp
            received_numbers += (
                count * passes * 2 * (kind.delta.keys + kind.delta.values) / mesh.tp * other_tokens
            )
    return received_numbers * work.width


def _layer_time(
    work: Work, mesh: Mesh, k: Coefficients, tokens: int, rate: float
) -> tuple[float, float]:
    """Seconds of a decoder layer's products with weights, and of its scores, at `rate` operations a
    second.

    2 operations per weight and token; 4 x heads x head size x span per token for the scores and
    their product with v (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B).
    """
    if k.kernels:
        return k.kernels.layer(work, mesh, tokens)
    shape, rank_sizes = work.shape, sizes_of_rank(work.shape, mesh.tp)
    used: float = rank_sizes.layer
    factors = 0.0  # those of other linears are small
    if shape.experts is not None:  # as many rows as without ep, if the experts get equal shares
        share = (work.capacity or 1.0) * shape.experts.chosen / shape.experts.count
        used += rank_sizes.experts * (k.expert_products * share - 1)
        if work.lora is not None and work.lora.of_experts:
            expert_lora = replace(work.lora, targets=work.lora.of_experts)
            single_stage_mesh = replace(mesh, pp=1, ep=1, layers=())
            factors = (
                adapter_numbers(replace(shape, layers=1), expert_lora, single_stage_mesh, 0)
                * k.expert_products
                * share
            )
    # With a piece of a row from each end, a rank sees half of the keys, as the only rank of a whole
    # row does. Of rows that are cut once for a rank, the last rank sees nearly all.
    visible_keys = work.seq_len * (2 - 1 / mesh.cp if work.seq_len % (2 * mesh.cp) else 1.0)
    span = min(visible_keys, shape.sliding_window or visible_keys)
    frozen_passes = 1 if work.lora else 0
    repeated_passes = 0.0
    if (
        mesh.recompute == "selective" and not work.gathers_again
    ):  # engine native repeats the module's matrices
        repeated_passes = (
            2.0
            * shape.hidden
            * shape.mean_head_dim
            * (shape.heads / mesh.tp + rank_sizes.kv_heads)
            / used
        )
        if shape.delta is not None:
            repeated_passes = (
                2.0 * shape.hidden * (shape.delta.keys + 1.5 * shape.delta.values) / mesh.tp / used
            )
    layer = (_DENSE[mesh.recompute] + repeated_passes - frozen_passes) * 2.0 * used * tokens / rate
    layer += _DENSE[mesh.recompute] * 2.0 * factors * tokens / rate
    slow = k.fused_attention if work.fused_attention else k.unfused_attention
    passes = _SCORES[mesh.recompute] + (
        mesh.cp > 1
    )  # the backward pass over cut rows computes them again
    width = shape.heads * shape.mean_head_dim / mesh.tp
    scores = passes * 4.0 * width * span * tokens * slow / rate
    if shape.delta is not None:
        # Within chunks, and with the state of the chunk before; once more, as the rule is always
        # computed again.
        key, value = shape.delta.key_dim, shape.delta.value_dim
        operations = 6.0 * key * value + 2.0 * shape.delta.CHUNK * (3 * key + 2 * value)
        passes = _SCORES[mesh.recompute] + 1
        scores = (
            passes
            * shape.delta.value_heads
            / mesh.tp
            * operations
            * tokens
            * k.unfused_attention
            / rate
        )
    return layer, scores


def least_product_seconds(work: Work, machine: Machine, k: Coefficients) -> float:
    """Seconds of a step's products with the weights of layers and head, if all processes share them
    equally and nothing is computed again: no mesh of these machines has a shorter step.
    """
    passes = _DENSE["none"] - (1 if work.lora else 0)
    seconds_per_operation = _least_seconds_per_operation(k, machine)
    tokens = float(work.global_batch) * work.seq_len
    numbers = _product_numbers(work.shape, work.capacity or 1.0)
    return passes * 2.0 * numbers * tokens / machine.world * seconds_per_operation


def _least_seconds_per_operation(k: Coefficients, machine: Machine) -> float:
    """Seconds of an operation in the fastest products, those of experts included."""
    if k.kernels:
        return 1 / (max(k.kernels.products, k.kernels.grouped_mm) * k.kernels.busy)
    return min(1.0, k.expert_products) / (k.efficiency * machine.core_flops)


@cache
def _product_numbers(shape: ModelShape, capacity: float) -> float:
    """Weights of linears that a token is multiplied with; experts count for those that it chooses,
    or that have places.
    """
    numbers: float = sizes_of_rank(shape, 1).head
    for kind, count in Counter(shape.by_layer).items():
        numbers += count * sum(n * k for n, k in linear_sizes(kind, 1))
        if kind.experts is not None:
            share = capacity * kind.experts.chosen / kind.experts.count
            numbers += count * sizes_of_rank(kind, 1).experts * share
    return numbers


def exchange_time(
    work: Work,
    machine: Machine,
    mesh: Mesh,
    k: Coefficients,
    numbers: Sequence[tuple[int, int]] = (),
) -> float:
    """Time to reduce-scatter fp32 gradients and all-gather weights over the host's network: once in
    a step (ZeRO-1), or with full sharding, which gathers them at least twice, in each micro-batch.

    Each number on a host goes once round the ring of data-parallel ranks. The full ring is charged
    even for a single host, which is faster (docs/planner-formulas.md): otherwise twice the hosts
    could seem slower. GPUs of a single host use their own links instead, and a single GPU exchanges
    nothing.

    numbers: the mesh's `exchanged_numbers`, if they are known.
    """
    single_host = (
        machine.link and machine.count == 1
    )  # GPUs of one host: over their own links, all at once
    copies = (
        [1, 1]
        if single_host
        else [min(machine.cores, mesh.tp * mesh.pp * ranks) for ranks in (1, mesh.ep)]
    )
    numbers = numbers or exchanged_numbers(work, mesh)
    gathers = (2 if work.shards_fully else 1), expert_gathers(work, mesh)

    def largest_bytes(stages: Sequence[tuple[int, int]], gradient: int, width: int) -> float:
        return max(
            float(
                sum(
                    n * c * (gradient + width * g)
                    for n, c, g in zip(stage, copies, gathers, strict=True)
                )
            )
            for stage in stages
        )

    # Once as an fp32 gradient, and as a weight; adapters' weights are fp32 too.
    exchanged_bytes = largest_bytes(numbers, 4, 4 if work.lora else work.width)
    if work.lora and work.shards_fully:
        base = [_base_numbers(work, mesh, stage) for stage in {0, mesh.pp - 1}]
        exchanged_bytes += largest_bytes(base, 0, work.width)
    if single_host:
        return (
            exchanged_bytes / (k.link_bytes_per_flop * machine.core_flops)
            if machine.cores > 1
            else 0.0
        )
    return exchanged_bytes / (k.network_share * machine.network)


def expert_gathers(work: Work, mesh: Mesh) -> int:
    """Count the gathers of experts that ep divides, for a micro-batch.

    With full sharding also to compute them again: FSDP2 gathers only the group of the layer around
    them earlier.
    """
    if not work.shards_fully:
        return 1
    return 2 + (mesh.ep > 1 and mesh.recompute == "full")


def _base_numbers(work: Work, mesh: Mesh, stage: int) -> tuple[int, int]:
    """`exchanged_numbers` of the frozen weights of a stage."""
    experts = expert_numbers(work.shape, mesh, stage)
    dense = stage_numbers(work.shape, mesh, stage) - experts
    return dense, 0 if mesh.ep == mesh.shards else experts


def exchanged_numbers(work: Work, mesh: Mesh) -> list[tuple[int, int]]:
    """(parameters that all data-parallel ranks share, those of experts) whose gradients a rank of a
    stage exchanges, for stages of which one has the most.
    """
    numbers = []
    for stage in (
        distinct_stages(work.shape, mesh.pp, mesh.layers) if mesh.layers else (0, mesh.pp - 1)
    ):
        expert_parameters = expert_share(work, mesh, stage)
        dense_parameters = trained_numbers(work, mesh, stage) - expert_parameters
        numbers.append(
            (dense_parameters, 0 if mesh.ep == mesh.shards else expert_parameters)
        )  # if no other rank holds the same experts
    return numbers if any(expert_parameters for _, expert_parameters in numbers) else [max(numbers)]


def update_time(work: Work, mesh: Mesh, k: Coefficients) -> float:
    """Time of clipping and the optimizer's update, if it is not in the fitted coefficients."""
    if k.kernels is None:
        return 0.0
    return max(k.kernels.update(work, mesh, stage) for stage in {0, mesh.pp - 1})


def step_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients | None = None) -> StepTime:
    """Seconds of an optimizer step, for a mesh without `mesh_faults`."""
    k = k or Coefficients.for_machine(machine)
    slot = slot_time(work, machine, mesh, k)
    slots = work.global_batch // (mesh.dp * mesh.micro_batch)
    return StepTime(
        # T = M (slot) + (p - 1) (slot without output matrix) + exchange: docs/planner-formulas.md.
        compute=slots * slot.dense,
        attention=slots * slot.attention,
        tensor_parallel=slots * slot.tensor_parallel,
        bubble=(mesh.pp - 1) * slot.middle,
        overhead=slots * slot.overhead,
        data_parallel=exchange_time(work, machine, mesh, k) * (slots if work.shards_fully else 1),
        expert_parallel=slots * slot.expert_parallel,
        context_parallel=slots * slot.context_parallel,
        optimizer=update_time(work, mesh, k),
    )
