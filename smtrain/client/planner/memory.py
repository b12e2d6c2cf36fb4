"""Bytes on a core and on a host, by part.

The formulas count the native engine's tensors one by one: parameters and gradients of the rank,
optimizer state under ZeRO-1 (Rajbhandari et al. 2020, arXiv 1910.02054), and what autograd saves
for the backward pass, as Korthikanti et al. 2022 do ("Reducing Activation Recomputation in Large
Transformer Models", arXiv 2205.05198), but for the blocks of transformers. docs/planner-formulas.md
derives them and compares them with measured peaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from smtrain.client.planner.full_shard_memory import (
    Moment,
    Moments,
    Peak,
    ShardedLayer,
    ShardedStage,
    peak_of_moments,
)
from smtrain.client.planner.machines import (
    GIB,
    Machine,
    Mesh,
    Work,
    distinct_stages,
    divide_optimizer_state,
    expert_numbers,
    expert_share,
    optimizer_share,
    sizes_of_rank,
    stage_kinds,
    stage_layers,
    stage_numbers,
    trained_numbers,
)
from smtrain.core.model.blocks import Role
from smtrain.core.model.footprint import CHUNK_SCORES, FLASH_HEAD, QUERIES, SINK_QUERIES, loss_rows
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import A, AdapterShape, Lora
from smtrain.core.model.quantized import BLOCK, is_quantized, quantized_bytes
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.sizes import DeltaSizes, ExpertSizes, LatentSizes

# Outside of tensors: the runtime, buffers of collectives, loaded graphs. An assumption, not yet
# measured on a device.
RUNTIME = 1.0 * GIB
# Host memory of a training process before anything is loaded: Python, torch, the graphs' host side.
# An assumption that gives 340 to 410 GB for 70B with asynchronous saves; NxD Training's known
# issues report 270 to 482 GB.
PROCESS = 8.0 * GIB


@dataclass(frozen=True)
class CoreMemory:
    """Bytes at the peak of a training step on one core."""

    weights: float
    gradients: float
    """fp32 sums over the micro-batches; with engine nxd also the data-parallel rank's part of the
    reduced ones.
    """
    optimizer: float
    """Adam's moments and, in bf16 and fp16, fp32 master weights; divided over the data-parallel
    ranks.
    """
    activations: float
    """Saved by the micro-batches in flight for their backward passes."""
    logits: float
    """Logits, their fp32 copy and the cross entropy, over this rank's part of the vocabulary."""
    buffers: float
    """Temporary: a parameter's gradient, parts of one layer's backward pass, messages, masks,
    batches.
    """
    runtime: float

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.activations + self.logits + self.buffers + self.runtime


@dataclass(frozen=True)
class HostMemory:
    """Bytes on one host, for all its training processes together."""

    load: float
    save: float
    async_save: float
    """While a snapshot is written and training continues."""


@dataclass(frozen=True)
class HeldMemory:
    """Bytes of a rank of a pipeline stage that no micro-batch changes."""

    weights: float
    gradients: float
    optimizer: float
    step: float
    """Buffers of the optimizer's step."""
    runtime: float

    @property
    def lower_bound(self) -> float:
        """Lower bound of the stage's peak."""
        return self.weights + self.gradients + self.optimizer + self.runtime

    def total(self, peak: Peak, standing_bytes: float) -> float:
        """The stage's peak, from that of its micro-batches and the `standing_bytes`."""
        saved_bytes, logits, passing, missing_bytes = self._larger(peak)
        return (
            self.weights
            + (self.gradients + missing_bytes)
            + self.optimizer
            + saved_bytes
            + logits
            + (passing + standing_bytes)
            + self.runtime
        )

    def with_peak(self, peak: Peak, standing_bytes: float) -> CoreMemory:
        """The parts of `total`."""
        saved_bytes, logits, passing, missing_bytes = self._larger(peak)
        return CoreMemory(
            self.weights,
            self.gradients + missing_bytes,
            self.optimizer,
            saved_bytes,
            logits,
            passing + standing_bytes,
            self.runtime,
        )

    def _larger(self, peak: Peak) -> Peak:
        return Peak(0.0, 0.0, self.step) if self.step > sum(peak) else peak


def core_memory(work: Work, machine: Machine, mesh: Mesh, stage: int) -> CoreMemory:
    """Peak of a rank of a pipeline stage: the largest of the moments of a micro-batch and the
    optimizer's step.
    """
    work = on_machine(work, machine)
    peak = peak_moment(work, machine, mesh, stage)
    return held_bytes(work, machine, mesh, stage).with_peak(peak, standing_bytes(work, mesh))


def on_machine(work: Work, machine: Machine) -> Work:
    """The work with the form of attention that its machine decides."""
    varlen = machine.has_accelerators and not machine.neuron and not work.gathers_again
    return work if work.varlen == varlen else replace(work, varlen=varlen)


