"""Experts in Megatron's legacy checkpoints: each expert-parallel rank has a file with its own,
numbered from 0.

Sequential experts are modules of a list; grouped ones are two tensors of all local experts (inputs
first), or with Transformer Engine a tensor for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Role
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.sizes import ExpertSizes
from smtrain.worker.checkpoint.megatron.names import LAYER, FusedTensor, describe_unknown
from smtrain.worker.checkpoint.storage import Place
from smtrain.worker.checkpoint.tensor_ranges import Slab, contiguous

_SEQUENTIAL = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)")
_TE_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")
_GROUPED_WEIGHT = re.compile(r"(.+\.mlp\.experts)\.weight([12])")

Chunks = list[dict[str, Slab]]
"""For each virtual stage of a file, local name -> tensor."""


def by_stage(
    location: Place, shape: ModelShape, ranks: Mapping[tuple[int, ...], Chunks]
) -> tuple[dict[tuple[int, int], Chunks], int]:
    """Join the files of expert-parallel ranks: (tp rank, pipeline stage) -> its tensors, experts by
    their numbers.

    Returns the number of expert-parallel ranks too. `ranks` is by the numbers in the folders'
    names: of two the second is the expert-parallel rank if the file has all layers, else the stage.
    Everything but experts is equal in the files of a stage, and taken once. Raises CheckpointError
    if a rank is missing, or the experts are not config.json's.
    """
    if shape.experts is None:
        expert_name = next(
            (
                n
                for chunks in ranks.values()
                for chunk in chunks
                for n in chunk
                if ".mlp.experts." in n
            ),
            None,
        )
        if expert_name is not None or any(len(rank) > 2 for rank in ranks):
            description = expert_name or "files of expert-parallel ranks"
            raise CheckpointError(
                f"{location} holds {description[:200]}, which is"
                f" {describe_unknown('.experts.', shape)}.",
                code="checkpoint.other_model",
            )
        return {
            (rank[0], rank[1] if len(rank) > 1 else 0): chunks for rank, chunks in ranks.items()
        }, 1
    chunks_by_rank: dict[tuple[int, int, int], Chunks] = {}
    for rank, chunks in ranks.items():
        # mp_rank_00_001 is stage 1 or expert rank 1: with pp > 1 no file has all layers.
        has_all_layers = (
            len({match[1] for chunk in chunks for name in chunk if (match := LAYER.match(name))})
            == shape.layers
        )
        stage = 0 if len(rank) == 2 and has_all_layers else rank[1] if len(rank) > 1 else 0
        chunks_by_rank[
            rank[0], stage, rank[-1] if len(rank) == 3 or (len(rank) == 2 and has_all_layers) else 0
        ] = chunks
    return _join_ranks(location, shape.experts, chunks_by_rank)


def _join_ranks(
    location: Place, sizes: ExpertSizes, ranks: Mapping[tuple[int, int, int], Chunks]
) -> tuple[dict[tuple[int, int], Chunks], int]:
    degree = max(e for _, _, e in ranks) + 1
    numbers = [
        local[1]
        for chunks in ranks.values()
        for chunk in chunks
        for name in chunk
        if (local := _local(name)) is not None
    ]
    # GroupedMLP's tensors have no expert numbers; then the folders' names tell the degree.
    experts_per_rank = max(numbers) + 1 if numbers else sizes.count // degree
    if (
        not experts_per_rank
        or sizes.count % experts_per_rank
        or degree > sizes.count // experts_per_rank
    ):
        raise CheckpointError(
            f"{location} has {max(experts_per_rank, 1)} experts a layer on each of {degree}"
            f" expert-parallel ranks, config.json {sizes.count}; take this model's.",
            code="checkpoint.other_model",
        )
    if missing_ranks := sorted(
        {*range(sizes.count // experts_per_rank)} - {e for _, _, e in ranks}
    ):
        raise CheckpointError(
            f"{location} lacks the file of expert-parallel rank {missing_ranks[0]}; copy that"
            " rank's file into it.",
            code="checkpoint.damaged",
        )
    out: dict[tuple[int, int], Chunks] = {}
    for (t, p, e), chunks in sorted(ranks.items()):
        stage = out.setdefault((t, p), [{} for _ in chunks])
        if len(stage) != len(chunks):
            raise CheckpointError(
                f"{location}: the expert-parallel ranks of tp rank {t}, pp rank {p} have different"
                " numbers of virtual stages; copy the checkpoint again.",
                code="checkpoint.damaged",
            )
        for stage_tensors, chunk in zip(stage, chunks, strict=True):
            for name, slab in chunk.items():
                for global_name, part in _number_experts(
                    location, name, slab, e * experts_per_rank, experts_per_rank
                ):
                    stage_tensors.setdefault(global_name, part)
    return out, sizes.count // experts_per_rank


def _local(name: str) -> tuple[str, int, str] | None:
    """(what comes before, number among the rank's experts, linear) of an expert's own tensor."""
    if match := _SEQUENTIAL.fullmatch(name):
        return match[1], int(match[2]), match[3]
    if match := _TE_GROUPED.fullmatch(name):
        return match[1], int(match[3]), match[2]
    return None


def _number_experts(
    location: Place, name: str, slab: Slab, first: int, count: int
) -> Iterator[tuple[str, Slab]]:
    """The tensors that a stored one consists of, experts by their numbers: `count` of them from
    `first` on.
    """
    if local := _local(name):
        path, number, linear = local
        yield f"{path}.experts.{first + number}.{linear}", slab
    elif match := _GROUPED_WEIGHT.fullmatch(name):
        for number, part in enumerate(_views(location, name, slab, match[2] == "1", count)):
            yield f"{match[1]}.experts.{first + number}.linear_fc{match[2]}.weight", part
    else:
        yield name, slab


def _views(location: Place, name: str, slab: Slab, is_first: bool, count: int) -> Iterator[Slab]:
    """The matrices of `GroupedMLP`, outputs first: it stores [hidden, rest] and [rest, hidden], and
    takes both for [experts, inputs, outputs].
    """
    if (
        # Experts are cut by byte offsets below, so only a contiguous tensor will do.
        len(slab.shape) != 2
        or slab.strides != contiguous(slab.shape)
        or slab.shape[is_first] % count
    ):
        raise CheckpointError(
            f"{location}: {name[:200]} is {list(slab.shape)}, which are not the matrices of {count}"
            " experts; take this model's config.json.",
            code="checkpoint.other_model",
        )
    # weight1 looks like columns of all experts side by side, but GroupedMLP takes its memory as
    # [experts, hidden, rest] (`weight1.view(experts, hidden, -1)`): expert n is one run of bytes.
    inputs, outputs = slab.shape
    inputs, outputs = (inputs, outputs // count) if is_first else (inputs // count, outputs)
    for number in range(count):
        yield replace(
            slab,
            offset=slab.offset + number * inputs * outputs * slab.dtype.itemsize,
            shape=(outputs, inputs),
            # The file has [inputs, outputs] for each expert; strides transpose it without a copy.
            strides=(1, outputs),
            crc32=None,
        )


def stored_degree(fused_tensor: FusedTensor, slab: Slab) -> int | None:
    """The tensor-parallel degree of an expert, or of a linear that gives latents, by the size of
    its part; None for tensors that are always cut by tp.
    """
    dims = {Role.EXPERT_COLUMN: 0, Role.EXPERT_ROW: 1, Role.LATENT: 0}
    dim = dims.get(fused_tensor.role)
    if dim is None or len(slab.shape) <= dim or not slab.shape[dim]:
        return None
    return max(1, fused_tensor.shape[dim] // slab.shape[dim])
