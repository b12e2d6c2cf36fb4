"""The subject of a plan: one model, one mesh and one kind of machine; and why they may not fit
together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise
from math import prod
from typing import Any, Literal

from smtrain.core.config import JobConfig
from smtrain.core.config.compute import MachineEntry
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance, table
from smtrain.core.facts.engines import no_gpu_for_fp16, no_qlora
from smtrain.core.facts.gpus import has_bf16, no_bf16, peak_tflops, without_kernels
from smtrain.core.facts.name_suggestions import instance_meant
from smtrain.core.facts.trainium2 import (
    Group,
    first_group_off_torus,
    pairs_of,
    torus_chip,
    torus_sentence,
)
from smtrain.core.model.blocks import Role
from smtrain.core.model.footprint import Precision, width
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora
from smtrain.core.model.quantized import cut_faults
from smtrain.core.model.shape import LAYER, ModelShape

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
GIB = 2**30
DOCUMENT = 1024
"""Tokens of a sample or document whose length is not known, an assumption."""


def parse_machine(text: str, key: str = "machines") -> tuple[str, int]:
    """The instance type and the count in `ml.trn1.32xlarge:4`. Raises `ConfigError` for other text,
    naming `key`.
    """
    type_, _, count = text.rpartition(":")
    if not type_ or not count.isdecimal() or not 1 <= int(count) <= 10_000:
        raise ConfigError(
            f"{key}: {text!r} must look like ml.trn1.32xlarge:4", code="config.wrong_value"
        )
    return type_, int(count)


@dataclass(frozen=True)
class Machine:
    """The hosts of a job: `count` instances of one type, `cores` training processes on each."""

    type: str
    count: int
    cores: int
    core_flops: float
    """Dense peak of a core in the training dtype, in operations per second."""
    core_bytes: float
    """Memory of a core's device; without an accelerator, a process's share of the host."""
    host_bytes: float
    network: float
    """Network of a host, in bytes per second."""
    has_accelerators: bool = True
    disk_bytes: float = 0.0
    link: float = 0.0
    """From a device to another of its host, in bytes per second and direction; 0: in proportion
    to its peak.
    """
    chip: str = ""
    """The GPU, as in core/facts/instances.toml; empty for Neuron cores and for described machines
    that name no chip.
    """
    torus_chip: int | None = None
    """Processes on a chip, if groups of processes must tile the torus of a host's chips
    (core/facts/trainium2.py).
    """

    @classmethod
    def of(
        cls, type_: str, count: int, cores: int | None = None, lnc: int | None = None
    ) -> Machine:
        """The machine in a row of core/facts/instances.toml.

        Raises `ConfigError` for an unknown type.

        lnc: physical cores behind each Neuron core, which share its peak and memory. Default: those
        of the type.
        """
        row = instance(type_)
        if type_ in table("instances")["cpu"] or (row is not None and "core_gib" not in row):
            raise ConfigError(
                f"compute.instance_type: {type_} has no accelerator, and only machines with one are"
                " planned for; try another with `smtrain plan CONFIG --machines"
                " ml.trn1.32xlarge:1`, or measure this machine with `smtrain plan --probe NAME`",
                code="config.wrong_value",
            )
        if fault := without_kernels(type_):
            raise ConfigError(fault, code="config.wrong_value")
        if row is None:
            type_names = (t for t, r in table("instances")["instances"].items() if "core_gib" in r)
            suggestion = instance_meant(type_)
            meant = f"did you mean {suggestion}? " if suggestion else ""
            kinds = ", ".join(
                dict.fromkeys(t.rpartition(".")[0] + ".*" if "." in t else t for t in type_names)
            )
            raise ConfigError(
                f"compute.instance_type: nothing is known about {type_} to plan with; {meant}known:"
                f" {kinds}; any other machine can be described under machines (`smtrain help gpus`)",
                code="config.wrong_value",
            )
        usual = row.get("logical_cores", 1)
        lnc = lnc or usual
        return cls(
            type=type_,
            count=count,
            cores=cores or row["cores"] * usual // lnc,
            core_flops=row["core_tflops"] * 1e12 * lnc / usual,
            core_bytes=row["core_gib"] * GIB * lnc / usual,
            host_bytes=row["host_gib"] * GIB,
            network=row["network_gbps"] * 1e9 / 8,
            disk_bytes=row.get("disk_gib", 0) * GIB,
            link=row.get("link_gbs", 0.0) * 1e9,
            chip=row.get("chip", ""),
            torus_chip=torus_chip(type_, lnc),
        )

    @classmethod
    def from_entry(cls, name: str, count: int, entry: MachineEntry) -> Machine:
        """A machine that the user describes.

        Raises `ConfigError` for several hosts without a network.
        """
        if count > 1 and entry.network_gbs is None:
            raise ConfigError(
                f"machines.{name}.network_gbs: is needed to plan with {count} hosts; give GB/s"
                " between them",
                code="config.missing_key",
            )
        return cls(
            type=name,
            count=count,
            cores=entry.devices,
            core_flops=(peak_tflops(entry.chip or "") or entry.tflops) * 1e12,
            core_bytes=entry.memory_gib * GIB,
            host_bytes=entry.host_memory_gib * GIB,
            network=(entry.network_gbs or entry.link_gbs or 1.0) * 1e9,
            has_accelerators=entry.kind != "cpu",
            link=0.0
            if entry.kind == "neuron"
            else (entry.link_gbs or entry.network_gbs or 1.0) * 1e9,
            chip=entry.chip or "",
        )

    @classmethod
    def of_config(cls, config: JobConfig) -> Machine:
        """The hosts of a config's train stage. Raises `ConfigError` as `of` and `from_entry` do."""
        compute, entry = config.compute, config.own_machine
        if entry is None:
            return cls.of(
                compute.instance_type,
                compute.instance_count,
                config.processes_per_instance,
                config.lnc,
            )
        machine = cls.from_entry(compute.instance_type, compute.instance_count, entry)
        return replace(machine, cores=config.processes_per_instance)

    @property
    def world(self) -> int:
        return self.count * self.cores

    @property
    def neuron(self) -> bool:
        """Whether its devices are Neuron cores, whose link has no figure."""
        return self.has_accelerators and not self.link


