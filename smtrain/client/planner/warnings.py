"""Warnings about a run that fits: time limits, the cost of saving, host memory, and an old
image.
"""

from __future__ import annotations

from math import inf, isfinite

from smtrain.client.planner.cost import Cost, Saving
from smtrain.client.planner.machines import GIB, Machine, Mesh, Work, untiled_group
from smtrain.client.planner.memory import host_memory
from smtrain.client.planner.workload import positions_of
from smtrain.client.prices import HOUR
from smtrain.core.config import JobConfig
from smtrain.core.config.units import spell
from smtrain.core.facts import instance
from smtrain.core.facts.images import patch_fault
from smtrain.core.facts.trainium2 import FLASH_HEAD, FLASH_LENGTHS, flash_lack
from smtrain.core.targets import TARGETS
from smtrain.core.text import with_article

THIN = 0.1
"""Share of a limit that should be left, as a plan is not more exact than that."""


def ramp_warnings(config: JobConfig) -> list[str]:
    """Count the steps of a batch ramp and the tokens of the run, of which a step has no fixed
    number then.
    """
    train, batches = config.train, config.train.batches()
    if train.batch_ramp is None or not batches:
        return []
    smaller = sum(count for count, size in batches if size < train.global_batch_size)
    return [
        f"train.batch_ramp: {smaller:,} of {train.steps:,} steps have fewer than"
        f" {train.global_batch_size} sequences; the run has {train.samples:,}, which are"
        f" {train.samples * train.seq_len:,} tokens. Time and cost count it"
    ]


def run_warnings(
    config: JobConfig,
    work: Work,
    machine: Machine,
    step_s: float,
    cost: Cost | None,
    saving: Saving | None,
) -> list[str]:
    if cost is None or saving is None:
        return []
    out = []
    limit, wall = config.compute.max_run, cost.train_hours * HOUR
    first = min(config.train.save_interval, config.train.steps) * step_s
    if first > limit:
        out.append(
            f"compute.max_run: {spell(limit)} ends before the first checkpoint at {spell(first)} "
            f"(train.save_interval {config.train.save_interval}): nothing would be kept"
        )
    elif wall > limit and not TARGETS[config.target].repeats:
        out.append(
            f"compute.max_run: {spell(limit)} is shorter than the run's {spell(wall)}; it would"
            " stop and have to be started again"
        )
    elif wall > (1 - THIN) * limit and not TARGETS[config.target].repeats:
        out.append(
            f"compute.max_run: {spell(limit)} leaves {1 - wall / limit:.0%} more than the run's"
            f" {spell(wall)}, and a plan is not so exact; raise it"
        )
    if cost.attempts > 1 and wall > 2 * config.train.steps * step_s * saving.stretch:
        out.append("cluster.time: more than half of every attempt is needed to start it; raise it")
    if (warning := slow_stop(config, step_s, saving.save_s)) is not None:
        out.append(warning)
    if config.compute.spot and not isfinite(saving.stretch):
        out.append(
            "compute.spot: the run would practically never end between interruptions; save more"
            " often"
        )
    interval = min(config.train.save_interval, config.train.steps)
    best_interval = min(max(1, round(saving.best_interval_s / step_s)), config.train.steps)
    if saving.stretch > 1.05 and best_interval != interval:
        out.append(
            f"train.save_interval: to save every {interval} steps costs {saving.stretch - 1:.0%} of"
            f" the time, in saves and in work that an interruption loses; set it to {best_interval}"
        )
    return out


def slow_stop(config: JobConfig, step_s: float, save_s: float) -> str | None:
    """Warn if the running step and its save hardly fit into the time after SIGTERM; None if they
    do.
    """
    grace = config.stop_grace
    grace_share = 1 - (step_s + save_s) / grace
    if grace_share >= THIN:
        return None
    if grace_share >= 0:
        return (
            f"a step of {spell(step_s)} and a save of {spell(save_s)} leave {grace_share:.0%} of"
            f" the {grace} s between a stop and the end of a job: if they take longer than planned,"
            " a stop loses the steps since the last checkpoint"
        )
    return (
        f"a step of {spell(step_s)} and a save of {spell(save_s)} take longer than the {grace} s"
        " between a stop and the end of a job, so a stop or an interruption loses the steps since"
        " the last checkpoint; lower train.save_interval to lose fewer"
    )


def image_warnings(config: JobConfig) -> list[str]:
    """Warn if AWS no longer patches the image."""
    warning = patch_fault(config.compute.image) if TARGETS[config.target].rented else None
    return [f"compute.image: {warning}"] if warning else []


