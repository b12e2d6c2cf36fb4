"""Times of single operations: the card's rates, one layer's attention, the head's product with the
cross entropy.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from scripts.benchmarks.gpu_parts.bench import Bench
from scripts.benchmarks.gpu_parts.loops import batch, engine, free, synchronize
from scripts.benchmarks.gpu_parts.rows import has_liger, segments_of
from scripts.benchmarks.gpu_parts.shapes import documents
from smtrain.worker.engine.native import gated_delta
from smtrain.worker.engine.native import varlen as ours

PRODUCTS = {
    "8192^3": (8192, 8192, 8192),
    "q": (8192, 2048, 2048),
    "up": (8192, 2048, 8192),
    "down": (8192, 8192, 2048),
    "head": (8192, 2048, 128256),
}
"""Sizes m, k, n: the largest rate by which MFU is also given, and those of the 1B."""


def mean_milliseconds(bench: Bench, call: Callable[[], object], times: int = 10) -> float:
    """Mean milliseconds, after two calls that do not count; fewer times if the call is slow."""
    call()
    synchronize(bench)
    began = time.perf_counter()
    call()
    synchronize(bench)
    if bench.toy or time.perf_counter() - began > 0.2:
        times = 2
    began = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(bench)
    return (time.perf_counter() - began) / times * 1e3


def device(bench: Bench) -> None:
    """Name, memory and versions; rates of products in bf16 and of a copy."""
    rates = {}
    for name, sizes in PRODUCTS.items():
        m, k, n = (max(16, size // 64) for size in sizes) if bench.toy else sizes
        a = torch.randn(m, k, device=bench.kind, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=bench.kind, dtype=torch.bfloat16)
        rates[name] = round(
            2e-9 * m * k * n / mean_milliseconds(bench, partial(torch.mm, a, b.t()), 20),
            1 if not bench.toy else 4,
        )
    x = torch.empty(2**16 if bench.toy else min(2**30, int(bench.gib * 2**24)), device=bench.kind)
    y = torch.empty_like(x)
    copy_rate = 2 * 4 * x.numel() / mean_milliseconds(bench, lambda: y.copy_(x)) / 1e9
    import transformers

    bench.emit(
        device=torch.cuda.get_device_name() if bench.kind == "cuda" else "CPU",
        gib=round(bench.gib, 1),
        tflops=rates,
        copy_tb_s=round(copy_rate, 3),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """torch's deterministic algorithms, without filling new memory."""
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SHAPES = ((8192, 64), (32768, 64), (8192, 128))  # tokens, head size
HEADS, KV_HEADS = 32, 8


def attention(bench: Bench) -> None:
    """Forward and backward pass of one layer over documents of about 1,024 tokens, and over the
    whole row.
    """
    for length, size in SHAPES:
        S = bench.length(length)
        shape = (1, HEADS, S, size), (1, KV_HEADS, S, size)
        q, k, v, g = (
            torch.randn(shape[kv], device=bench.kind, dtype=torch.bfloat16, requires_grad=True)
            for kv in (0, 1, 1, 0)
        )
        lengths = documents(S, bench.length(1024))
        ms, gib, failures = dict[str, float](), dict[str, float](), dict[str, str]()
        for on in (False, True):
            for name, call in attention_ways(bench, q, k, v, g.detach(), lengths).items():
                title = name + (", deterministic" if on else "")
                try:
                    base = memory(bench, reset=True)
                    with deterministic(on):
                        ms[title] = round(mean_milliseconds(bench, call), 3)
                    gib[title] = round(memory(bench) - base, 2)
                except Exception as error:
                    failures[title] = (
                        f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
                    )
                free(bench)
        bench.emit(row=f"attention {length} head {size}", S=S, ms=ms, gib=gib, failed_ways=failures)
        del q, k, v, g
        free(bench)


def memory(bench: Bench, reset: bool = False) -> float:
    """GiB that tensors have now (after a reset), or had at most since."""
    if bench.toy:
        return 0.0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.max_memory_allocated()) / 2**30


