"""Rules for the training: its steps, its adapter, the engine's abilities, and the held-out text."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, rule_faults
from smtrain.core.config.machine_defaults import kind_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.training import BatchRamp
from smtrain.core.facts.engines import (
    engine_fault,
    full_shard_faults,
    is_neuron,
    no_gpu_for_fp16,
    no_qlora,
    precision_fault,
)
from smtrain.core.facts.image_fit import image_fault
from smtrain.core.targets import TARGETS

_KEY = "train.validation"


def _ramp(config: JobConfig) -> BatchRamp:
    assert config.train.batch_ramp is not None
    return config.train.batch_ramp


def _growth(config: JobConfig) -> int:
    """Sequences by which a batch ramp grows."""
    return config.train.global_batch_size - _ramp(config).start


def _sequences_per_pass(config: JobConfig) -> int:
    """Sequences that all copies of the model take at a time."""
    return int(config.dp * config.parallel.micro_batch_size)


def _stages(config: JobConfig) -> int:
    return config.parallel.pp * config.parallel.virtual_stages


TRAIN = (
    Rule(
        "train.global_batch_size train.max_global_batch_size",
        lambda c: (
            c.train.max_global_batch_size is not None
            and c.train.global_batch_size > c.train.max_global_batch_size
        ),
        lambda c: (
            f"train.global_batch_size: {c.train.global_batch_size} is above"
            f" train.max_global_batch_size = {c.train.max_global_batch_size}; leave one of the"
            " two out"
        ),
    ),
    Rule(
        "parallel.layers_per_stage parallel.pipeline_cuts",
        lambda c: c.parallel.layers_per_stage and c.parallel.pipeline_cuts,
        "parallel.layers_per_stage, parallel.pipeline_cuts: both divide the layers; leave one of"
        " them out",
    ),
    Rule(
        "parallel.layers_per_stage parallel.pp parallel.virtual_stages",
        lambda c: c.parallel.layers_per_stage and len(c.parallel.layers_per_stage) != _stages(c),
        lambda c: (
            f"parallel.layers_per_stage: {len(c.parallel.layers_per_stage)} numbers for"
            f" {_stages(c)} stages (pp x virtual_stages); give {_stages(c)} or none"
        ),
    ),
    Rule(
        "parallel.layers_per_stage",
        lambda c: any(count < 1 for count in c.parallel.layers_per_stage),
        lambda c: (
            f"parallel.layers_per_stage: got {list(c.parallel.layers_per_stage)}; every stage needs"
            " at least 1 layer, so raise that number"
        ),
    ),
    Rule(
        "parallel.pipeline_cuts parallel.pp parallel.virtual_stages",
        lambda c: c.parallel.pipeline_cuts and len(c.parallel.pipeline_cuts) != _stages(c) - 1,
        lambda c: (
            f"parallel.pipeline_cuts: {len(c.parallel.pipeline_cuts)} cuts for {_stages(c)} stages"
            f" (pp x virtual_stages); give {_stages(c) - 1} or none"
        ),
    ),
    Rule(
        "train.batch_ramp.start train.global_batch_size",
        lambda c: c.train.batch_ramp and c.train.batch_ramp.start >= c.train.global_batch_size,
        lambda c: (
            f"train.batch_ramp.start: {_ramp(c).start} is not below train.global_batch_size = "
            f"{c.train.global_batch_size}; lower it, or leave train.batch_ramp out"
        ),
    ),
    Rule(
        "train.batch_ramp.start train.batch_ramp.increment train.global_batch_size",
        lambda c: c.train.batch_ramp and _growth(c) > 0 and _growth(c) % _ramp(c).increment,
        lambda c: (
            f"train.batch_ramp.increment: {_ramp(c).increment} does not divide the {_growth(c)}"
            f" sequences between start = {_ramp(c).start} and train.global_batch_size ="
            f" {c.train.global_batch_size}; take a number that does"
        ),
    ),
    Rule(
        "train.batch_ramp.increment parallel.dp parallel.micro_batch_size parallel.tp parallel.pp",
        lambda c: c.train.batch_ramp and _ramp(c).increment % _sequences_per_pass(c),
        lambda c: (
            f"train.batch_ramp.increment: {_ramp(c).increment} is not a multiple of dp x"
            f" micro_batch_size = {c.dp} x {c.parallel.micro_batch_size}; take a multiple"
        ),
    ),
    Rule(
        "train.warmup_steps train.steps",
        lambda c: c.train.warmup > c.train.steps > 0,
        lambda c: (
            f"train.warmup_steps: {c.train.warmup_steps} is more than train.steps ="
            f" {c.train.steps}; use at most that"
        ),
    ),
    Rule(
        "train.min_lr train.lr",
        lambda c: c.train.min_lr > c.train.lr,
        lambda c: f"train.min_lr: {c.train.min_lr} is above train.lr = {c.train.lr}; lower it",
    ),
    Rule(
        "train.lr",
        lambda c: c.train.lr > 1,
        lambda c: f"train.lr: {c.train.lr:g} is above 1, with which no model learns; lower it",
    ),
    Rule(
        "train.betas",
        lambda c: not 0 <= c.train.betas[0] < 1,
        lambda c: f"train.betas: number 1 is {c.train.betas[0]}; it must be at least 0 and below 1",
    ),
    Rule(
        "train.betas",
        lambda c: not 0 <= c.train.betas[1] < 1,
        lambda c: f"train.betas: number 2 is {c.train.betas[1]}; it must be at least 0 and below 1",
    ),
    Rule(
        "train.adapter model.init",
        lambda c: c.train.adapter and c.model.init == "scratch",
        "train.adapter: needs trained weights, and model.init: scratch has none; leave one of the"
        " two out",
    ),
    Rule(
        "train.adapter.targets",
        lambda c: c.train.adapter and c.train.adapter.targets == (),
        "train.adapter.targets: names no layer; leave it out for all linear layers",
    ),
    Rule(
        "train.dpo train.objective",
        lambda c: c.train.dpo and c.train.objective != "dpo",
        lambda c: (
            f"train.dpo: has no effect with train.objective: {c.train.objective}; set"
            " train.objective: dpo, or leave it out"
        ),
    ),
    Rule(
        "train.dpo.label_smoothing train.dpo.loss",
        lambda c: (
            c.train.preference
            and c.train.preference.label_smoothing
            and c.train.preference.loss != "robust"
        ),
        "train.dpo.label_smoothing: only train.dpo.loss: robust uses it; set train.dpo.loss:"
        " robust, or leave it out",
    ),
    Rule(
        "train.objective model.init",
        lambda c: c.train.objective == "dpo" and c.model.init == "scratch",
        "train.objective: dpo needs trained weights, and model.init: scratch has none; name an"
        " instructed model in model.path and leave model.init out",
    ),
    Rule(
        "train.objective train.engine",
        lambda c: c.train.objective == "dpo" and c.train.engine == "nxd",
        "train.objective: dpo is trained by engine native only; set train.engine: native",
    ),
    Rule(
        "train.seq_len train.objective",
        lambda c: c.train.objective == "dpo" and c.train.seq_len < 4,
        lambda c: (
            f"train.seq_len: {c.train.seq_len} cannot hold two answers with their prompts; use at"
            " least 4"
        ),
    ),
    Rule(
        "export.merge train.adapter",
        lambda c: c.export.merge and not c.train.adapter,
        "export.merge: has no effect unless train.adapter is set; leave it out",
    ),
    Rule(
        "export.merge_base export.merge train.adapter.quantize",
        lambda c: c.export.merge_base and not (c.export.merge and c.train.quantizes),
        "export.merge_base: has no effect unless export.merge and train.adapter.quantize are set;"
        " leave it out",
    ),
)


def machine_fault(config: JobConfig) -> str | None:
    """The reason why the engine cannot train on these machines; on this machine, CPUs run the jobs
    of any type.

    NxD lays its groups out for the chip, so it needs a Neuron type even if it runs on CPUs.
    """
    if TARGETS[config.target].here and not (
        config.train.engine == "nxd" and is_neuron(config.compute.instance_type)
    ):
        return None
    return engine_fault(config.train.engine, config.compute.instance_type)


def _image_fault(config: JobConfig) -> str | None:
    """The reason why the image cannot train.

    Only on AWS: the control plane needs no image, or uses its own.
    """
    image, compute = config.compute.image, config.compute
    return (
        image_fault(image, config.train.engine, compute.instance_type)
        if image and TARGETS[config.target].rented
        else None
    )


def _micro_batches(config: JobConfig) -> int:
    """Micro-batches of a step."""
    return config.train.global_batch_size // max(1, config.dp * config.parallel.micro_batch_size)


NATIVE = (
    *(
        Rule(f"{key} train.engine", is_requested, f"{key}: only engine nxd does this; leave it out")
        for key, is_requested in {
            "parallel.zero1": lambda c: not c.parallel.zero1,
            "parallel.virtual_stages": lambda c: c.parallel.virtual_stages > 1,
            "train.stochastic_rounding": lambda c: c.train.stochastic_rounding,
            "compute.compile_ahead": lambda c: c.compute.compile_ahead,
            "checkpoint.form": lambda c: c.checkpoint.form != "pt",
            "checkpoint.asynchronous": lambda c: c.checkpoint.asynchronous,
        }.items()
    ),
    Rule(
        "checkpoint.format parallel.shard",
        lambda c: c.checkpoint.format == "dcp" and c.parallel.shard != "full",
        "checkpoint.format: dcp is written by the processes that share all weights; set"
        " parallel.shard to full, or leave checkpoint.format out",
    ),
    Rule(
        "checkpoint.format train.adapter",
        lambda c: c.checkpoint.format == "dcp" and c.train.adapter,
        "checkpoint.format: adapters are saved in smtrain's own format; leave it out",
    ),
)

NXD = (
    Rule(
        "train.batch_ramp train.engine",
        lambda c: c.train.batch_ramp,
        "train.batch_ramp: engine nxd's graphs are compiled for one batch; leave it out",
    ),
    Rule(
        "train.param_norm train.engine",
        lambda c: c.train.param_norm != "none",
        "train.param_norm: engine nxd does not measure it; leave it out",
    ),
    Rule(
        "parallel.cp train.engine",
        lambda c: c.parallel.cp > 1,
        "parallel.cp: only engine native cuts sequences over processes; leave it out",
    ),
    Rule(
        "checkpoint.format train.engine",
        lambda c: c.checkpoint.format != "native",
        "checkpoint.format: engine nxd writes neuronx-distributed's; leave it out",
    ),
    Rule(
        "parallel.shard train.engine",
        lambda c: c.parallel.shard == "full",
        "parallel.shard: engine nxd divides only the optimizer's state; leave it out",
    ),
    Rule(
        "train.compile train.engine",
        lambda c: c.train.compile,
        "train.compile: engine nxd's steps are compiled graphs already; leave it out",
    ),
    Rule(
        "train.deterministic train.engine",
        lambda c: c.train.deterministic is False,
        "train.deterministic: engine nxd's graphs give the same bits each time anyway; leave"
        " it out",
    ),
    Rule(
        "train.profile train.engine",
        lambda c: c.train.profile,
        "train.profile: engine nxd's steps are compiled graphs, which torch's profiler does not see"
        " into; leave it out and use AWS's neuron-profile",
    ),
    Rule(
        "compute.compile_ahead network.isolation",
        lambda c: c.compute.compile_ahead and c.network.isolation,
        "compute.compile_ahead: keeps graphs in S3, and network.isolation keeps jobs from it; set"
        " only one",
    ),
    Rule(
        "parallel.sequence_parallel parallel.tp train.precision",
        lambda c: (
            c.train.precision == "bf16" and c.parallel.tp > 1 and not c.parallel.sequence_parallel
        ),
        "parallel.sequence_parallel: NxD's gradients are silently wrong with precision bf16 and tp"
        " > 1 without it; set it to true",
    ),
    Rule(
        "train.adapter.quantize train.engine",
        lambda c: c.train.quantizes,
        "train.adapter.quantize: engine nxd keeps no base in 4 bits; leave it out",
    ),
    Rule(
        "train.adapter.dropout train.engine",
        lambda c: c.train.adapter and c.train.adapter.dropout,
        "train.adapter.dropout: engine nxd trains adapters without dropout, whose masks take its"
        " hosts longer to draw than a step takes; set it to 0",
    ),
    Rule(
        "train.adapter checkpoint.form",
        lambda c: c.train.adapter and c.checkpoint.form != "pt",
        "checkpoint.form: adapters are saved in smtrain's own form with either engine; leave"
        " it out",
    ),
    Rule(
        "parallel.zero1 train.precision",
        lambda c: (
            c.train.precision == "bf16" and not c.parallel.zero1 and not c.train.adapter
        ),  # adapters are fp32
        "parallel.zero1: NxD keeps the fp32 master weights of precision bf16 in ZeRO-1 only; set it"
        " to true",
    ),
    Rule(
        "train.stochastic_rounding train.precision",
        lambda c: c.train.stochastic_rounding and c.train.precision != "bf16",
        "train.stochastic_rounding: has no effect unless train.precision is bf16; leave it out",
    ),
    Rule(
        "parallel.tp parallel.dp compute.processes_per_instance",
        lambda c: (
            c.parallel.tp == 4
            and c.compute.instance_type.startswith("ml.trn1")
            and c.processes_per_instance % 4 == 0
            and c.dp % (c.processes_per_instance // 4)
        ),
        lambda c: (
            f"parallel.tp: on Trainium1 NxD lays groups of 4 across a host, so dp = {c.dp} must be"
            f" a multiple of {c.processes_per_instance // 4} (processes of a host / 4); change tp,"
            " pp or compute.instance_count"
        ),
    ),
    Rule(
        "parallel.virtual_stages parallel.pp train.global_batch_size parallel.micro_batch_size",
        lambda c: (
            c.parallel.virtual_stages > 1
            and c.parallel.pp > 1
            and _micro_batches(c) % c.parallel.pp
        ),
        lambda c: (
            "parallel.virtual_stages: the interleaved schedule needs a multiple of pp ="
            f" {c.parallel.pp} micro-batches a step, and there are {_micro_batches(c)}; change"
            " train.global_batch_size or parallel.micro_batch_size"
        ),
    ),
    Rule(
        "parallel.virtual_stages parallel.pp",
        lambda c: c.parallel.virtual_stages > 1 and c.parallel.pp == 1,
        "parallel.virtual_stages: has no effect unless pp > 1; leave it out",
    ),
    Rule(
        f"{_KEY} parallel.virtual_stages train.engine",
        lambda c: c.train.validation and c.parallel.virtual_stages > 1,
        f"{_KEY}: neuronx-distributed cannot evaluate interleaved stages; leave one of it and "
        "parallel.virtual_stages out",
    ),
    Rule(
        f"{_KEY}.samples train.engine",
        lambda c: c.train.validation and c.train.validation.samples,
        f"{_KEY}.samples: engine nxd does not generate; leave it out",
    ),
)


def engine_faults(config: JobConfig) -> Iterator[Fault]:
    """Machines, precisions and options that the engine cannot handle."""
    train, kind = config.train, config.compute.instance_type
    if fault := machine_fault(config):
        yield {"train.engine", "compute.instance_type", "target"}, fault
    elif fault := _image_fault(config):
        yield {"compute.image", "train.engine", "compute.instance_type"}, f"compute.image: {fault}"
    on_host = TARGETS[config.target].here and train.precision == "bf16"  # a CPU computes bf16
    if not on_host and (fault := precision_fault(train.precision, train.engine, kind)):
        yield {"train.precision", "train.engine", "compute.instance_type"}, fault
    elif train.precision == "fp16" and config.own_machine and config.own_machine.kind != "gpu":
        yield {"train.precision", "compute.instance_type"}, no_gpu_for_fp16(kind)
    if train.quantizes and train.engine == "native" and kind_of(config) == "neuron":
        yield {"train.adapter.quantize", "compute.instance_type"}, no_qlora(kind)
    if config.parallel.shard == "full" and train.engine == "native":
        faults = full_shard_faults(quantizes=train.quantizes)
        yield from (({"parallel.shard", key}, fault) for key, fault in faults.items())
    yield from rule_faults(NATIVE if train.engine == "native" else NXD, config)


BEST = (
    Rule(
        f"export.checkpoint {_KEY}.keep_best",
        lambda c: (
            c.export.checkpoint == "best"
            and not (c.train.validation and c.train.validation.keep_best)
        ),
        lambda c: (
            (f"export.checkpoint: best needs {_KEY}.keep_best: true, which keeps that checkpoint; ")
            + (
                "set it to true"
                if c.train.validation
                else f"set that in {_KEY} with a fraction such as 0.01"
            )
            + ", or leave export.checkpoint out"
        ),
    ),
    Rule(
        "export.checkpoint train.engine",
        lambda c: c.export.checkpoint == "best" and c.train.engine == "nxd" and not c.train.adapter,
        "export.checkpoint: best is read from the checkpoints of engine native; leave it out, and"
        " after the run download the one that the log's last line names, and convert it with"
        " `smtrain convert`",
    ),
)


def validation_faults(config: JobConfig) -> Iterator[Fault]:
    """Held-out text that cannot be chosen so, and what an engine or objective cannot do with it."""
    yield from rule_faults(BEST, config)
    held_out, data, train = config.train.validation, config.data, config.train
    if held_out is None:
        return
    held_out_keys = list(held_out.selection)
    if len(held_out_keys) > 1:
        two_keys = f"{_KEY}.{held_out_keys[0]}, {_KEY}.{held_out_keys[1]}"
        yield (
            {f"{_KEY}.{key}" for key in held_out_keys},
            f"{two_keys}: both say what is held out; leave one of them out",
        )
    if not held_out_keys and not data.prepared:
        yield (
            {_KEY, *(f"{_KEY}.{key}" for key in ("fraction", "path", "split"))},
            (
                f"{_KEY}: does not say what is held out; set fraction (0.01 holds out one document"
                " in a hundred) or path"
            ),
        )
    if held_out_keys and data.prepared:
        yield (
            {f"{_KEY}.{held_out_keys[0]}", "data.prepared"},
            (
                f"{_KEY}.{held_out_keys[0]}: text is held out when it is prepared, and"
                f" data.prepared is prepared already; leave {held_out_keys[0]} out; if it has no"
                " held-out part (manifest.json says so), first prepare it again with"
                f" --validation-{held_out_keys[0]}"
            ),
        )
    if held_out.split is not None and data.format != "megatron":
        yield (
            {f"{_KEY}.split", "data.format"},
            (
                f"{_KEY}.split: cuts Megatron's indexed data by the order of its documents, and"
                f" data.format is {data.format}; use fraction, or, if it is that, set data.format:"
                " megatron"
            ),
        )
    if held_out.keep_best and train.save_interval % held_out.interval:
        yield (
            {f"{_KEY}.interval", "train.save_interval"},
            (
                f"{_KEY}.keep_best: every checkpoint needs a validation, so train.save_interval"
                f" ({train.save_interval}) must be a multiple of {_KEY}.interval"
                f" ({held_out.interval})"
            ),
        )
    if held_out.samples and train.objective != "sft":
        yield (
            {f"{_KEY}.samples", "train.objective"},
            (
                f"{_KEY}.samples: answers held-out questions, which only train.objective: sft has;"
                " leave it out"
            ),
        )
