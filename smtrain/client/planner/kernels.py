"""Time of a micro-batch of engine native on a GPU, kernel by kernel.

Matrix products by their sizes, attention by its kernel, elementwise kernels and the optimizer by
the bytes that they move, and the host's time to launch all of them: a step is as slow as the slower
of device and host. The few speeds are measured on one H200 and one H100
(core/facts/gpu_kernels.toml), as shares of the data sheet's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil, prod
from typing import Any

from smtrain.client.planner.machines import (
    Machine,
    Mesh,
    Work,
    optimizer_share,
    sizes_of_rank,
    trained_numbers,
)
from smtrain.core.facts import table
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora
from smtrain.core.model.quantized import quantized_bytes
from smtrain.core.model.shape import LAYER, ModelShape

_FORWARD = 1 / 3  # of the time of products and elementwise kernels, which the backward pass doubles


@dataclass(frozen=True)
class Kernels:
    """Speeds of one GPU: operations and bytes per second."""

    peak: float
    products: float
    grouped_mm: float
    copies: float
    elementwise: float
    tail: float
    """Seconds that each matrix product loses at its end, when some multiprocessors have no more
    work.
    """
    launch: float
    """Seconds of the host to launch a kernel."""
    busy: float
    """Share of a step in which a GPU works that never waits for its host."""

    def layer(self, work: Work, mesh: Mesh, tokens: int) -> tuple[float, float]:
        """Seconds of one layer of a micro-batch of so many tokens: of everything but attention, and
        of attention.
        """
        recomputes = mesh.recompute == "full"
        dense = self._products(work, mesh, tokens) + self._passes(work, mesh, tokens) * (
            1 + recomputes * _FORWARD
        )
        if mesh.recompute == "selective":  # engine native computes the module of attention again
            dense += self._linears(_attention_linears(work.shape, mesh.tp), tokens, work.width)
        return dense / self.busy, self._attention(work, mesh, tokens) / self.busy

    def head(self, work: Work, mesh: Mesh, tokens: int) -> float:
        """Seconds of the output matrix and the loss."""
        facts, rank_sizes = table("gpu_kernels"), sizes_of_rank(work.shape, mesh.tp)
        seconds = (2 if work.lora else 3) * self._linears(
            ((rank_sizes.vocab, work.shape.hidden),), tokens, work.width
        )
        loss = work.loss or ("pieces_compiled" if work.is_compiled else "pieces")
        seconds += float(facts["loss"][loss]) * tokens * rank_sizes.vocab / self.elementwise
        trained_numbers = (
            0 if work.lora else rank_sizes.head + (0 if work.shape.tied else rank_sizes.embed)
        )
        return (
            float(seconds + facts["update"]["gradient"] * trained_numbers / self.copies) / self.busy
        )

    def launches(self, work: Work, mesh: Mesh) -> float:
        """Seconds of the host to launch the kernels of one layer."""
        counts = table("gpu_kernels")["launches"]["fused" if work.is_compiled else "eager"]
        optional_parts = {
            "qk_norm": work.shape.qk_norm,
            "adapters": work.lora,
            "quantized": work.quantizes,
            "experts": work.shape.experts,
        }
        count: float = counts["layer"] + sum(
            counts[name] for name, part in optional_parts.items() if part
        )
        return count * (1 + (mesh.recompute == "full") * _FORWARD) * self.launch

    def _products(self, work: Work, mesh: Mesh, tokens: int) -> float:
        """Seconds of all matrix products of a layer.

        Frozen weights have no gradient, their adapters do.
        """
        shape, lora = work.shape, work.lora
        passes = (2 if lora else 3) + (mesh.recompute == "full")
        linears = linear_sizes(shape, mesh.tp)
        seconds = passes * self._linears(linears, tokens, work.width)
        if work.quantizes:  # each pass reads the 4 bits of a weight and writes it for its product
            numbers = sum(n * k for n, k in linears)
            seconds += passes * (quantized_bytes(numbers) + work.width * numbers) / self.copies
        if shape.experts is not None:
            seconds += passes * self._expert_products(work, mesh, tokens)
        if lora is not None:
            factors = 3 + (mesh.recompute == "full")
            seconds += factors * self._linears(_factors(shape, lora, mesh.tp), tokens, work.width)
        return seconds

    def _linears(self, sizes: tuple[tuple[int, int], ...], tokens: float, width: int) -> float:
        """Seconds of one pass over linears [n, k]: by operations, or by bytes if a product is
        small.
        """
        return sum(
            max(
                2.0 * tokens * n * k / self.products,
                width * (tokens * (n + k) + n * k) / self.copies,
            )
            + self.tail
            for n, k in sizes
        )

    def _expert_products(self, work: Work, mesh: Mesh, tokens: int) -> float:
        sizes, rank_sizes = work.shape.experts, sizes_of_rank(work.shape, mesh.tp, mesh.ep)
        assert sizes is not None
        rows = (
            (work.capacity or 1.0) * sizes.chosen * tokens
        )  # of even loads, with ep as many as without
        operations = 2.0 * rows * rank_sizes.experts / (sizes.count / mesh.ep)
        return float(
            max(operations / self.grouped_mm, work.width * rank_sizes.experts / self.copies)
        )

    def _passes(self, work: Work, mesh: Mesh, tokens: int) -> float:
        """Seconds of a layer's elementwise kernels, and of adding its weights' gradients to their
        sums.
        """
        facts, shape = table("gpu_kernels"), work.shape
        form = "fused" if work.is_compiled else "eager"
        passes = facts["passes"][f"plain_{form}" if shape.plain else form]
        along = mesh.tp if mesh.sequence_parallel else 1
        heads = shape.heads + sizes_of_rank(shape, 1).kv_heads
        queries = heads * shape.mean_head_dim / mesh.tp
        norm_numbers = len(shape.rules.block_norms) * shape.hidden / along + (
            queries if shape.qk_norm else 0.0
        )
        bytes_ = (
            passes["norm"] * norm_numbers
            + passes["hidden"] * shape.hidden
            + passes["queries" if shape.latent is None else "latent"] * queries
        )
        if shape.experts is None:
            bytes_ += passes["inner"] * shape.intermediate / mesh.tp
        else:
            rows = (work.capacity or 1.0) * shape.experts.chosen
            has_scores = shape.rules.experts is not None and shape.rules.experts.scores == "sigmoid"
            bytes_ += rows * (
                (passes["chosen"] + has_scores * passes["scored"]) * shape.hidden
                + passes["inner"] * shape.experts.width / mesh.tp
            )
        if work.lora is not None:
            adapter_passes = facts["passes"][f"{form}_adapter"]
            for n, k in _adapted_linears(shape, work.lora, mesh.tp):
                bytes_ += adapter_passes["output"] * n + adapter_passes["input"] * k
        gradient_bytes = facts["update"]["gradient"] * (
            0 if work.lora else sizes_of_rank(shape, mesh.tp, mesh.ep).layer
        )
        return float(bytes_ * tokens / self.elementwise + gradient_bytes / self.copies)

    def _attention(self, work: Work, mesh: Mesh, tokens: int) -> float:
        """Seconds of a layer's attention: cuDNN for whole rows, else and if deterministic
        FlashAttention 2.
        """
        shape, facts = work.shape, table("gpu_kernels")["attention"]
        row = facts["flash" if work.deterministic or work.has_mask or mesh.cp > 1 else "cudnn"]
        rate: float = row["narrow" if shape.head_dim <= 64 else "wide"] * self.peak
        forward_again = facts["forward"] if mesh.recompute != "none" or mesh.cp > 1 else 0.0
        if shape.delta is not None:
            # Plain torch's passes over fp32 keys and values take its time, not the products.
            numbers = shape.delta.value_heads * (shape.delta.key_dim + shape.delta.value_dim)
            passes: float = facts["delta"] * (4 + bool(forward_again)) / 4
            return passes * numbers / mesh.tp * tokens / self.elementwise
        # The narrower of keys and values are padded.
        width = shape.heads * max(shape.head_dim, shape.value_dim) / mesh.tp
        # 4 operations forward and 10 backward for each query, key that it sees, and number of a
        # head.
        seconds: float = (
            tokens * width * (14.0 * mean_keys(work) / rate + row["bytes"] / self.copies)
        )
        backward = 1.0 - facts["forward"]
        if work.deterministic:
            backward *= _deterministic_slowdown(
                mesh.micro_batch * shape.heads / mesh.tp * work.documents
            )
        return float(seconds * (facts["forward"] + backward + forward_again))

    def update(self, work: Work, mesh: Mesh, stage: int) -> float:
        """Seconds of the optimizer's step: passes over the sums of gradients, and over the rank's
        part of the state.
        """
        bytes_per_number = table("gpu_kernels")["update"]["step"]
        numbers, (_, shard) = trained_numbers(work, mesh, stage), optimizer_share(work, mesh, stage)
        return float(bytes_per_number * shard + 12 * (numbers - shard)) / self.copies


def mean_keys(work: Work) -> float:
    """Keys that a query of a layer sees, on average: half of its row or document, or its window."""
    length = work.seq_len / work.documents
    window = work.shape.sliding_window
    if window is None or window >= length:
        return length / 2
    # The mean of min(i, window) over the tokens i of a row.
    return window * (1 - window / (2 * length))


def _deterministic_slowdown(units: float) -> float:
    """Time of FlashAttention 2's deterministic backward pass relative to the other one.

    It cuts each head of each document only into as many blocks as fill the multiprocessors once
    (`nsplits` in flash_attn's flash_bwd_launch_template.h), so that those of the last wave are
    partly idle.
    """
    count: int = table("gpu_kernels")["rates"]["multiprocessors"]
    blocks = ceil(count / units) * units
    return ceil(blocks / count) * count / blocks


@cache
def kernels_of(machine: Machine) -> Kernels | None:
    """The kernels' speeds on a machine's GPUs; None if no measurement carries over to them."""
    facts = table("gpu_kernels")
    chip = facts["chips"].get(machine.chip)
    if chip is None:
        return None
    rates, memory = facts["rates"], chip["memory_gbs"] * 1e9
    return Kernels(
        peak=machine.core_flops,
        products=rates["products"] * machine.core_flops,
        grouped_mm=rates["products"] * rates["grouped"] * machine.core_flops,
        copies=rates["copies"] * memory,
        elementwise=chip.get("elementwise", rates["elementwise"]) * memory,
        tail=rates["product_seconds"],
        launch=rates["launch_seconds"],
        busy=rates["busy"],
    )


@cache
def linear_sizes(shape: ModelShape, tp: int) -> tuple[tuple[int, int], ...]:
    """[n, k] of the linears of a layer on a tensor-parallel rank, but for experts."""
    return tuple(size for _, size in _linears_by_name(shape, tp))


@cache
def _attention_linears(shape: ModelShape, tp: int) -> tuple[tuple[int, int], ...]:
    modules = (shape.rules.attention, shape.rules.linear or shape.rules.attention)
    return tuple(
        size
        for name, size in _linears_by_name(shape, tp)
        if any(f".{part}." in name for part in modules)
    )


@cache
def _adapted_linears(shape: ModelShape, lora: Lora, tp: int) -> tuple[tuple[int, int], ...]:
    """[n, k] of the linears of a layer that have adapters."""
    return tuple(
        size
        for name, size in _linears_by_name(shape, tp)
        if name.removesuffix(".weight").rpartition(".")[2] in lora.targets
    )


@cache
def _factors(shape: ModelShape, lora: Lora, tp: int) -> tuple[tuple[int, int], ...]:
    adapter_shape: Any = AdapterShape.of(_one_layer_shape(shape), lora)
    return tuple(size for _, size in _matrices(adapter_shape, tp))


@cache
def _linears_by_name(shape: ModelShape, tp: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return _matrices(_one_layer_shape(shape), tp)


def _matrices(shape: Any, tp: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    layout = Layout(shape, tp, 1)
    specs = (
        s for s in shape.specs if LAYER.search(s.name) and not s.of_experts and len(s.shape) == 2
    )
    sizes = ((s, layout.local_shape(s.name, 0)) for s in specs)
    # GPT-2 stores its linears as [k, n]: the product takes the same time.
    return tuple((s.name, (size[0], prod(size[1:]))) for s, size in sizes)


def _one_layer_shape(shape: ModelShape) -> ModelShape:
    return replace(shape.by_layer[0], layers=1, full=())
