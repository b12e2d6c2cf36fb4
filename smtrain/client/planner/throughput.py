"""Time of an optimizer step: work over peak, communication over bandwidth, bubble and overhead, seven fitted numbers.

Neuron cores have one set of them, each GPU that runs were published for another (core/facts/throughput_gpu.toml).

The form is physical, so that few numbers carry over to unpublished shapes; docs/planner-formulas.md derives each
term and says what was fitted. Where a term is bounded rather than known it errs to the slow side.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

from smtrain.client.planner.machines import Machine, Mesh, Work, cut, layers_of, trained_numbers
from smtrain.core.facts import table

# Passes over a layer's matrix products, and over its attention scores: forward 1, backward 2, recomputation 1.
_DENSE = {"none": 3, "selective": 3, "full": 4}
_SCORES = {"none": 3, "selective": 4, "full": 4}
# Collectives of a layer: two all-gathers and two reduce-scatters (or two all-reduces) forward, as many backward, and
# the forward ones once more where the whole layer is recomputed.
# A pipeline stage launches forward and backward apart from each other, a whole model both at once.
_LAUNCHES = 2
_COLLECTIVES = {"none": 8, "selective": 8, "full": 12}


@dataclass(frozen=True)
class Coefficients:
    """What the published runs say; core/facts/throughput.toml holds the fitted values."""

    efficiency: float
    """Share of a core's peak that large matrix products reach."""
    link_bytes_per_flop: float
    """Rate of tensor-parallel collectives, bytes a second for each operation a second of the core's peak."""
    network_share: float
    """Share of a host's network that the gradient exchange reaches."""
    slot_seconds: float
    """Fixed cost of one micro-batch on one stage: launching graphs, handing over to the next stage."""
    fused_attention: float
    """How much longer an operation in fused attention takes than one in a large matrix product."""
    unfused_attention: float
    """The same where scores go through memory."""
    yearly_gain: float
    """Log of the gain from one Neuron release to the next, up to `MATURE`."""

    @classmethod
    def fitted(cls, machine: Machine | None = None) -> Coefficients:
        """The values in core/facts/throughput.toml; for a machine with GPUs, or of one's own, those of its chip or of
        the one that stands in for it, with its own link."""
        if machine is None or not machine.link:
            return _fitted()
        k, share = _of_chip(machine.chip)
        return replace(k, link_bytes_per_flop=share * machine.link / machine.core_flops)


MATURE = 20  # the minor number of Neuron 2.x from which a release is no faster than the one before


def stand_in(chip: str) -> str:
    """The chip whose published runs speak for this one: itself, or what core/facts/throughput_gpu.toml puts in its
    place."""
    facts = table("throughput_gpu")
    name: str = facts["like"].get(chip, chip if chip in facts["chips"] else facts["like"]["other"])
    return name


@cache
def _of_chip(chip: str) -> tuple[Coefficients, float]:
    """A chip's numbers, and the share of its link that collectives reach."""
    row = table("throughput_gpu")["chips"][stand_in(chip)]
    k = Coefficients(**{f.name: row[f.name] for f in fields(Coefficients)})
    return k, k.link_bytes_per_flop * row["tflops"] * 1e12 / (row["link_gbs"] * 1e9)


@cache
def _fitted() -> Coefficients:
    row = table("throughput")["coefficients"]
    return Coefficients(**{f.name: row[f.name] for f in fields(Coefficients)})


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part; `total` is their sum."""

    compute: float
    attention: float
    tensor_parallel: float
    bubble: float
    overhead: float
    data_parallel: float

    @property
    def total(self) -> float:
        return self.compute + self.attention + self.tensor_parallel + self.bubble + self.overhead + self.data_parallel

    def faster(self, times: float) -> StepTime:
        """All parts so many times as fast."""
        return StepTime(*(getattr(self, f.name) / times for f in fields(self)))

    @property
    def bubble_share(self) -> float:
        return self.bubble / self.total


@dataclass(frozen=True)
class Slot:
    """Seconds of one micro-batch, forward and backward, on the slowest stage; `middle` is a stage without ends."""

    dense: float
    attention: float
    tensor_parallel: float
    overhead: float
    middle: float

    @property
    def total(self) -> float:
        return self.dense + self.attention + self.tensor_parallel + self.overhead


def slot_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> Slot:
    """One micro-batch on the last stage, which has the output matrix and the layers that are left over."""
    shape, tokens = work.shape, work.seq_len * mesh.micro_batch
    span = min(work.seq_len, shape.sliding_window or work.seq_len)
    layers, held = layers_of(shape.layers, mesh.pp, mesh.pp - 1), cut(shape, mesh.tp)
    rate = k.efficiency * machine.core_flops
    # 2 operations for each weight and token; scores and their product with v: 4 x heads x head size x span a token.
    frozen = 1 if work.lora else 0  # without gradients of its weights, a product less; the adapters' own are small
    again = 0.0
    if mesh.recompute == "selective" and not work.gathers_again:  # engine native's: the attention module's own matrices
        again = 2.0 * shape.hidden * shape.head_dim * (shape.heads / mesh.tp + held.kv_heads) / held.layer
    layer = (_DENSE[mesh.recompute] + again - frozen) * 2.0 * held.layer * tokens / rate
    slow = k.fused_attention if work.fused_attention else k.unfused_attention
    scores = _SCORES[mesh.recompute] * 4.0 * shape.heads * shape.head_dim / mesh.tp * span * tokens * slow / rate
    head = (3 - frozen) * 2.0 * held.head * tokens / rate
    link = k.link_bytes_per_flop * machine.core_flops
    if mesh.tp > machine.cores:  # the ring leaves the host: all its cores share the network
        link = min(link, k.network_share * machine.network / machine.cores)
    moved = _COLLECTIVES[mesh.recompute] * tokens * shape.hidden * work.width * (mesh.tp - 1) / mesh.tp
    collectives = layers * moved / link
    overhead = k.slot_seconds * (1 if mesh.pp == 1 else _LAUNCHES)
    return Slot(
        dense=layers * layer + head,
        attention=layers * scores,
        tensor_parallel=collectives,
        overhead=overhead,
        middle=layers * (layer + scores) + collectives + overhead,
    )


def exchange_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients) -> float:
    """Reduce-scatter of fp32 gradients and all-gather of weights (ZeRO-1), over the host's network.

    A host sends each number that it holds once round the ring of its data-parallel ranks. It is charged in full
    however many hosts there are: a single one is faster, by up to 4 % of a step in the published runs. GPUs of a single
    host use their own links instead, and one alone exchanges nothing.
    """
    numbers = max(trained_numbers(work, mesh, 0), trained_numbers(work, mesh, mesh.pp - 1))
    each = numbers * (4 + (4 if work.lora else work.width))
    if machine.link and machine.count == 1:  # GPUs of one host: over their own links, all at once
        return each / (k.link_bytes_per_flop * machine.core_flops) if machine.cores > 1 else 0.0
    return each * min(machine.cores, mesh.tp * mesh.pp) / (k.network_share * machine.network)


def step_time(work: Work, machine: Machine, mesh: Mesh, k: Coefficients | None = None) -> StepTime:
    """Seconds of an optimizer step. The mesh must be one that `mesh_faults` has nothing against."""
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
    )