@dataclass(frozen=True)
class Mesh:
    """The division of model, batch and sequences over processes: pp outermost, then dp, cp, and tp
    innermost.
    """

    tp: int
    pp: int
    dp: int
    micro_batch: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    cp: int = 1
    layers: tuple[int, ...] = ()
    """Decoder layers of each pipeline stage; empty: even stages, the remainder last."""
    ep: int = 1
    """Ranks that share the experts of a layer; they are neighbours among dp x cp."""

    @classmethod
    def of_config(cls, config: JobConfig, layers: int | None = None) -> Mesh:
        """The mesh that a config names; `layers`, those of the model, tell what its pipeline_cuts
        leave to the last stage.
        """
        parallel, layers_per_stage = config.parallel, config.parallel.layers_per_stage
        if parallel.pipeline_cuts and layers is not None:
            layers_per_stage = tuple(
                stop - start for start, stop in pairwise((-1, *parallel.pipeline_cuts, layers - 1))
            )
        if parallel.virtual_stages > 1 and layers_per_stage:
            layers_per_stage = tuple(
                sum(layers_per_stage[rank :: parallel.pp]) for rank in range(parallel.pp)
            )
        return cls(
            parallel.tp,
            parallel.pp,
            config.dp,
            parallel.micro_batch_size,
            parallel.activation_checkpointing,
            parallel.sequence_parallel,
            parallel.cp,
            layers_per_stage,
            parallel.ep,
        )

    @property
    def shards(self) -> int:
        """Ranks that hold the same parameters, but for experts, and share the optimizer's state."""
        return self.dp * self.cp

    def __str__(self) -> str:
        long = f" x cp {self.cp}" if self.cp > 1 else ""
        experts = f" (ep {self.ep})" if self.ep > 1 else ""
        text = (
            f"tp {self.tp} x pp {self.pp}{long} x dp {self.dp}{experts}, micro-batch"
            f" {self.micro_batch}"
        )
        text += "" if self.recompute == "none" else f", {self.recompute} recomputation"
        text += ", sequence parallel" if self.sequence_parallel else ""
        runs = equal_runs(self.layers)
        stages = " + ".join(
            f"{times} x {count}" if times > 1 else str(count) for count, times in runs
        )
        return text + (f", stages of {stages} layers" if stages else "")