def held_bytes(
    work: Work, machine: Machine, mesh: Mesh, stage: int, numbers: tuple[int, int] | None = None
) -> HeldMemory:
    """Bytes that a rank of a pipeline stage holds under any micro-batch and recomputation.

    numbers: its trained parameters, and those of them that ep divides, if they are known.
    """
    frozen_numbers = stage_numbers(work.shape, mesh, stage) if work.lora else 0  # frozen weights
    parameters, expert_parameters = numbers or (
        trained_numbers(work, mesh, stage),
        expert_share(work, mesh, stage),
    )
    (padded_numbers, shard), width = (
        divide_optimizer_state(parameters, expert_parameters, mesh),
        work.width,
    )
    is_cut = work.shards_fully and mesh.shards > 1
    frozen_numbers = -(-frozen_numbers // mesh.shards) * mesh.shards
    if is_cut and work.lora:
        frozen_experts = expert_numbers(work.shape, mesh, stage)
        _, frozen_numbers = divide_optimizer_state(frozen_numbers, frozen_experts, mesh)
    if is_cut and not work.lora:  # fp32 rows, which are their own masters
        runtime = RUNTIME if machine.has_accelerators else 0.0
        return HeldMemory(4.0 * shard, 4.0 * shard, 8.0 * shard, 0.0, runtime)
    weight_width = 4 if work.lora else width  # adapters are fp32, and their own masters
    quantized_numbers = _quantized_numbers(work, mesh, stage)
    separate_gradients = (
        mesh.shards > 1 and work.gathers_again
    )  # engine nxd reduces into a copy, native in place
    return HeldMemory(
        weights=padded_numbers * weight_width
        + (frozen_numbers - quantized_numbers) * width
        + quantized_bytes(quantized_numbers),
        gradients=4.0 * padded_numbers + (4.0 * shard if separate_gradients else 0),
        optimizer=(8.0 + (4.0 if weight_width == 2 else 0)) * shard,
        step=_step_buffers(machine, weight_width if separate_gradients else 0, shard),
        runtime=RUNTIME if machine.has_accelerators else 0.0,
    )


def _quantized_numbers(work: Work, mesh: Mesh, stage: int) -> int:
    """Weights of a rank of a pipeline stage that QLoRA keeps in 4 bits."""
    if not work.quantizes:
        return 0
    kinds = stage_kinds(work.shape, mesh.pp, stage, mesh.layers)
    return sum(count * sum(_quantized_sizes(kind, mesh.tp)) for kind, count in kinds.items())


@cache
def _quantized_sizes(kind: ModelShape, tp: int) -> tuple[int, ...]:
    """Numbers of each linear of a layer on a tensor-parallel rank that QLoRA keeps in 4 bits."""
    layout = Layout(replace(kind, layers=1, full=()), tp, 1)
    return tuple(
        prod(layout.local_shape(spec.name, 0)) for spec in layout.shape.specs if is_quantized(spec)
    )


def micro_batches_in_flight(work: Work, mesh: Mesh, stage: int) -> int:
    """Micro-batches whose activations a stage holds: 1F1B (Narayanan et al. 2019, PipeDream),
    earlier stages more.
    """
    return min(mesh.pp - stage, work.global_batch // (mesh.dp * mesh.micro_batch))


def peak_moment(work: Work, machine: Machine, mesh: Mesh, stage: int) -> Peak:
    """Bytes of activations, logits and temporary buffers when a micro-batch needs the most.

    dp changes them only by `micro_batches_in_flight`. `work` is that of `on_machine`.
    """
    activations = _stage_activations(work, mesh, stage)
    if work.shards_fully and mesh.shards > 1:
        return peak_of_moments(
            _sharded_stage(work, machine, mesh, stage, activations),
            lambda in_flight: _moments(
                work, machine, mesh, stage, replace(activations, in_flight=in_flight)
            ),
        )
    moments = _moments(work, machine, mesh, stage, activations)
    return Peak(*max([*moments.last_layer, *moments.embedding, *moments.loss], key=sum))


@dataclass(frozen=True)
class StageActivations:
    """Bytes that a pipeline stage saves for its backward passes."""

    by_kind: Mapping[Work, float]
    """A layer's bytes of a micro-batch, by kind, if nothing is computed again."""
    micro_batch: float
    """The stage's bytes of a micro-batch."""
    in_flight: int
    recomputed: float
    """Bytes of a layer's second forward pass."""

    @property
    def in_flight_bytes(self) -> float:
        return self.in_flight * self.micro_batch

    @property
    def top(self) -> float:
        """While the last layer has its backward pass."""
        return self.in_flight_bytes + self.recomputed


def _stage_activations(work: Work, mesh: Mesh, stage: int) -> StageActivations:
    shape, w, tokens = work.shape, work.width, work.seq_len * mesh.micro_batch // mesh.cp
    kinds = {
        work.of_kind(kind): n for kind, n in stage_kinds(shape, mesh.pp, stage, mesh.layers).items()
    }
    part, last = tokens * shape.hidden / _along_sequence(mesh), stage == mesh.pp - 1
    saved_bytes = {kind: tokens * saved_per_token(kind, mesh) for kind in kinds}
    full = mesh.recompute == "full"
    # Recomputed in full, a layer keeps its input only, cut along the sequence.
    stage_bytes = (
        sum(kinds.values()) * w * part
        if full
        else sum(n * saved_bytes[kind] for kind, n in kinds.items())
    )
    if work.lora and not full:
        stage_bytes += (
            w * trained_numbers(work, mesh, stage) if w == 2 else 0.0
        )  # the factors in half precision
        stage_bytes -= (
            (w if shape.plain else _norm_input(work)) * part if stage == 0 else 0.0
        )  # nothing trained before it
    # A stage keeps the tensors that it sent, and those that it received unless a norm saved them
    # (in fp32).
    stage_bytes += w * part * ((stage > 0 and w == 2) + (not last))
    # One layer at a time is computed again: the largest counts, once, not per micro-batch.
    recomputed_bytes = max(saved_bytes.values(), default=0.0) if full else 0.0
    if mesh.recompute == "selective":
        # Selective: one layer's attention terms come back, so the difference to saving all counts.
        unselective_mesh = replace(mesh, recompute="none")
        recomputed_bytes = max(
            (
                tokens * saved_per_token(kind, unselective_mesh) - saved_bytes[kind]
                for kind in kinds
            ),
            default=0.0,
        )
    return StageActivations(
        saved_bytes, stage_bytes, micro_batches_in_flight(work, mesh, stage), recomputed_bytes
    )


def _sharded_layer(kind: ModelShape, mesh: Mesh, saved_bytes: float) -> ShardedLayer:
    sizes = sizes_of_rank(kind, mesh.tp, mesh.ep)
    if mesh.ep == 1 or kind.experts is None:
        return ShardedLayer(sizes.layer, saved_bytes)
    # gpt-oss has biases behind its matrices.
    has_biases = kind.rules.experts is not None and kind.rules.experts.stacked == "pairs"
    last_matrix = 0 if has_biases else sizes.experts - sizes.gate_up
    shared_expert = 3 * kind.experts.shared * kind.hidden // mesh.tp
    return ShardedLayer(sizes.layer, saved_bytes, sizes.experts, last_matrix, shared_expert)


def _sharded_stage(
    work: Work, machine: Machine, mesh: Mesh, stage: int, activations: StageActivations
) -> ShardedStage:
    """The same stage for the planner's account of FSDP2."""
    shape, last = work.shape, stage == mesh.pp - 1
    tokens = work.seq_len * mesh.micro_batch // mesh.cp
    part, w = tokens * shape.hidden / _along_sequence(mesh), work.width
    layers = tuple(
        _sharded_layer(
            kind,
            mesh,
            w * part if mesh.recompute == "full" else activations.by_kind[work.of_kind(kind)],
        )
        for kind in stage_layers(shape, mesh.pp, stage, mesh.layers)
    )
    queries = tokens * shape.heads * shape.mean_head_dim / mesh.tp
    return ShardedStage(
        layers,
        ends=stage_numbers(shape, mesh, stage) - sum(layer.numbers for layer in layers),
        head=sizes_of_rank(shape, mesh.tp).head if last else 0,
        width=w,
        shards=mesh.shards,
        expert_shards=mesh.shards // mesh.ep,
        has_gloo=not machine.has_accelerators,
        is_frozen=work.lora is not None,
        hidden_bytes=float(w * tokens * shape.hidden),
        # What a norm saves; its output, the gradient of this as a sum and a product, and of
        # queries; the residual's gradient.
        entry_bytes=part * (w if shape.plain else _norm_bytes(work))
        + w * (3 * tokens * shape.hidden + queries + part),
        recomputed_bytes=activations.recomputed,
        micro_batches=work.global_batch // (mesh.dp * mesh.micro_batch),
        in_flight=activations.in_flight,
    )


def worst_core(work: Work, machine: Machine, mesh: Mesh) -> tuple[int, CoreMemory]:
    """The pipeline stage that needs the most memory, and how much."""
    stage_needs = ((s, core_memory(work, machine, mesh, s)) for s in peak_stages(work, mesh))
    return max(stage_needs, key=lambda f: f[1].total)


def peak_stages(work: Work, mesh: Mesh) -> list[int]:
    """The stages of which one needs the most memory: the ends, and the first of the stages with the
    same layers, as later ones hold fewer micro-batches.
    """
    return distinct_stages(work.shape, mesh.pp, mesh.layers)


def host_memory(work: Work, machine: Machine, mesh: Mesh) -> HostMemory:
    """Loading takes one parameter at a time, as ranks read slices; saving copies the host's part of
    the state.
    """
    shard = max(optimizer_share(work, mesh, stage)[1] for stage in (0, mesh.pp - 1))
    weight_width = 4 if work.lora else work.width
    base = (PROCESS if machine.has_accelerators else 0.0) * machine.cores
    # Weights, two fp32 moments, and fp32 masters of half-precision weights, of each process.
    state = machine.cores * (weight_width + 8.0 + 4.0 * (weight_width == 2)) * shard
    largest = (
        4.0
        * max(sizes_of_rank(kind, mesh.tp, mesh.ep).largest for kind in work.shape.kinds)
        * machine.cores
    )
    if work.shards_fully and not work.lora:
        # A process makes its part of the files on the host, in memory from which they are written:
        # masters and moments. The first of those that share a stage makes the whole weights of it.
        state = machine.cores * 12.0 * shard
        largest += state
        if not work.saves_rows:
            stages = min(machine.cores, mesh.tp * mesh.pp)
            state += (
                stages
                * work.width
                * max(stage_numbers(work.shape, mesh, stage) for stage in (0, mesh.pp - 1))
            )
    # Engine native writes from this copy while training continues; nxd makes a second one.
    copies = 2 if work.gathers_again else 1
    return HostMemory(load=base + largest, save=base + state, async_save=base + copies * state)


def checkpoint_bytes(work: Work) -> float:
    """Bytes of a checkpoint: weights or adapters, and one copy of the optimizer's state."""
    if work.lora:
        return (
            AdapterShape.of(work.shape, work.lora).parameters() * 12.0
        )  # fp32 weight and two moments
    # The same per parameter: weight, two fp32 moments, fp32 master in half precision.
    return work.parameters * (work.width + 8.0 + 4.0 * (work.width == 2))


def saved_per_token(work: Work, mesh: Mesh) -> float:
    """Bytes per token that a decoder layer, if all are of one kind, saves for its backward pass.

    A norm saves its input (RMSNorm: an fp32 copy) and its output; a linear its input; attention q,
    k, v, output and log-sum-exp; a gated MLP four vectors of intermediate size, GPT-NeoX's MLP two.
    """
    if work.lora:
        return _saved_by_adapters(work, mesh, work.lora)
    shape, w = work.shape, work.width
    rank_sizes = sizes_of_rank(shape, mesh.tp)
    h, i = float(shape.hidden), shape.intermediate / mesh.tp
    part = h / _along_sequence(mesh)
    h = part if work.gathers_again else h  # input of a tensor-parallel region
    q, kv = shape.heads * shape.mean_head_dim / mesh.tp, rank_sizes.kv_heads * shape.mean_head_dim
    norms, inner = _block_norms(shape) * _norm_bytes(work), _inner_vectors(work)
    if (
        mesh.recompute == "selective" and not work.gathers_again
    ):  # engine native saves only the input of attention
        return (
            w * (part + 2 * h + inner * i)
            if shape.plain
            else norms * part + 2 * w * h + _saved_by_mlp(work, mesh)
        )
    if shape.delta is not None:
        return (
            norms * part
            + 2 * w * h
            + _saved_by_net(work, mesh, shape.delta)
            + _saved_by_mlp(work, mesh)
        )
    attention = (
        4.0 * shape.heads / mesh.tp * (mesh.cp == 1)
    )  # log-sum-exp, fp32; cut rows compute it again
    if mesh.recompute != "selective":
        attention += _scores(work, mesh)
    if shape.plain:
        # GPT-NeoX and GPT-2 in docs/planner-formulas.md, "Memory of a core"; so are the terms
        # below.
        return w * (part + 2 * h + 6 * q + inner * i) + attention
    # q and the output, k and v; repeated for each query head, k and v are as wide as q.
    attention += w * (4 * q if _repeats_kv_heads(work, mesh) else 2 * q + 2 * kv)
    if shape.qk_norm:
        attention += _norm_bytes(work) * (q + kv)  # q_norm and k_norm
    if shape.rules.gated:
        attention += 2 * w * q  # the gate's sigmoid, and the gated output
    if shape.latent is not None:
        attention += _saved_by_latents(work, mesh, shape.latent)
    return (
        norms * part
        + 2 * w * h
        + attention
        + _value_norm_bytes(shape, w, kv)
        + _saved_by_mlp(work, mesh)
    )


def _saved_by_mlp(work: Work, mesh: Mesh) -> float:
    """Bytes per token that a gated MLP saves behind its input: four vectors of intermediate size.

    Experts: each choice of a token keeps a copy of its hidden state, these vectors, and the output
    before it is weighted. gpt-oss keeps seven vectors, as it bounds gate and up. The router keeps
    fp32 probabilities, and some 40 bytes for a choice (its number, weights, and places among the
    rows). With ep the rows are those that arrive.
    """
    shape, w, sizes = work.shape, work.width, work.shape.experts
    if sizes is None:
        return float(_inner_vectors(work)) * w * shape.intermediate / mesh.tp
    rows = work.rows(mesh)
    vectors = 7 if work.bounds_experts else _inner_vectors(replace(work, is_compiled=False))
    # Rows that arrive: the copied hidden state and the expert's vectors. `chosen` counts rows that
    # left: the output of each before it is weighted.
    inner = w * rows * (shape.hidden + vectors * sizes.width / mesh.tp) + (
        16.0 * rows if mesh.ep > 1 else 0.0
    )
    if shape.has_mlp:  # and the input of the router, scaled twice, and that of the experts
        inner += w * (_inner_vectors(work) * shape.intermediate / mesh.tp + 3 * shape.hidden)
    if _has_fp32_router(shape) and w == 2:
        inner += 4.0 * shape.hidden  # the router's input in fp32
    inner += _saved_by_shared(work, mesh, sizes)
    return inner + w * sizes.chosen * shape.hidden + 4.0 * sizes.count + 40.0 * sizes.chosen


def _saved_by_shared(work: Work, mesh: Mesh, sizes: ExpertSizes) -> float:
    """Bytes per token that the expert that all tokens share saves; its output too if a gate
    multiplies it.
    """
    names = work.shape.rules.experts
    has_gate = names is not None and names.shared_gate and sizes.shared > 0
    vectors = _inner_vectors(replace(work, is_compiled=False))  # experts are not compiled
    return work.width * (vectors * sizes.shared / mesh.tp + work.shape.hidden * has_gate)


def _has_fp32_router(shape: ModelShape) -> bool:
    return shape.rules.experts is not None and shape.rules.experts.fp32_router


def _saved_by_latents(work: Work, mesh: Mesh, latent: LatentSizes) -> float:
    """Bytes per token that latent attention saves beyond q, k, v and output: its latents, whole on
    every rank, before and behind their norms. Kernels have one head size, so keys of other sizes
    than values are kept padded, and the output once more without its padding.
    """
    shape, w = work.shape, work.width
    saved_bytes = float((_norm_bytes(work) + w) * ((latent.q_rank or 0) + latent.kv_rank))
    if latent.head_dim == latent.value_dim:
        # The product that has all values also has the keys without their turned part. Off GPUs
        # the output comes by heads, and is copied by tokens.
        copy = 0 if work.varlen else latent.value_dim
        return saved_bytes + w * shape.heads / mesh.tp * (latent.nope_dim + copy)
    padding = 2 * abs(latent.head_dim - latent.value_dim)
    return saved_bytes + w * shape.heads / mesh.tp * (padding + latent.value_dim)


def _widest_mlp(shape: ModelShape) -> int:
    """The units of the MLP of a layer, or of the expert that all tokens share."""
    shared_width = 0 if shape.experts is None else shape.experts.shared
    return max(shape.intermediate if shape.has_mlp else 0, shared_width)


def _block_norms(shape: ModelShape) -> int:
    """The norms of a block; experts next to an MLP have three, and the router one."""
    is_next_to_mlp = shape.experts is not None and shape.has_mlp
    return len(shape.rules.block_norms) + 4 * is_next_to_mlp


def _value_norm_bytes(shape: ModelShape, w: int, kv: float) -> float:
    """Bytes that a norm of values saves; keys that are also values are kept once, but for their
    copies in fp32.
    """
    return 4 * kv if shape.rules.value_norm and not (shape.values_are_keys and w == 4) else 0.0


def _norm_bytes(work: Work) -> float:
    """Bytes that an RMSNorm saves for each number: its input in fp32, and its output before the
    weight.

    Compiled it saves its input only, in the format that it came in.
    """
    if work.is_compiled:
        return work.width
    return 8 if work.shape.rules.wide_norms else 4 + work.width


def _norm_input(work: Work) -> int:
    """Bytes of these that are its input; a frozen norm saves no more."""
    return work.width if work.is_compiled else 4


TENSORS_SAVED_BY = {
    "gelu_new": 4,
    "gelu_fast": 7,
    "gelu_python": 3,
    "quick_gelu": 2,
    "relu": 0,
    "tanh": 0,
    "sigmoid": 0,
}
"""Tensors that an activation saves for its backward pass, other than its output; any other saves
its input only.

transformers computes some of them with several operators (`ACT2FN`), each of which saves its
inputs.
"""


def _inner_vectors(work: Work) -> int:
    """Count the vectors of inner width that an MLP saves: those of its activation, and the input of
    the last linear.

    With a gate also both factors of that. Compiled, the activation is computed again from its
    input.
    """
    plain = work.shape.plain
    if work.is_compiled:
        return 2 if plain else 3
    return TENSORS_SAVED_BY.get(work.shape.activation, 1) + (1 if plain else 3)


def _saved_by_net(work: Work, mesh: Mesh, net: DeltaSizes) -> float:
    """Bytes per token that a gated delta net saves: q, k and v before the convolution, and the norm
    of its output.

    The rest is computed again in the backward pass (`_net_recompute_bytes`).
    """
    w, values, heads = work.width, net.values / mesh.tp, net.value_heads / mesh.tp
    saved_bytes = w * (2 * net.keys / mesh.tp + values + 2 * heads) + 4 * heads + (12 + w) * values
    if work.lora is None:
        return (
            saved_bytes + 2 * w * values
        )  # for the gradients of the norm's weight and of out_proj
    targets = {*work.lora.targets}
    entry = targets & {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    saved_bytes += w * (work.shape.hidden * bool(entry) + values * ("out_proj" in targets))
    return saved_bytes + w * work.lora.rank * len(entry | targets & {"out_proj"})


# fp32 numbers for each token and value head at the peak of a delta rule's backward pass, by bytes
# of an activation: per number of q, k and v before the convolution, per number of a key, the same
# if key heads are repeated, per number of a value, per number of a state at each chunk, and 64; for
# one chunk, and for many. Fitted to peaks of 11 sizes (within 2 %), as the order in which autograd
# frees them decides.
_NET_AGAIN = {
    4: ((6.55, 5.29, 3.03, 4.77, 2.00, 8.38), (6.42, 8.88, 3.61, 2.31, 1.70, 9.64)),
    2: ((3.87, 7.90, 0.86, 6.04, 1.79, 8.15), (3.89, 10.44, 1.40, 3.55, 2.00, 9.49)),
}


def _net_recompute_bytes(work: Work, mesh: Mesh, net: DeltaSizes) -> float:
    """Bytes of a micro-batch at the peak of a gated delta net's backward pass, which
    `_saved_by_net` does not count.
    """
    qkv_width, heads = 2 * net.keys + net.values, net.value_heads
    repeated_key_dim = net.key_dim * (net.value_heads > net.key_heads)
    sizes = (
        qkv_width / heads,
        net.key_dim,
        repeated_key_dim,
        net.value_dim,
        net.key_dim * net.value_dim / net.CHUNK,
        net.CHUNK,
    )
    chunks = -(-work.seq_len // net.CHUNK)
    one_chunk, many_chunks = (
        sum(a * b for a, b in zip(row, sizes, strict=True)) for row in _NET_AGAIN[work.width]
    )
    tokens = (
        chunks * net.CHUNK * mesh.micro_batch / mesh.cp
    )  # with cut rows: all tokens of a part of the heads
    # The fit has one row for a single chunk and one for many; a row of n chunks is their mean with
    # weights 1/n and 1 - 1/n.
    peak_bytes = 4.0 * tokens * heads / mesh.tp * (many_chunks + (one_chunk - many_chunks) / chunks)
    # Frozen taps of the convolution do not need their inputs.
    return peak_bytes - (3.0 * work.width * qkv_width / mesh.tp * tokens if work.lora else 0.0)


def _saved_by_adapters(work: Work, mesh: Mesh, lora: Lora) -> float:
    """The same with frozen weights: only adapted linears save their input, and norms do not save
    their input.
    """
    shape, w = work.shape, work.width
    rank_sizes = sizes_of_rank(shape, mesh.tp)
    h, i = float(shape.hidden), shape.intermediate / mesh.tp
    if shape.experts is not None:
        i = shape.experts.shared / mesh.tp
    part = h / _along_sequence(mesh)
    h = part if work.gathers_again else h
    q, kv = shape.heads * shape.mean_head_dim / mesh.tp, rank_sizes.kv_heads * shape.mean_head_dim
    neox = shape.plain
    inner = _inner_vectors(work) - 1
    entry = {"query_key_value"} if neox else {"q_proj", "k_proj", "v_proj", "qkv_proj"}
    entry |= {"q_a_proj", "kv_a_proj_with_mqa"}
    up, down = (
        ({"dense_h_to_4h"}, "dense_4h_to_h")
        if neox
        else ({"gate_proj", "up_proj", "gate_up_proj"}, "down_proj")
    )
    targets = {*lora.of_linears}
    mlp = targets & {*up, down}
    saved_bytes = w * (h * bool(up & targets) + i * (down in targets) + lora.rank * len(mlp))
    behind = (
        inner * w * i
        if shape.experts is None
        else _saved_by_mlp(work, mesh) - w * i + _saved_by_expert_factors(work, mesh, lora)
    )
    saved_bytes += (
        w * (part + inner * i) if neox else _block_norms(shape) * _norm_input(work) * part + behind
    )
    if (
        mesh.recompute == "selective" and not work.gathers_again
    ):  # engine native saves only the input of attention
        return saved_bytes + w * h
    if shape.delta is not None:
        return saved_bytes + _saved_by_net(work, mesh, shape.delta)
    saved_bytes += w * (h * bool(entry & targets) + lora.rank * len(targets - mlp))
    saved_bytes += 4.0 * shape.heads / mesh.tp * (mesh.cp == 1)
    if mesh.recompute != "selective":
        saved_bytes += _scores(work, mesh)
    if neox:
        return saved_bytes + w * 6 * q
    saved_bytes += w * (4 * q if _repeats_kv_heads(work, mesh) else 2 * q + 2 * kv)
    saved_bytes += _norm_input(work) * (q + kv) if shape.qk_norm else 0.0
    if shape.latent is not None:
        saved_bytes += _saved_by_latents(work, mesh, shape.latent)
    return saved_bytes + _value_norm_bytes(shape, w, kv)


def _saved_by_expert_factors(work: Work, mesh: Mesh, lora: Lora) -> float:
    """Bytes per token that the factors of experts save: each row times A, and with dropout its
    inputs and a mask.
    """
    shape, sizes = work.shape, work.shape.experts
    assert sizes is not None
    specs = AdapterShape.of(shape, replace(lora, targets=lora.of_experts)).layer
    inputs = sum(
        s.shape[2] / (1 if s.role is Role.FACTOR else mesh.tp) for s in specs if s.name.endswith(A)
    )
    dropout_bytes = (work.width + 1) * inputs if lora.dropout else 0.0
    return work.rows(mesh) * (work.width * lora.rank * len(specs) / 2 + dropout_bytes)


def _scores(work: Work, mesh: Mesh) -> float:
    """Bytes per token that a layer keeps of its attention weights if they are written to memory,
    and of a mask.
    """
    w, heads = work.width, work.shape.heads / mesh.tp
    if work.varlen:
        return 0.0
    if work.shape.rules.sinks and mesh.cp == 1:
        # An fp32 softmax, in half precision a copy of it, and a mask; of several blocks nothing.
        single_block = work.seq_len <= SINK_QUERIES
        return (
            ((4.0 + (w if w == 2 else 0)) * heads + 1) * (work.seq_len + 1) if single_block else 0.0
        )
    if mesh.cp > 1:  # cut rows compute them again, a chunk at a time
        return 0.0
    if work.fused_attention:
        # torch's kernels turn a mask of booleans into numbers, which each layer keeps: for every
        # row if samples differ.
        has_mask = work.has_mask and not work.gathers_again
        return (
            w * work.seq_len / (1 if work.separates_documents else mesh.micro_batch)
            if has_mask
            else 0.0
        )
    if (
        work.separates_documents and work.gathers_again
    ):  # engine nxd: an fp32 softmax, in bf16 a copy of it, and each layer's mask
        return ((4.0 + (w if w == 2 else 0)) * heads + 1) * work.seq_len
    return 2.0 * w * heads * work.seq_len


def _moments(
    work: Work, machine: Machine, mesh: Mesh, stage: int, activations: StageActivations
) -> Moments:
    """The moments of a step that can be its peak, with whole weights and gradients."""
    shape, w, tokens = work.shape, work.width, work.seq_len * mesh.micro_batch // mesh.cp
    rank_sizes = sizes_of_rank(work.shape, mesh.tp)
    hidden_numbers = tokens * shape.hidden
    embedding: list[Moment] = []
    if stage == 0 and not work.lora:  # end of the backward pass: the embedding's gradient
        embedding.append((0.0, 0.0, w * rank_sizes.embed + w * hidden_numbers))
    loss: list[Moment] = []
    if stage == mesh.pp - 1:
        part = hidden_numbers / _along_sequence(mesh)
        norm_bytes = part * (w if shape.plain else _norm_bytes(work))
        # The final norm's input and its output, which the head reads; frozen, only the input in
        # fp32.
        ends = 4.0 * part if work.lora else hidden_numbers * w + norm_bytes
        make_moments = (
            _whole_loss_moments if work.gathers_again or work.loss == "whole" else _loss_moments
        )
        loss += make_moments(work, machine, mesh, tokens, activations.in_flight_bytes + ends)
    return Moments(_layer_moments(work, machine, mesh, stage, activations), embedding, loss)


def _layer_moments(
    work: Work, machine: Machine, mesh: Mesh, stage: int, activations: StageActivations
) -> list[Moment]:
    """Moments of the backward pass of the last layer."""
    shape, w, tokens = work.shape, work.width, work.seq_len * mesh.micro_batch // mesh.cp
    rank_sizes, full = sizes_of_rank(work.shape, mesh.tp), mesh.recompute == "full"
    kinds, top = activations.by_kind, activations.top
    hidden_numbers = tokens * shape.hidden
    inner = tokens * max((_widest_mlp(kind.shape) for kind in kinds), default=0) / mesh.tp
    # The gradient of the largest matrix, as wide as activations. The embedding's has its own
    # moment, below.
    largest = max(
        (sizes_of_rank(kind_work.shape, mesh.tp, mesh.ep).largest for kind_work in kinds), default=0
    )
    biggest: float = w * (largest if largest != rank_sizes.embed else 0)
    if work.lora:
        # Frozen matrices have no gradient: an adapter's factor is the largest, in fp32.
        biggest = 4.0 * work.lora.rank * max(shape.intermediate, shape.hidden)
        if work.lora.of_experts and shape.experts is not None:
            widest = max(shape.hidden, 2 * shape.experts.width / mesh.tp)
            biggest = 4.0 * work.lora.rank * widest * shape.experts.count / mesh.ep
    if work.quantizes:  # one weight as it is multiplied, and its blocks' scales in fp32
        largest_quantized = max(
            (size for kind in kinds for size in _quantized_sizes(kind.shape, mesh.tp)), default=0
        )
        biggest += largest_quantized * (w + 12 / BLOCK)
    gradients = biggest or w * shape.intermediate / mesh.tp * shape.hidden
    # Of a layer computed again in compiled code, the input of the last linear is gone by
    # then: by the peaks of two runs on an H200 (gpu_kernels.toml: h06, h07).
    vectors = 1 if full and work.is_compiled else 2
    moments = [
        # Backward pass of a layer's MLP: gradients of its output and of two inner vectors.
        (
            top,
            0.0,
            gradients + w * (hidden_numbers + vectors * inner),
        ),
    ]
    if any(kind.shape.experts is not None for kind in kinds):
        moments += [
            (top - freed_bytes, 0.0, passing)
            for freed_bytes, passing in _expert_moments(work, mesh, tokens)
        ]
    # The peak is the largest moment, not their sum: what one moment needs another has freed.
    moments += _net_moments(work, mesh, stage, kinds, activations.in_flight_bytes)
    if mesh.cp > 1:
        moments += _cut_moments(work, machine, mesh, stage, top)
    elif work.varlen:
        moments.append(
            (
                top,
                0.0,
                max((_chunk_scores(kind, mesh) for kind in kinds), default=0.0),
            )
        )
    elif shape.rules.sinks and kinds:
        # Gradients of a block's probabilities and scores, and if it is made again these too, fitted
        # to peaks of fp32 and bf16. By then the layer's MLP is freed.
        size = min(work.seq_len, SINK_QUERIES) * float(tokens) * shape.heads / mesh.tp
        each_score = 8.0 if work.seq_len <= SINK_QUERIES else 12.0
        freed_bytes = tokens * max(_saved_by_mlp(kind, mesh) for kind in kinds)
        moments.append((top - freed_bytes, 0.0, each_score * size + 4 * w * hidden_numbers))
    elif not work.fused_attention and kinds:  # gradients of the scores and of their softmax
        each_score = 8.0 if work.gathers_again else 2.0 * w  # NxD's softmax is in fp32
        moments.append(
            (
                top,
                0.0,
                each_score * shape.heads / mesh.tp * work.seq_len * tokens + w * hidden_numbers,
            )
        )
    return moments


def _whole_loss_moments(
    work: Work, machine: Machine, mesh: Mesh, tokens: int, saved_bytes: float
) -> Iterator[Moment]:
    """Moments of a loss of all logits at once: engine nxd, and native before it had pieces."""
    shape, w, rank_sizes = work.shape, work.width, sizes_of_rank(work.shape, mesh.tp)
    rows = tokens * rank_sizes.vocab
    # One rank: log-probabilities, their gradient and that of the logits, all fp32. A divided
    # vocabulary: logits and one fp32 copy, updated in place.
    logits = 12.0 * rows if mesh.tp == 1 else (4.0 + w) * rows
    logits += w * rows if shape.capped else 0.0
    yield saved_bytes, logits, 0.0
    weight_gradient = 0 if work.lora else w * rank_sizes.head
    yield saved_bytes, w * rows, weight_gradient + w * tokens * shape.hidden


def _loss_moments(
    work: Work, machine: Machine, mesh: Mesh, tokens: int, saved_bytes: float
) -> Iterator[tuple[float, float, float]]:
    """The same at moments of the last piece of the loss: its gradient, the two products with it,
    and the end.

    A product in half precision, its log-probabilities in fp32, and their gradient in half
    precision; in fp32 the gradient takes the place of the log-probabilities. CPUs convert the
    product first.
    """
    shape, w, rank_sizes = work.shape, work.width, sizes_of_rank(work.shape, mesh.tp)
    cuda = machine.has_accelerators and not machine.neuron
    device = "cuda" if cuda else "neuron" if machine.neuron else "cpu"
    rows = min(tokens, loss_rows(tokens, shape.hidden, rank_sizes.vocab, device))
    # 8 bytes per logit, 10 on CPUs in half precision without tp: docs/planner-formulas.md.
    logit_bytes = 10.0 if w == 2 and mesh.tp == 1 and not cuda else 8.0
    if (
        cuda and work.is_compiled
    ):  # nothing in fp32 leaves a fused kernel: 0.8 to 1 GiB of five runs
        logit_bytes = 2.0 * w
    if shape.capped:
        logit_bytes = max(logit_bytes, 8.0 + w)
    # The gradient of hidden states so far, and of all of them.
    earlier_gradients, hidden_bytes = w * (tokens - rows) * shape.hidden, w * tokens * shape.hidden
    recomputed_bytes = hidden_bytes if work.lora else 0.0  # no weight keeps the hidden states
    head = 0 if work.lora else rank_sizes.head
    rounded_head = 0.0 if w == 4 or cuda else float(w * head)
    summed_head = 0.0
    if work.shards_fully and mesh.shards > 1:
        # The output matrix has its gradient as a tensor: of several pieces a sum in fp32.
        summed_head, rounded_head = (
            (4.0 * head, rounded_head) if rows < tokens else (0.0, float(w * head))
        )
    saved_bytes += recomputed_bytes
    yield saved_bytes, logit_bytes * rows * rank_sizes.vocab, earlier_gradients + summed_head
    yield (
        saved_bytes,
        w * rows * rank_sizes.vocab,
        hidden_bytes + rounded_head + summed_head,
    )
    if rows < tokens:
        # In half precision the sum is rounded last.
        rounded_sum = float(w * head) if summed_head and w == 2 else 0.0
        yield saved_bytes, 0.0, max(2 * hidden_bytes, hidden_bytes + rounded_sum) + summed_head


def _expert_moments(work: Work, mesh: Mesh, tokens: float) -> Iterator[tuple[float, float]]:
    """(saved bytes that are gone, temporary ones) at moments of the backward pass of experts.

    The gradient of the weighted outputs and its product with them; then the gradients of the first
    matrices of all the rank's experts, which are one tensor, with those of their inputs and
    outputs.
    """
    shape, w, sizes = work.shape, work.width, work.shape.experts
    assert sizes is not None
    rank_sizes = sizes_of_rank(
        next(kind for kind in shape.kinds if kind.experts is not None), mesh.tp, mesh.ep
    )
    weights = 0.0 if work.lora else float(w)
    routed_bytes = w * tokens * sizes.chosen * shape.hidden
    rows = w * tokens * work.rows(mesh)
    width = sizes.width / mesh.tp
    yield 0.0, 2 * routed_bytes + w * tokens * shape.hidden
    yield (
        routed_bytes,
        rows * (shape.hidden + 3 * width) + weights * (rank_sizes.experts - rank_sizes.gate_up),
    )
    freed_bytes = routed_bytes + rows * (7 if work.bounds_experts else 4) * width
    # With full sharding, gradients stay until the layer's backward pass ends.
    is_cut = work.shards_fully and mesh.shards > 1
    gradients = rank_sizes.experts if is_cut else rank_sizes.gate_up
    yield (
        freed_bytes,
        rows * (shape.hidden + 2 * width) + weights * gradients + w * tokens * shape.hidden,
    )


def _net_moments(
    work: Work, mesh: Mesh, stage: int, saved_bytes: Mapping[Work, float], base_bytes: float
) -> Iterator[tuple[float, float, float]]:
    """(activations, logits, temporary buffers) when the stage's last gated delta net is computed
    again.
    """
    shape, w, tokens = work.shape, work.width, work.seq_len * mesh.micro_batch // mesh.cp
    layers = stage_layers(shape, mesh.pp, stage, mesh.layers)
    last = max((i for i, kind in enumerate(layers) if kind.delta is not None), default=None)
    if last is None or shape.delta is None:
        return
    net = work.of_kind(layers[last])
    values = shape.delta.values / mesh.tp
    part = shape.hidden / _along_sequence(mesh)
    # What the backward pass has freed: the layers behind it, its own MLP with the norm before, and
    # its output's norm.
    freed_bytes = saved_bytes[net] - tokens * (
        w * (2 * shape.delta.keys / mesh.tp + values + shape.hidden) + _norm_bytes(work) * part
    )
    if mesh.recompute == "full":
        base_bytes += saved_bytes[net] - w * part * tokens * (len(layers) - 1 - last)
    else:
        base_bytes -= sum(saved_bytes[work.of_kind(kind)] for kind in layers[last + 1 :])
    if mesh.recompute == "selective":
        freed_bytes = tokens * (
            _saved_by_mlp(net, mesh) + w * shape.hidden + _norm_bytes(work) * part
        )
        base_bytes += tokens * w * (2 * shape.delta.keys / mesh.tp + values)
    yield (
        base_bytes - freed_bytes,
        0.0,
        _net_recompute_bytes(net, mesh, shape.delta) + 2 * tokens * w * shape.hidden,
    )


def _step_buffers(machine: Machine, width: int, shard: int) -> float:
    """Buffers of the optimizer's step: the rank's new weights to share, or the terms of an unfused
    Adam.

    Neuron cores, on which no peak was measured, are assumed to make these. On GPUs AdamW is one
    kernel without them: a Llama-2-7B took 115.6 GiB of an H200, and would have taken 163.
    """
    return max(width * shard, 8.0 * shard if machine.neuron else 0.0)


def standing_bytes(work: Work, mesh: Mesh) -> float:
    """Bytes of ids and labels of the batch, rotary tables, and the mask if there is one."""
    shape, t = work.shape, work.seq_len / mesh.cp
    # Ids and labels, int64 each, of all micro-batches of the step.
    ids = 16.0 * work.global_batch / mesh.dp * t
    mask = (
        float(mesh.micro_batch * t * t)
        if work.has_mask and mesh.cp == 1 and not work.varlen
        else 0.0
    )
    rotary_width = sum({kind.rotary_head_dim for kind in shape.kinds})
    return ids + t * (2.0 * work.width * rotary_width + 8) + mask


def _repeats_kv_heads(work: Work, mesh: Mesh) -> bool:
    """Whether attention keeps keys and values once for each query head: torch's kernels with a mask
    need it, and the attention with sinks under masks does it.
    """
    return (work.has_mask or work.shape.rules.sinks) and mesh.cp == 1 and not work.varlen


def _chunk_scores(work: Work, mesh: Mesh) -> float:
    """Bytes of the scores of a chunk, their gradients, and both in the width of activations, on a
    GPU whose FlashAttention does not take the format or the heads of a layer.
    """
    if work.width == 2 and max(work.shape.head_dim, work.shape.value_dim) <= FLASH_HEAD:
        return 0.0
    scores = min(
        CHUNK_SCORES, work.shape.heads / mesh.tp * min(QUERIES["cuda"], work.seq_len) * work.seq_len
    )
    return (8.0 + 2 * work.width) * scores


def _cut_moments(
    work: Work, machine: Machine, mesh: Mesh, stage: int, base_bytes: float
) -> Iterator[tuple[float, float, float]]:
    """The same when attention over cut rows is computed again, on the rank whose queries see whole
    rows.

    Keys and values of whole rows, their gradients in fp32, those of the last chunk, and the chunk's
    mask. On GPUs there is no mask, and FlashAttention makes the gradients of keys and values for
    each head of queries first.
    """
    shape, w, tokens = work.shape, work.width, work.seq_len * mesh.micro_batch // mesh.cp
    layers = stage_layers(shape, mesh.pp, stage, mesh.layers)
    last = max((i for i, kind in enumerate(layers) if kind.delta is None), default=None)
    if last is None:
        return
    layer = layers[last]
    q, kv = (
        layer.heads * layer.mean_head_dim / mesh.tp,
        sizes_of_rank(layer, mesh.tp).kv_heads * layer.mean_head_dim,
    )
    device = "neuron" if machine.neuron else "cuda" if machine.has_accelerators else "cpu"
    queries = min(QUERIES[device], work.seq_len / mesh.cp)
    whole_tokens = work.seq_len * mesh.micro_batch
    # What the backward pass has freed: the MLP with the norm before it, and the output of
    # attention.
    freed_bytes = (
        tokens * w * ((2 if shape.plain else 4) * layer.intermediate / mesh.tp + shape.hidden + q)
    )
    freed_bytes += (
        0 if shape.plain else tokens * _norm_bytes(work) * shape.hidden / _along_sequence(mesh)
    )
    keys, mask = (
        whole_tokens * kv * 2 * (w + 4),
        queries * work.seq_len * (mesh.micro_batch if work.separates_documents else 1),
    )
    mask_or_gradients = max((1 + w) * mask, w * mask + whole_tokens * kv * 2 * w)
    if work.varlen:
        mask_or_gradients = whole_tokens * (q + kv) * 2.0 * w + _chunk_scores(
            work.of_kind(layer), mesh
        )
    gradient_numbers = (
        3 if shape.plain else 1
    ) * shape.hidden  # gradients: of the residual, of the MLP and of its norm's input
    if machine.neuron:  # scores, their softmax, and the gradients of both
        mask_or_gradients += 4.0 * w * layer.heads / mesh.tp * queries * whole_tokens
    yield (
        base_bytes - freed_bytes,
        0.0,
        keys + mask_or_gradients + w * tokens * (2 * q + gradient_numbers),
    )


def _along_sequence(mesh: Mesh) -> int:
    return mesh.tp if mesh.sequence_parallel else 1