def attention_ways(
    bench: Bench,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    lengths: list[int],
) -> dict[str, Callable[[], object]]:
    """The kernels by name; q, g [1, H, S, D], k, v [1, KV, S, D], documents of `lengths`."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention import varlen as module

    varlen_attn: Any = module.varlen_attn  # its arguments differ between versions of torch

    S, copies = q.shape[2], HEADS // KV_HEADS
    starts = torch.tensor([0, *lengths], device=bench.kind).cumsum(0).int()
    segments = segments_of([lengths])[0].to(bench.kind)
    # Newer versions of torch want to be asked for fewer heads of keys and values.
    gqa_options = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )

    def attend_whole_row(backend: Any = None) -> None:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), g)

    def dense_mask() -> None:
        mask = (segments[:, None] == segments).tril_()
        wide_k, wide_v = (x.repeat_interleave(copies, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask[None, None])
        torch.autograd.grad(out, (q, k, v), g)

    def varlen() -> None:
        flat = [x.transpose(1, 2).reshape(S, x.shape[1], -1) for x in (q, k, v)]
        out = varlen_attn(
            *flat, starts, starts, max(lengths), max(lengths), window_size=(-1, 0), **gqa_options
        )
        torch.autograd.grad(out, (q, k, v), g.transpose(1, 2).reshape(out.shape))

    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    bounds = ours.DocumentBounds.of(
        ours.find_bounds(positions), torch.device(bench.kind), is_compiled=False
    )

    def smtrain() -> None:
        out = ours.attend(q, k, v, bounds, None)
        torch.autograd.grad(out, (q, k, v), g.transpose(1, 2))

    return {
        "whole row, torch's choice": attend_whole_row,
        "whole row, flash": lambda: attend_whole_row(SDPBackend.FLASH_ATTENTION),
        "whole row, cuDNN": lambda: attend_whole_row(SDPBackend.CUDNN_ATTENTION),
        "documents, smtrain": smtrain,
        "documents, varlen": varlen,
        "documents, dense mask": dense_mask,
    }


def both_passes(forward: Callable[[], torch.Tensor]) -> None:
    """Forward and backward pass."""
    forward().backward()


def loss(bench: Bench) -> None:
    """Forward and backward pass of head and cross entropy over 8,192 tokens, after one layer whose
    time is taken off.

    `smtrain` is the engine's own path from hidden states to the sum of losses.
    """
    config = bench.model("head")
    loss_engine = engine(bench, config, 2)
    stage = loss_engine.stage
    ids, labels = (x.to(bench.kind) for x in batch(config, 2, bench.length(4096)))
    head, unit_weight = (
        stage.model.get_output_embeddings().weight,
        torch.ones((), device=bench.kind),
    )

    def plain(z: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(z.float().flatten(0, 1), labels.flatten(), reduction="sum")

    compiled_loss = torch.compile(plain, dynamic=False)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "smtrain": lambda: stage.loss_sum(stage.hidden_states(ids), labels, unit_weight),
        "torch": lambda: plain(F.linear(stage.hidden_states(ids), head)),
        "torch compiled": lambda: compiled_loss(F.linear(stage.hidden_states(ids), head)),
    }
    if has_liger(bench, "loss", "Liger"):
        try:
            from liger_kernel.transformers.fused_linear_cross_entropy import (
                LigerFusedLinearCrossEntropyLoss,
            )

            liger_loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")
            ways["Liger"] = lambda: liger_loss(
                head, stage.hidden_states(ids).flatten(0, 1), labels.flatten()
            )
        except ModuleNotFoundError:
            bench.emit(
                row="loss",
                system="Liger",
                role="peer",
                missing="not installed: pip install liger-kernel",
            )
    hidden_ms = (
        0.0
        if bench.toy
        else mean_milliseconds(bench, lambda: stage.hidden_states(ids).sum().backward())
    )
    for system, way in ways.items():
        for on in (False, True):
            title = system + (", deterministic" if on else "")
            facts = {
                "row": "loss",
                "system": title,
                "role": "ours" if title == "smtrain" else "variant" if on else "peer",
            }
            try:
                base = memory(bench, reset=True)
                with deterministic(on):
                    ms = mean_milliseconds(bench, partial(both_passes, way)) - hidden_ms
                extra = round(memory(bench) - base, 2)
                value = float(way().detach()) / labels.numel()
                bench.emit(**facts, ms=round(ms, 2), extra_gib=extra, losses=[round(value, 5)])
            except Exception as error:
                bench.emit_failure(error, **facts)
            free(bench)


def delta_rule(bench: Bench) -> None:
    """The heads of a layer's gated delta net on two rows of 4,096, whole and of documents: plain
    torch in fp32, and the kernels of flash-linear-attention in bf16; milliseconds, and how far
    values and gradients are apart.
    """
    S, heads, size = bench.length(4096), 32, 128
    channels = 2 * 16 * size + heads * size
    net = SimpleNamespace(
        num_v_heads=heads, num_k_heads=16, head_k_dim=size, head_v_dim=size, activation="silu"
    )
    generator = torch.Generator(bench.kind).manual_seed(0)

    def draw_leaf(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, device=bench.kind).normal_(0.0, 1.0, generator=generator)
        return values.bfloat16().requires_grad_()

    leaves = [
        draw_leaf(2, S, channels),
        draw_leaf(2, S, heads),
        draw_leaf(2, S, heads),
        draw_leaf(channels, 4),
    ]
    params = gated_delta._Heads(
        torch.rand(heads, device=bench.kind).log_(), torch.zeros(heads, device=bench.kind)
    )
    lengths = [documents(S, bench.length(1024), seed) for seed in range(2)]
    number = segments_of(lengths).int().to(bench.kind)
    bounds = torch.tensor([0, *(n for row in lengths for n in row)]).cumsum(0).to(bench.kind)

    def by_torch(apart: bool) -> torch.Tensor:
        qkv, b, a, taps = (leaf.float() for leaf in leaves)
        row_numbers = number if apart else None
        return gated_delta._heads_of_torch(net, qkv, b, a, taps, params, row_numbers)

    def by_kernels(apart: bool) -> torch.Tensor:
        qkv, b, a, taps = leaves
        row_bounds = bounds if apart else None
        return gated_delta._heads_of_fla(net, qkv, b, a, taps, params, row_bounds)

    def differentiate(rule: Callable[[bool], torch.Tensor], apart: bool) -> None:
        torch.autograd.grad(rule(apart).float().sum(), leaves)

    for apart in (False, True):
        line: dict[str, Any] = {"row": f"delta rule, {'documents' if apart else 'whole rows'}"}
        answers = []
        for name, rule in (("torch", by_torch), ("kernels", by_kernels)):
            began = time.perf_counter()
            out = rule(apart)
            weights = out.detach().float().cos()
            gradients = torch.autograd.grad((out.float() * weights).sum(), leaves)
            answers.append([out, *gradients])
            synchronize(bench)
            line[f"{name}, first seconds"] = round(time.perf_counter() - began, 1)
            line[name] = round(mean_milliseconds(bench, partial(differentiate, rule, apart)), 3)
        # Of the outputs, and of the gradients of q, k and v, b, a, and of the convolution's taps.
        line["differences"] = [
            float((kernels - plain).norm() / plain.norm())
            for plain, kernels in zip(
                *([x.detach().float() for x in each] for each in answers), strict=True
            )
        ]
        bench.emit(**line)