@dataclass(frozen=True)
class Work:
    """The training: the model's shape and the size of an optimizer step."""

    shape: ModelShape
    seq_len: int
    global_batch: int
    precision: Precision = "bf16"
    fused_attention: bool = True
    """False if scores are written to memory (stacks of 2023, TorchNeuron without its flash kernel,
    engine nxd with samples apart), which makes attention far slower.
    """
    separates_documents: bool = False
    """Whether attention keeps the samples or documents of a row apart."""
    varlen: bool = False
    """Whether attention takes the bounds of documents in place of a mask: engine native on GPUs."""
    gathers_again: bool = False
    """With sequence parallelism: whether the backward pass gathers a region's input again
    (neuronx-distributed, Megatron), or keeps the whole input from the forward pass (native engine).
    """
    lora: Lora | None = None
    """Adapters, if those are trained instead of the weights."""
    skew: float = 1.5
    """With ep, the rows of the rank whose experts get the most over the mean. An assumption: random
    routers give 1.1 to 1.5, and nothing but `capacity` bounds it.
    """
    capacity: float | None = None
    """The rows of each expert over the mean, the same in every step, if tokens beyond them are
    dropped.
    """
    whole_experts: bool = False
    """Whether each tensor-parallel rank sends its part of the tokens to whole experts
    (Megatron-core with parallel folding), instead of all tokens to its part of each expert (native
    engine).
    """
    is_compiled: bool = False
    """Whether layers and loss are compiled (`train.compile`, as decided)."""
    deterministic: bool = False
    """Whether only kernels are used that give the same bits each time (`train.deterministic`, as
    decided).
    """
    document: float | None = None
    """Tokens of the sample or document of the average token, if a row keeps several apart; None:
    not known.
    """
    shards_fully: bool = False
    """Whether ranks that hold the same parameters divide weights and gradients too
    (`parallel.shard: full`).
    """
    saves_rows: bool = False
    """Whether each rank saves the rows that it has (`checkpoint.format: dcp`)."""
    loss: str = ""
    """Its kernel by core/facts/gpu_kernels.toml, if not the one that engine native uses now."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self.shape.parameters()

    def flops_per_token(self) -> float:
        """Operations of one token's forward and backward pass, for MFU."""
        shape = self.shape if self.lora is None else AdapterShape.of(self.shape, self.lora)
        return shape.flops_per_token(self.seq_len)

    @property
    def has_mask(self) -> bool:
        """Whether attention gets a mask: samples apart, or a window shorter than the sequence."""
        return self.separates_documents or (
            self.shape.sliding_window is not None and self.shape.sliding_window < self.seq_len
        )

    @property
    def documents(self) -> float:
        """Samples or documents of a row among which no attention goes: 1 if they are not kept
        apart.
        """
        return (
            max(1.0, self.seq_len / (self.document or DOCUMENT))
            if self.separates_documents
            else 1.0
        )

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return width(self.precision)

    @property
    def quantizes(self) -> bool:
        """Whether the frozen linears are kept in 4 bits (QLoRA)."""
        return self.lora is not None and self.lora.quantize is not None

    @property
    def least_width(self) -> float:
        """The fewest bytes of a weight: half a byte of those that QLoRA quantises."""
        return 0.5 if self.quantizes else self.width

    def rows(self, mesh: Mesh) -> float:
        """Rows that a rank's experts get for each token, those of padding included; 0 without
        experts.
        """
        share = self.capacity or (self.skew if mesh.ep > 1 else 1.0)
        return 0.0 if self.shape.experts is None else self.shape.experts.chosen * share

    @property
    def bounds_experts(self) -> bool:
        """Whether experts bound their gate and up, which keeps more for the backward pass
        (gpt-oss).
        """
        names = self.shape.rules.experts
        return names is not None and names.stacked == "pairs"

    def of_kind(self, kind: ModelShape) -> Work:
        """This work for a model whose layers are all of one kind."""
        return self if kind == self.shape else replace(self, shape=kind)


