"""The parts that train: rows of the benchmark's table, by this engine and by its peers."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from scripts.benchmarks.gpu_parts import peers
from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.loops import (
    LR,
    VARIANTS,
    PeerLoop,
    Pending,
    adapters,
    batch,
    begin_ours,
    engine,
    free,
    measure,
    settings,
    synchronize,
)
from scripts.benchmarks.gpu_parts.profiling import profile
from scripts.benchmarks.gpu_parts.shapes import documents, with_layers
from scripts.benchmarks.gpu_parts.weights import DrawnEngine
from smtrain.core.config.training import DpoSection
from smtrain.worker.engine.native import init_distributed

ROWS = 8  # of a dense step of 4,096 tokens each
Begin = Callable[[], Pending]


def row(
    bench: Bench,
    name: str,
    system: str,
    role: str,
    work: dict[str, Any],
    begin: Begin,
    seconds: float,
    losses: int = 3,
) -> None:
    """Measure one row of the table; running out of memory is a result too.

    `role` is ours, peer, or variant: another setting of ours. `work` has model, S, B, mb, and lora,
    apart, recompute. A part trains one model, so only its first row starts from the initial values
    and has losses.
    """
    if bench.compiled_shape != (work["mb"], work["S"]):
        # Otherwise a second shape would get code for any shape, which is slower than that of a job
        # with one shape.
        torch._dynamo.reset()
        bench.compiled_shape = work["mb"], work["S"]
    facts = {
        "row": name,
        "system": system,
        "role": role,
        **work,
        "layers": bench.layers.get(work["model"]),
    }
    if system.startswith("smtrain"):
        facts |= settings_of(system)
    try:
        figures = measure(bench, begin, seconds, losses)
    except torch.OutOfMemoryError as error:
        bench.emit_failure(error, **facts)
        bench.fresh = False
        return
    finally:
        free(bench)
    if not bench.fresh:
        del figures["losses"]
    bench.fresh = False
    rate = work["B"] * work["S"] / figures["step_ms"] * 1e3
    bench.emit(**facts, tokens_per_s=round(rate), **figures)


def settings_of(system: str) -> dict[str, bool]:
    """The settings of a system of ours, whose name ends with its variant."""
    variant_settings = settings(next((variant for variant in VARIANTS if variant in system), ""))
    return {
        "compiled": variant_settings["compile"],
        "deterministic": variant_settings["deterministic"],
    }


def micro_batches(bench: Bench) -> tuple[int, ...]:
    """The micro-batches of dense rows: half as many on small cards."""
    return (4, 8) if bench.gib > 50 or bench.toy else (1, 2)


def dense(bench: Bench, variant: str = "") -> None:
    """1B, 4,096, with the default settings or a variant of them."""
    config, S = bench.model("1b"), bench.length(4096)
    our_engine = engine(bench, config, 1, variant)
    ids, labels = batch(config, ROWS, S)
    sizes = micro_batches(bench) if not variant else micro_batches(bench)[:1]
    for mb in sizes:
        our_engine.options = replace(our_engine.options, micro_batch_size=mb)
        work = {"model": "1b", "S": S, "B": ROWS, "mb": mb}
        name, role = f"dense 4096 mb {mb}", "variant" if variant else "ours"
        row(
            bench,
            name,
            f"smtrain {variant}".strip(),
            role,
            work,
            partial(begin_ours, our_engine, ids, labels),
            4,
        )
        if mb == sizes[0] and not variant:
            profile(
                bench, "dense", "smtrain", partial(begin_ours, our_engine, ids[:mb], labels[:mb])
            )


def _dense_peer(
    bench: Bench, system: str, make: Callable[[Bench, dict[str, Any]], PeerLoop]
) -> None:
    config, S = bench.model("1b"), bench.length(4096)
    loop = make(bench, config)
    ids, labels = batch(config, ROWS, S)
    for mb in micro_batches(bench):
        work = {"model": "1b", "S": S, "B": ROWS, "mb": mb}
        name, begin = f"dense 4096 mb {mb}", partial(loop.begin, ids, labels, mb)
        row(bench, name, system, "peer", work, begin, 4)


def dense_titan(bench: Bench) -> None:
    _dense_peer(bench, "torchtitan compiled", peers.torchtitan)


def dense_peer(bench: Bench, kind: str) -> None:
    if kind == "compiled":
        _dense_peer(bench, "transformers compiled", peers.compiled_transformers)
    elif has_liger(bench, "dense 4096", "transformers + Liger"):
        _dense_peer(bench, "transformers + Liger", peers.with_liger)


def has_liger(bench: Bench, name: str, system: str) -> bool:
    """Whether Liger's kernels run here; a line says so if not."""
    if bench.kind != "cuda":
        bench.emit(
            row=name,
            system=system,
            role="peer",
            missing="not on this device: Liger's kernels need CUDA",
        )
    return bench.kind == "cuda"