def memory_warnings(work: Work, machine: Machine, mesh: Mesh) -> list[str]:
    host, out = host_memory(work, machine, mesh), []
    for activity, need in (
        ("loading", host.load),
        ("saving", host.save),
        ("saving asynchronously", host.async_save),
    ):
        if need > machine.host_bytes:
            out.append(
                f"host memory: {activity} takes {need / GIB:.0f} GiB of"
                f" {machine.host_bytes / GIB:.0f}: short by {(need - machine.host_bytes) / GIB:.0f}"
                " GiB"
            )
    if mesh.ep > 1 and work.capacity is None:
        out.append(
            f"memory: planned for experts that get at most {work.skew:g} times the mean number of"
            " tokens, and a more popular expert takes more; compare experts/load_max in the log, or"
            " set parallel.expert_capacity"
        )
    return out


def neuron_warnings(
    config: JobConfig,
    work: Work,
    machine: Machine,
    mesh: Mesh,
    first_step_s: float,
    *,
    has_own_run: bool,
) -> list[str]:
    """Warnings of engine native on Neuron cores: unknown or slow parts, each with a number."""
    out = []
    if instance(machine.type):
        out.append(
            f"the share of peak is of {machine.core_flops / 1e12:.4g} TF a core (AWS's data sheet,"
            " divided by the cores); torchtitan divides by 158 TF at LNC 2"
        )
    if not has_own_run:
        out.append(
            "AWS published no throughput of training with TorchNeuron, and beta users reported 1 to"
            " 4 % of peak for models with slow kernels; measure a short run, and correct this plan"
            " with --measured JOB"
        )
    stages = (
        f", and each of the {mesh.pp} stages compiles its own while all other stages wait"
        if mesh.pp > 1
        else ""
    )
    out.append(
        f"the first step compiles every graph, {spell(first_step_s)} by assumption{stages}; a later"
        " job takes them from the cache"
    )
    if work.shape.experts is not None and work.capacity is None:
        out.append(
            "experts get other numbers of rows in each step, and TorchNeuron compiles a graph for"
            " each shape: set parallel.expert_capacity, with which all steps have the same ones"
        )
    if work.shards_fully and mesh.shards > 1:
        out.append(
            "parallel.shard: full has run on an imitation of Neuron cores only, with the numbers of"
            " CPUs; run a few steps first"
        )
    if pair := untiled_group(work, machine, mesh, neighbours=True):
        chips = " and ".join(map(str, pair.chips(machine.torus_chip or 1)))
        out.append(
            f"{with_article(pair.kind)} is on chips {chips}, which the torus does not connect: the"
            " pipeline needs send and receive between them, which TorchNeuron may lack; pp 1 and 4"
            " stages on a host do not (`smtrain help trainium-reference`)"
        )
    lack = flash_lack(
        work.seq_len,
        work.shape.widest_head,
        has_mask=work.has_mask,
        is_compiled=bool(config.train.compile),
    )
    if lack is not None:
        scores = 2.0 * work.width * work.shape.heads / mesh.tp * work.seq_len**2 * mesh.micro_batch
        size = f"{scores / GIB:.2g}" if scores >= 0.01 * GIB else "under 0.01"
        duration = "kept by every layer" if mesh.recompute == "none" else "for one layer at a time"
        out.append(
            f"attention runs without its flash kernel: {lack}. Its scores take {size} GiB of a"
            f" core, {duration}{_flash_remedy(config, work)}"
        )
    return out


def _flash_remedy(config: JobConfig, work: Work) -> str:
    """The setting that brings the flash kernel back, if there is one."""
    window, keeps_documents = (
        work.shape.sliding_window,
        config.train.objective == "pretrain" and not config.data.document_mask,
    )
    multiple = FLASH_LENGTHS["compiled" if config.train.compile else "eager"]
    if config.data.document_mask:
        return "; leave out data.document_mask if the documents of a row may see each other"
    if work.shape.widest_head > FLASH_HEAD or not keeps_documents:
        return ""
    longest = min(positions_of(config) or inf, window or inf)
    next_multiple, previous_multiple = (
        -(-work.seq_len // multiple) * multiple,
        min(work.seq_len, longest) // multiple * multiple,
    )
    length = next_multiple if next_multiple <= longest else previous_multiple
    return f"; set train.seq_len: {length:.0f}" if length else ""