@dataclass(frozen=True)
class RankSizes:
    """Parameters on a tensor-parallel rank: of a decoder layer, if all are of one kind, and of the
    two ends.
    """

    layer: int
    """The first one, if layers differ."""
    embed: int
    norm: int
    head: int
    positions: int
    """Table of learned positions, on the first stage."""
    kv_heads: int
    """Key/value heads of a rank, copies included."""
    vocab: int
    """Rows of the embedding and columns of the logits."""
    largest: int
    """Size of its largest parameter."""
    experts: int = 0
    """Parameters of a layer's experts, which `layer` includes."""
    gate_up: int = 0
    """Parameters of the experts' gates and their partners, which are one tensor in the engine."""


_GATE_UP = (Role.EXPERT_COLUMN, Role.EXPERTS_PAIRS, Role.EXPERTS_GATE_UP)


@cache
def sizes_of_rank(shape: ModelShape, tp: int, ep: int = 1) -> RankSizes:
    """Count a rank's parameters with the layout table that the engines use."""
    if len(shape.kinds) > 1:
        kinds = [sizes_of_rank(kind, tp, ep) for kind in shape.kinds]
        return replace(
            kinds[0], layer=0, experts=0, gate_up=0, largest=max(kind.largest for kind in kinds)
        )
    # One layer: a list of all parameters of a model with 512 experts a layer takes seconds.
    shape = _one_layer(shape)
    # Layers without experts are whole on every expert-parallel rank.
    layout, specs = Layout(shape, tp, 1, ep=1 if shape.experts is None else ep), shape.specs
    size = {
        s.name: prod(layout.local_shape(s.name, 0))
        for s in specs
        if 0 in layout.expert_ranks(s.name) and s.role is not Role.ROUTER_BIAS
    }
    ends = {s.name for s in specs if not LAYER.search(s.name)}
    of_experts = [s for s in specs if s.of_experts and s.name in size]
    embed = size[shape.embed_name]
    norm = sum(
        size[n] for n in ends if n not in (shape.embed_name, shape.head_name, shape.positions_name)
    )
    return RankSizes(
        layer=sum(n for name, n in size.items() if name not in ends),
        embed=embed,
        norm=norm,
        head=embed,
        positions=(shape.positions or 0) * shape.hidden,
        kv_heads=len(layout.kv_slots(0)),
        vocab=layout.shard(shape.embed_name, 0).size,
        largest=max(size.values()),
        experts=sum(size[s.name] for s in of_experts),
        gate_up=sum(size[s.name] for s in of_experts if s.role in _GATE_UP),
    )


def layers_of(layers: int, pp: int, stage: int, layers_per_stage: tuple[int, ...] = ()) -> int:
    """Decoder layers of a pipeline stage: the `layers_per_stage`, or contiguous blocks with the
    rest on the last stages (core/model/layout.py).
    """
    if layers_per_stage:
        return layers_per_stage[stage]
    even_layers, extra = divmod(layers, pp)
    return even_layers + (stage >= pp - extra)