def segments_of(lengths: list[list[int]]) -> torch.Tensor:
    """The number of each token's document, int64 [rows, length]."""
    return torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )


def attended_tokens(lengths: list[list[int]]) -> float:
    """The mean over the tokens of the length of their document, for the operations of attention."""
    document_lengths = [n for row in lengths for n in row]
    return sum(n * n for n in document_lengths) / sum(document_lengths)


def packed(bench: Bench, variant: str = "") -> None:
    """Documents apart against whole rows of the same engine, which is the peer here."""
    config = bench.model("0.3b")
    our_engine = engine(bench, config, 1, variant)
    for length, rows in ((8192, 4), (32768, 1)):
        S = bench.length(length)
        ids, labels = batch(config, rows, S)
        lengths = [documents(S, bench.length(1024), seed) for seed in range(rows)]
        segments = segments_of(lengths)
        work: dict[str, Any] = {"model": "0.3b", "S": S, "B": rows, "mb": 1}
        work_apart = {**work, "apart": True, "attended": attended_tokens(lengths)}
        name = f"packed {length}"
        system, role = f"smtrain {variant}".strip(), "variant" if variant else "ours"
        row(
            bench,
            name,
            system,
            role,
            work_apart,
            partial(begin_ours, our_engine, ids, labels, segments),
            4,
        )
        whole_rows_system = f"{system}, whole rows"
        row(
            bench,
            name,
            whole_rows_system,
            "variant" if variant else "peer",
            work,
            partial(begin_ours, our_engine, ids, labels),
            4,
        )
        if length == 8192 and not variant:
            profile(
                bench,
                "packed",
                "smtrain",
                partial(begin_ours, our_engine, ids[:1], labels[:1], segments[:1]),
            )


def shape(bench: Bench, name: str, mb: str) -> None:
    """A model that no peer trains here, for the planner."""
    config, S = bench.model(name), bench.length(4096)
    our_engine = engine(bench, config, int(mb))
    ids, labels = batch(config, ROWS, S)
    work = {"model": name, "S": S, "B": ROWS, "mb": int(mb)}
    row(
        bench,
        f"{name} 4096",
        "smtrain",
        "ours",
        work,
        partial(begin_ours, our_engine, ids, labels),
        3,
    )


def experts(bench: Bench, name: str = "experts") -> None:
    config, S = bench.model(name), bench.length(4096)
    our_engine = engine(bench, config, 2)
    ids, labels = batch(config, 4, S)
    work = {"model": name, "S": S, "B": 4, "mb": 2}
    row(
        bench,
        f"{name} 4096",
        "smtrain",
        "ours",
        work,
        partial(begin_ours, our_engine, ids, labels),
        5,
    )
    profile(bench, name, "smtrain", partial(begin_ours, our_engine, ids[:2], labels[:2]))


def experts_peer(bench: Bench, name: str = "experts") -> None:
    config, S = bench.model(name), bench.length(4096)
    loop = peers.plain_experts(bench, config)
    ids, labels = batch(config, 4, S)
    work = {"model": name, "S": S, "B": 4, "mb": 2}
    row(bench, f"{name} 4096", "transformers", "peer", work, partial(loop.begin, ids, labels, 2), 5)
    profile(bench, name, "transformers", partial(loop.begin, ids[:2], labels[:2], 2))


def full(bench: Bench) -> None:
    """1B with weights sharded over a group of one, which shows the price of FSDP2 itself."""
    config, S = bench.model("1b"), bench.length(4096)
    our_engine = engine(bench, config, 4, shard="full")
    ids, labels = batch(config, ROWS, S)
    work = {"model": "1b", "S": S, "B": ROWS, "mb": 4, "shard": "full"}
    begin = partial(begin_ours, our_engine, ids, labels)
    row(bench, "full 4096 mb 4", "smtrain", "ours", work, begin, 4)


def full_peer(bench: Bench) -> None:
    init_distributed(bench.kind)
    config, S = bench.model("1b"), bench.length(4096)
    loop = peers.fully_sharded(bench, config)
    ids, labels = batch(config, ROWS, S)
    work = {"model": "1b", "S": S, "B": ROWS, "mb": 4, "shard": "full"}
    begin = partial(loop.begin, ids, labels, 4)
    row(bench, "full 4096 mb 4", "transformers FSDP2", "peer", work, begin, 4)


