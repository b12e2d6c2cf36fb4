"""Functions that worlds of the nxd engine run; the first argument is the rank."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint import manifest
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import NativeEngine
from tests.worker.engine import cases, packed
from tests.worker.engine.cases import BATCH, OPTIMIZER, STEPS, Memory, weights
from tests.worker.engine.nxd import shim


def engine(
    config: dict[str, Any],
    options: ParallelOptions,
    *,
    source: Any = None,
    seed: int | None = None,
    form: Any = "pt",
    asynchronous: bool = False,
    lora: Any = None,
) -> Any:
    """An engine with its process group: the library keeps its groups in globals."""
    import torch.distributed as dist

    shim.install()
    shim.forget_groups()
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trainer import checkpoint

    from smtrain.worker.engine.nxd.engine import NxdEngine
    from smtrain.worker.engine.nxd.persist import SaveOptions

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_kv_group()
    checkpoint.g_iostate = None
    if seed is None and source is None:
        source = Memory(config, weights(config))
    each = BATCH // options.dp // options.micro_batch_size
    assert dist.is_initialized()
    return NxdEngine(
        config, options, OPTIMIZER, source, seed or 0, each, SaveOptions(form, asynchronous), lora
    )


def train(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int = STEPS
) -> list[tuple[float, float]]:
    return cases.steps(engine(config, options), 0, count)


def native_train(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> list[tuple[float, float]]:
    source: Any = Memory(config, weights(config))
    return cases.steps(NativeEngine(config, options, OPTIMIZER, source, 0), 0, STEPS)


def rows(kind: str, config: dict[str, Any], step: int) -> tuple[Any, Any, Any]:
    """Ids, labels and segments of a global batch: samples packed into rows, one sample a row, or
    documents of text.
    """
    ids, labels, segments = packed.batch(config, step)
    if kind == "samples":
        segments = (segments > 1).long()  # the first two are one, the rest is padding
        labels = labels.masked_fill(segments == 1, -100)
    if kind == "documents":
        ends = segments[:, 1:] != segments[:, :-1]
        labels = torch.cat([ids[:, 1:].masked_fill(ends, -100), labels[:, -1:]], 1)
    return ids, labels, segments


def apart(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    kind: str,
    count: int,
    how: dict[str, Any],
) -> list[tuple[float, float, int | None]]:
    """Loss and gradient norm of steps over rows of several samples, and the labels that were
    likeliest before each (None with virtual stages, which the library cannot evaluate).

    The engine is nxd's; the native one if `how` says so.
    """
    if how.get("native"):
        source: Any = Memory(config, weights(config))
        e: Any = NativeEngine(config, options, OPTIMIZER, source, 0, how.get("lora"))
    else:
        e = engine(config, replace(options, apart=True), **how)
    each = BATCH // e.dp_size
    out: list[tuple[float, float, int | None]] = []
    for step in range(count):
        ids, labels, segments = (
            x[e.dp_rank * each : (e.dp_rank + 1) * each] for x in rows(kind, config, step)
        )
        before = e.evaluate(ids, labels, segments) if options.virtual_stages == 1 else None
        result = e.step(ids, labels, cases.lr(step), segments)
        assert before is None or abs(before.loss - result.loss) <= 1e-6 * result.loss
        out.append((result.loss, result.grad_norm, before and before.correct))
    return out


def one_sample(
    rank: int, config: dict[str, Any], options: ParallelOptions
) -> list[tuple[float, float]]:
    """A step without segments, and the same with every row one segment."""
    ids, labels = cases.batch(config, 0)
    out = []
    for within in (False, True):
        e = engine(config, replace(options, apart=within))
        result = e.step(ids, labels, cases.lr(0), torch.full_like(ids, 3) if within else None)
        out.append((result.loss, result.grad_norm))
    return out


def peak(
    rank: int, config: dict[str, Any], options: ParallelOptions, seq_len: int, lora: Any = None
) -> tuple[int, int]:
    """(pipeline stage, peak bytes in a step) of this rank, for rows of four samples each."""
    from smtrain.worker.train.operators import HeldBytes

    with HeldBytes() as held:
        e = engine(config, replace(options, apart=True), seed=0, lora=lora)
        each = BATCH // options.dp
        ids = torch.randint(
            config["vocab_size"], (each, seq_len), generator=torch.Generator().manual_seed(rank)
        )
        segments = (torch.arange(seq_len) * 4 // seq_len).expand(each, -1).contiguous()
        e.step(ids, ids, 1e-4, segments)
        held.top = held.now
        e.step(ids, ids, 1e-4, segments)
    return e.pp_rank, held.top


def evaluate(rank: int, config: dict[str, Any], options: ParallelOptions) -> float:
    e = engine(config, options)
    loss: float = e.evaluate(*cases.own(e, cases.batch(config, 0))).loss
    return loss


def between_steps(
    rank: int, config: dict[str, Any], options: ParallelOptions, evaluate_too: bool
) -> list[tuple[float, float]]:
    """Loss and gradient norm of three steps, with evaluations of another batch between them or
    without.
    """
    e = engine(config, options)
    out = []
    for step in range(3):
        if evaluate_too:
            e.evaluate(*cases.own(e, cases.batch(config, 50)))
        result = e.step(*cases.own(e, cases.batch(config, step)), cases.lr(step))
        out.append((result.loss, result.grad_norm))
    return out


def train_and_save(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    folder: Path,
    at: int,
    last: int,
    how: dict[str, Any],
) -> list[tuple[float, float]]:
    """Save after `at` steps and continue to `last`; returns the losses after the save."""
    shim.install()
    from smtrain.worker.engine.nxd import persist

    e = engine(config, options, **how)
    cases.steps(e, 0, at)
    e.save(folder, at, {"samples": at * BATCH})
    after = cases.steps(e, at, last)
    persist.finish(e)
    return after


def resume(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    checkpoint: Path,
    at: int,
    last: int,
) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    e = engine(
        config, options, seed=7
    )  # random, so that nothing but the checkpoint can explain the numbers
    return e.load(checkpoint), cases.steps(e, at, last)


def first_loss(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, step: int
) -> float:
    """The loss of a step of an engine that starts from a folder of weights."""
    from smtrain.worker.checkpoint.open import open_weights

    loss: float = cases.steps(engine(config, options, source=open_weights(folder)), step, step + 1)[
        0
    ][0]
    return loss


def native_first_loss(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, step: int
) -> float:
    from smtrain.worker.checkpoint.open import open_weights

    e = NativeEngine(config, options, OPTIMIZER, open_weights(folder), 0)
    return cases.steps(e, step, step + 1)[0][0]


def save_on_hosts(
    rank: int,
    config: dict[str, Any],
    options: ParallelOptions,
    folders: list[Path],
    how: dict[str, Any],
) -> None:
    """Two hosts of two ranks with a disk each: three saves, the newest two kept."""
    shim.install()
    from smtrain.worker.engine.nxd import persist

    folder = cases.host_of(rank, folders)
    e = engine(config, options, **how)
    for step in range(3):
        cases.steps(e, step, step + 1)
        e.save(folder, step + 1, {})
        e.end_save()
        e.prune(Lineage.of(folder, ""), 2)
    persist.finish(e)


def train_until_killed(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, at: int
) -> None:
    """Act as a job: resume from the newest whole checkpoint, save every 2 steps, kill rank 1 after
    step `at`.
    """
    from smtrain.worker.engine.nxd import completeness

    e = engine(config, options)
    newest = [path for _, path in manifest.checkpoints(folder) if completeness.fault(path) is None]
    first = e.load(newest[-1])["next"] if newest else 0
    for step in range(first, 8):
        result = cases.steps(e, step, step + 1)[0]
        if rank == 0:
            with open(folder / "losses", "a") as file:
                file.write(f"{step} {result!r}\n")
        if step == at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2:
            e.save(folder, step + 1, {"next": step + 1})


def load_shards(rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path) -> float:
    """The library's own function reads what `convert` wrote, into a model of random values; step
    0's loss.
    """
    from neuronx_distributed import load_checkpoint

    e = engine(config, options, seed=7)
    load_checkpoint(str(folder.parent), tag=folder.name, model=e.model)
    loss: float = e.evaluate(*cases.own(e, cases.batch(config, 0))).loss
    return loss


def refusal(
    rank: int, config: dict[str, Any], options: ParallelOptions, checkpoint: Path | None = None
) -> str:
    """The sentence of the error that building, or loading a checkpoint, raises."""
    try:
        e = engine(config, options, seed=7)
        if checkpoint is not None:
            e.load(checkpoint)
    except SmtrainError as error:
        return str(error)
    return "fine"


def masters(
    rank: int, config: dict[str, Any], options: ParallelOptions, rounded: bool
) -> tuple[int, int, int]:
    """Count ZeRO-1's fp32 weights: all, equal to the source's values, equal to the parameters'
    rounded ones.

    The source's values are those of an fp32 engine on the same mesh.
    """
    import torch

    values = {name: v.to(torch.bfloat16) if rounded else v for name, v in weights(config).items()}
    weights_of = [
        [p.detach() for group in e.adamw.param_groups for p in group["params"]]
        for e in (
            engine(config, replace(options, precision=precision), source=Memory(config, values))
            for precision in ("bf16", "fp32")
        )
    ]
    count = same = kept = 0
    for master, exact in zip(*weights_of, strict=True):
        count += master.numel()
        same += int((master == exact).sum())
        kept += int((master == exact.to(torch.bfloat16)).sum())
    return count, same, kept


def save_what_is_no_number(
    rank: int, config: dict[str, Any], options: ParallelOptions, folder: Path, steps: int
) -> tuple[str, list[str]]:
    """The sentence of a save of weights of which one of rank 1's is infinite, and what is in the
    folder then.
    """
    e = engine(config, options)
    cases.steps(e, 0, steps)
    if rank == 1:
        e.adamw.param_groups[0]["params"][0].data.view(-1)[3] = float("inf")
    if steps:
        cases.steps(e, steps, steps + 1)
    try:
        e.begin_save(folder, 1, {})
    except SmtrainError as error:
        return str(error), [path.name for path in folder.iterdir()]
    return "begun", []