@cache
def stage_layers(
    shape: ModelShape, pp: int, stage: int, layers_per_stage: tuple[int, ...] = ()
) -> tuple[ModelShape, ...]:
    """A pipeline stage's part of `ModelShape.by_layer`."""
    first = sum(layers_of(shape.layers, pp, s, layers_per_stage) for s in range(stage))
    return shape.by_layer[first : first + layers_of(shape.layers, pp, stage, layers_per_stage)]


@cache
def stage_kinds(
    shape: ModelShape, pp: int, stage: int, layers_per_stage: tuple[int, ...] = ()
) -> Mapping[ModelShape, int]:
    """Count a pipeline stage's decoder layers of each shape in `ModelShape.by_layer`."""
    if len(shape.kinds) == 1:
        count = layers_of(shape.layers, pp, stage, layers_per_stage)
        return {shape.by_layer[0]: count} if count else {}
    return Counter(stage_layers(shape, pp, stage, layers_per_stage))


@cache
def alike_stages(
    shape: ModelShape, pp: int, layers_per_stage: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """For each pipeline stage the first one with the same layers."""
    first: dict[object, int] = {}
    if len(shape.kinds) == 1:
        counts = layers_per_stage or [layers_of(shape.layers, pp, stage) for stage in range(pp)]
        return tuple([first.setdefault(count, stage) for stage, count in enumerate(counts)])
    return tuple(
        first.setdefault(stage_layers(shape, pp, stage, layers_per_stage), stage)
        for stage in range(pp)
    )


@cache
def equal_runs(values: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(value, how often) of each run of equal neighbours."""
    return tuple((value, len([*run])) for value, run in groupby(values))


@cache
def distinct_stages(
    shape: ModelShape, pp: int, layers_per_stage: tuple[int, ...] = ()
) -> list[int]:
    """The first and the last pipeline stage, and of those between them the first one with each
    sequence of layers.
    """
    between = [*enumerate(alike_stages(shape, pp, layers_per_stage))][1:-1]
    return sorted(
        {0, *{first_stage: stage for stage, first_stage in reversed(between)}.values(), pp - 1}
    )


def stage_numbers(shape: ModelShape, mesh: Mesh, stage: int) -> int:
    """Parameters on a rank of a pipeline stage."""
    return _stage_numbers(shape, mesh.tp, mesh.pp, mesh.ep, mesh.layers, stage)


@cache
def _stage_numbers(
    shape: ModelShape, tp: int, pp: int, ep: int, layers_per_stage: tuple[int, ...], stage: int
) -> int:
    rank_sizes, kinds = (
        sizes_of_rank(shape, tp, ep),
        stage_kinds(shape, pp, stage, layers_per_stage),
    )
    n = sum(count * sizes_of_rank(kind, tp, ep).layer for kind, count in kinds.items())
    if stage == 0:
        n += rank_sizes.embed + rank_sizes.positions
    if stage == pp - 1:
        n += rank_sizes.norm + (0 if shape.tied and pp == 1 else rank_sizes.head)
    return n


def rank_numbers(shape: ModelShape, tp: int, ep: int = 1) -> int:
    """Parameters on the ranks of all pipeline stages together, a tied head counted once."""
    rank_sizes = sizes_of_rank(shape, tp, ep)
    layers = sum(count * sizes_of_rank(kind, tp, ep).layer for kind, count in shape.kinds.items())
    return (
        layers
        + rank_sizes.embed
        + rank_sizes.positions
        + rank_sizes.norm
        + (0 if shape.tied else rank_sizes.head)
    )


def expert_numbers(shape: ModelShape, mesh: Mesh, stage: int) -> int:
    """The parameters of a stage that ep divides over ranks of dp x cp; 0 without ep."""
    if mesh.ep == 1:
        return 0
    return sum(
        count * sizes_of_rank(kind, mesh.tp, mesh.ep).experts
        for kind, count in stage_kinds(shape, mesh.pp, stage, mesh.layers).items()
    )


def expert_share(work: Work, mesh: Mesh, stage: int) -> int:
    """The trained parameters of a stage that ep divides: `expert_numbers`, or the factors of
    adapted experts.
    """
    if work.lora is None:
        return expert_numbers(work.shape, mesh, stage)
    expert_lora = replace(work.lora, targets=work.lora.of_experts)
    return adapter_numbers(work.shape, expert_lora, mesh, stage) if mesh.ep > 1 else 0


def optimizer_share(work: Work, mesh: Mesh, stage: int) -> tuple[int, int]:
    """(trained parameters of a rank, padded; those whose optimizer state it keeps)."""
    return divide_optimizer_state(
        trained_numbers(work, mesh, stage), expert_share(work, mesh, stage), mesh
    )


def divide_optimizer_state(numbers: int, expert_parameters: int, mesh: Mesh) -> tuple[int, int]:
    """`optimizer_share` of so many trained parameters, of which `expert_parameters` are divided
    by ep.

    Ranks that hold the same experts share the state of these, so fewer ranks share more of it.
    """
    ranks, expert_ranks = mesh.shards, mesh.shards // mesh.ep
    dense_shard, experts = (
        -(-(numbers - expert_parameters) // ranks),
        -(-expert_parameters // expert_ranks),
    )
    return dense_shard * ranks + experts * expert_ranks, dense_shard + experts


def trained_numbers(work: Work, mesh: Mesh, stage: int) -> int:
    """Parameters of a rank that the optimizer updates: all, or those of its adapters."""
    if work.lora is None:
        return stage_numbers(work.shape, mesh, stage)
    return adapter_numbers(work.shape, work.lora, mesh, stage)


def adapter_numbers(shape: ModelShape, lora: Lora, mesh: Mesh, stage: int) -> int:
    """Parameters of adapters on a rank of a pipeline stage."""
    kinds = stage_kinds(shape, mesh.pp, stage, mesh.layers)
    return sum(
        count * _adapters(_one_layer(kind), lora, mesh.tp, mesh.ep) for kind, count in kinds.items()
    )


def untiled_group(
    work: Work, machine: Machine, mesh: Mesh, *, neighbours: bool = False
) -> Group | None:
    """The first group of a mesh that the torus of the machine's chips does not connect; None if it
    connects all.

    neighbours: neighbouring stages count too, which need that only if TorchNeuron has no send and
    receive.
    """
    if machine.torus_chip is None:
        return None
    pairs = pairs_of(mesh.pp, tied=work.shape.tied, neighbours=neighbours)
    return first_group_off_torus(
        mesh.tp, mesh.pp, mesh.dp, machine.cores, machine.torus_chip, pairs, mesh.cp, mesh.ep
    )


def stage_faults(shape: ModelShape, mesh: Mesh) -> Iterator[str]:
    """The reason why the stages do not hold the model's layers, if they do not."""
    if mesh.layers and (sum(mesh.layers) != shape.layers or min(mesh.layers) < 1):
        yield (
            f"parallel.layers_per_stage: {list(mesh.layers)} adds up to {sum(mesh.layers)} layers,"
            f" and the model has {shape.layers}; correct it, or leave it out"
        )


def mesh_faults(work: Work, machine: Machine, mesh: Mesh) -> Iterator[str]:
    """All reasons, other than memory, why this mesh cannot run."""
    shape = work.shape
    yield from shape.mesh_faults(mesh.tp, mesh.pp, mesh.ep, cp=mesh.cp)
    yield from stage_faults(shape, mesh)
    if mesh.shards % mesh.ep:
        yield (
            f"ep = {mesh.ep} does not divide the {mesh.shards} ranks of"
            f" dp{' x cp' if mesh.cp > 1 else ''}"
        )
    if mesh.tp * mesh.pp * mesh.shards != machine.world:
        yield (
            f"{'tp x pp x cp x dp' if mesh.cp > 1 else 'tp x pp x dp'} ="
            f" {mesh.tp * mesh.pp * mesh.shards} is not the {machine.count} x {machine.cores} ="
            f" {machine.world} cores"
        )
    elif group := untiled_group(work, machine, mesh):
        yield torus_sentence(group, machine.torus_chip or 1, machine.type)
    if work.global_batch % (mesh.dp * mesh.micro_batch):
        yield (
            f"train.global_batch_size = {work.global_batch} is not a multiple of dp x micro-batch ="
            f" {mesh.dp} x {mesh.micro_batch}"
        )
    if work.quantizes:
        yield from cut_faults(shape, mesh.tp) if not [*shape.mesh_faults(mesh.tp, 1)] else ()
        if machine.neuron:
            yield no_qlora(machine.type)
    if work.precision == "fp16" and (machine.neuron or not machine.has_accelerators):
        yield no_gpu_for_fp16(machine.type)
    if work.precision == "bf16" and not has_bf16(machine.type):
        yield no_bf16(machine.type)
    if mesh.cp > 1 and work.seq_len % (mesh.cp * (mesh.tp if mesh.sequence_parallel else 1)):
        divisor = (
            f" x tp = {mesh.cp * mesh.tp} for sequence parallelism"
            if mesh.sequence_parallel
            else f" = {mesh.cp}"
        )
        yield f"train.seq_len = {work.seq_len} cannot be cut over cp{divisor}"
    elif mesh.sequence_parallel and work.seq_len % mesh.tp:
        yield (
            f"train.seq_len = {work.seq_len} cannot be cut over tp = {mesh.tp} for sequence"
            " parallelism"
        )


def named_shape(name: str) -> ModelShape | None:
    """The shape of a model in core/facts/models.toml, by its name or by the last part of a path or
    hub id.
    """
    config = named_config(name)
    return None if config is None else ModelShape.from_config(config)


def named_config(name: str) -> dict[str, Any] | None:
    """The sizes of a model in core/facts/models.toml as its config.json has them."""
    row = _row_of(name)
    return None if row is None else row["config"]


def positions_of_namesake(name: str) -> int | None:
    """The positions of the published model of that size; those of a tuned one may differ."""
    row = _row_of(name)
    return None if row is None else row.get("positions")


def _row_of(name: str) -> dict[str, Any] | None:
    plain = _plain(name.rstrip("/").rsplit("/", 1)[-1])
    for model_name, row in table("models")["models"].items():
        if plain in {_plain(model_name), _plain(row["source"].rsplit("/", 1)[-1])}:
            model_row: dict[str, Any] = row
            return model_row
    return None


_VARIANT = re.compile(
    r"-(base|instruct|chat|it|thinking|deduped|hf|bf16|2\d0[1-9]|2\d1[0-2])(?=-|$)"
)
"""Parts that makers add to the name of a model of the same size: how it was tuned, its form, the
year and month.
"""


def _plain(name: str) -> str:
    name = _VARIANT.sub("", name.lower().replace("_", "-").replace(" ", "-").removeprefix("meta-"))
    return name.replace("llama2", "llama-2").replace("llama3", "llama-3")


@cache
def _adapters(one_layer: ModelShape, lora: Lora, tp: int, ep: int) -> int:
    """Adapter parameters of one decoder layer on one rank."""
    layout = Layout(
        AdapterShape.of(one_layer, lora), tp, 1, ep=ep if one_layer.experts is not None else 1
    )
    return sum(prod(layout.local_shape(s.name, 0)) for s in layout.shape.specs)


@cache
def _one_layer(shape: ModelShape) -> ModelShape:
    """A model that has only the first layer."""
    return replace(shape.by_layer[0], layers=1, full=())


def is_planned(config: JobConfig) -> bool:
    """Whether the planner knows the machines: described ones, or those of AWS with accelerators."""
    return config.own_machine is not None or "core_gib" in (
        instance(config.compute.instance_type) or {}
    )