def save(bench: Bench) -> None:
    """Seconds that training stands still for a save in the background, and for one that waits."""
    config, S = bench.model("0.3b"), bench.length(4096)
    our_engine = engine(bench, config, 1)
    ids, labels = batch(config, 1, S)
    our_engine.step(ids, labels, LR)  # it reserves the memory of saves
    if not bench.toy:
        time.sleep(4)
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), list[dict[str, float]]()
        for number in range(3):
            began = time.perf_counter()
            our_engine.begin_save(folder, 2 * number + 1, {})
            stood = time.perf_counter()
            our_engine.step(ids, labels, LR)
            synchronize(bench)
            stepped = time.perf_counter()
            our_engine.end_save()
            whole = time.perf_counter()
            our_engine.save(folder, 2 * number + 2, {})
            waited = time.perf_counter() - whole
            began_step = time.perf_counter()
            our_engine.step(ids, labels, LR)
            synchronize(bench)
            step_s = time.perf_counter() - began_step
            seconds.append(
                {
                    # Also the time by which the step takes longer, whose update waits for copies.
                    "stood_s": round(stepped - began - step_s, 3),
                    "begin_s": round(stood - began, 3),
                    "behind_s": round(whole - stood, 2),
                    "waited_s": round(waited, 2),
                }
            )
            bench.emit(save=number, parameters=our_engine.parameters, **seconds[-1])
            for step in (2 * number + 1, 2 * number + 2):
                shutil.rmtree(folder / f"step_{step:08d}")
    stood_s, waited_s = (sum(each[key] for each in seconds) for key in ("stood_s", "waited_s"))
    bench.emit(row="save", ratio=round(stood_s / waited_s, 4))


QLORA_LAYERS = 8
"""The model has 32, but its weights are quantized on the host."""
LONG = (32768, 65536)


def long(bench: Bench) -> None:
    config = bench.model("1b")
    our_engine = engine(bench, config, 1, recompute="full")
    _long(bench, config, "smtrain", "ours", lambda ids, labels: begin_ours(our_engine, ids, labels))


def long_liger(bench: Bench) -> None:
    if has_liger(bench, "long", "transformers + Liger"):
        config = bench.model("1b")
        loop = peers.with_liger(bench, config, recompute=True)
        _long(
            bench,
            config,
            "transformers + Liger",
            "peer",
            lambda ids, labels: loop.begin(ids, labels, 1),
        )


def _long(
    bench: Bench,
    config: dict[str, Any],
    system: str,
    role: str,
    begin: Callable[[Any, Any], Pending],
) -> None:
    for length in LONG:
        S = bench.length(length)
        ids, labels = batch(config, 1, S)
        work = {"model": "1b", "S": S, "B": 1, "mb": 1, "recompute": "full"}
        row(bench, f"long {length}", system, role, work, partial(begin, ids, labels), 6, 2)
        if length == LONG[0]:
            profile(bench, "long", system, partial(begin, ids, labels))


def qlora(bench: Bench) -> None:
    config = with_layers(bench.model("8b", 3.0), QLORA_LAYERS)
    bench.layers["8b"] = QLORA_LAYERS
    our_engine = engine(bench, config, 2, lora=adapters(config, "nf4"))
    _lora(
        bench,
        config,
        "smtrain",
        "ours",
        lambda ids, labels: begin_ours(our_engine, ids, labels),
        "qlora 4096",
    )


def qlora_peer(bench: Bench) -> None:
    config = with_layers(bench.model("8b", 3.0), QLORA_LAYERS)
    bench.layers["8b"] = QLORA_LAYERS
    loop = peers.quantized_transformers(bench, config)
    _lora(
        bench,
        config,
        "peft + bitsandbytes",
        "peer",
        lambda ids, labels: loop.begin(ids, labels, 2),
        "qlora 4096",
    )


def lora(bench: Bench) -> None:
    config = bench.model("8b", 3.0)
    our_engine = engine(bench, config, 2, lora=adapters(config))
    _lora(bench, config, "smtrain", "ours", lambda ids, labels: begin_ours(our_engine, ids, labels))


def lora_peer(bench: Bench) -> None:
    if has_liger(bench, "lora 4096", "peft + Liger"):
        config = bench.model("8b", 3.0)
        loop = peers.with_liger(bench, config, lora=True)
        _lora(bench, config, "peft + Liger", "peer", lambda ids, labels: loop.begin(ids, labels, 2))


def _lora(
    bench: Bench,
    config: dict[str, Any],
    system: str,
    role: str,
    begin: Callable[[Any, Any], Pending],
    name: str = "lora 4096",
) -> None:
    S = bench.length(4096)
    ids, labels = batch(config, 4, S)
    work: dict[str, Any] = {"model": "8b", "S": S, "B": 4, "mb": 2, "lora": True}
    if name.startswith("qlora"):
        work["quantize"] = "nf4"
    row(bench, name, system, role, work, partial(begin, ids, labels), 6)
    profile(bench, name.split()[0], system, partial(begin, ids[:2], labels[:2]))


def seven(bench: Bench) -> None:
    config, S = bench.model("7b"), bench.length(4096)
    our_engine = engine(bench, config, 1, recompute="full")
    ids, labels = batch(config, 2, S)
    work = {"model": "7b", "S": S, "B": 2, "mb": 1, "recompute": "full"}
    row(
        bench,
        "7b 4096",
        "smtrain",
        "ours",
        work,
        partial(begin_ours, our_engine, ids, labels),
        5,
        losses=2,
    )


def sft(bench: Bench) -> None:
    """Samples whose first half has no loss: packed into rows of 4,096, and each in its own row of
    512.
    """
    config, S, sample = bench.model("0.3b"), bench.length(4096), bench.length(512)
    our_engine = engine(bench, config, 4)
    for name, length, rows, mb in (
        ("sft packed", S, ROWS, 4),
        ("sft short", sample, ROWS * S // sample, 32),
    ):
        lengths = [
            documents(length, sample, seed) if length > sample else [length] for seed in range(rows)
        ]
        ids, labels = batch(config, rows, length)
        for at, row_lengths in enumerate(lengths):
            begin = 0
            for n in row_lengths:
                labels[at, begin : begin + n // 2] = -100
                begin += n
        our_engine.options = replace(our_engine.options, micro_batch_size=min(mb, rows))
        segments = segments_of(lengths)
        work = {
            "model": "0.3b",
            "S": length,
            "B": rows,
            "mb": min(mb, rows),
            "apart": True,
            "attended": attended_tokens(lengths),
        }
        row(
            bench,
            name,
            "smtrain",
            "ours",
            work,
            partial(begin_ours, our_engine, ids, labels, segments),
            4,
        )
    ids, labels = batch(config, ROWS, S)
    our_engine.options = replace(our_engine.options, micro_batch_size=4)
    work = {"model": "0.3b", "S": S, "B": ROWS, "mb": 4}
    row(
        bench,
        "sft packed",
        "smtrain, whole rows",
        "peer",
        work,
        partial(begin_ours, our_engine, ids, labels),
        4,
    )


def dpo(bench: Bench) -> None:
    """Pairs of answers of 512 tokens: four in a row of 4,096, and one in a row of 1,024."""
    config, sample = bench.model("0.3b"), bench.length(512)
    our_engine = engine(bench, config, 2, preference=DpoSection())
    for name, pairs, rows in (("dpo packed", 4, 8), ("dpo short", 1, 32)):
        lengths = [[sample] * 2 * pairs] * rows
        length = 2 * pairs * sample
        ids, labels = batch(config, rows, length)
        labels.view(rows, 2 * pairs, sample)[:, :, : sample // 2] = -100
        segments, mb = segments_of(lengths), 2 if pairs > 1 else 8
        our_engine.options = replace(our_engine.options, micro_batch_size=mb)
        references = our_engine.log_probabilities(ids, labels, segments, pairs)
        work = {
            "model": "0.3b",
            "S": length,
            "B": rows,
            "mb": mb,
            "apart": True,
            "attended": float(sample),
        }

        begin = partial(begin_ours, our_engine, ids, labels, segments, references)
        row(bench, name, "smtrain", "ours", work, begin, 4)


def resume(bench: Bench) -> None:
    """Two steps, a checkpoint, two steps; and the last two steps again from the checkpoint: losses
    and weights.
    """
    config, S = bench.model("tiny"), bench.length(4096)
    ids, labels = batch(config, 2, S)
    segments = segments_of([documents(S, bench.length(1024), seed) for seed in range(2)])

    def steps(our_engine: DrawnEngine, count: int) -> list[tuple[float, float]]:
        results = [our_engine.step(ids, labels, LR, segments) for _ in range(count)]
        return [(result.loss, result.grad_norm) for result in results]

    with tempfile.TemporaryDirectory() as folder:
        our_engine = engine(bench, config, 1, "deterministic")
        steps(our_engine, 2)
        our_engine.save(Path(folder), 2, {"step": 2})
        losses = steps(our_engine, 2)
        dense: Any = our_engine.optimizer.dense
        weights = dense.master.detach().clone()
        resumed_engine = engine(bench, config, 1, "deterministic")
        resumed_engine.load(Path(folder) / "step_00000002")
        repeated_losses = steps(resumed_engine, 2)
        synchronize(bench)
        dense = resumed_engine.optimizer.dense
        same_weights = torch.equal(weights, dense.master)
    bench.emit(
        row="resume",
        same_bits=same_weights and losses == repeated_losses,
        same_weights=same_weights,
        losses=losses,
        resumed=repeated_losses,
    )
