"""Read Megatron-core's `torch_dist` checkpoints: torch's distributed format with tensors of the
whole model.

`.metadata` locates the chunks of every tensor in the `.distcp` files; each chunk is a stream of
torch.save. Layers may be stacked along a first dimension or stored one by one, and so may the
experts of a layer. Sequential and grouped experts are stored alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.core.model.other_forms import refuse_elsewhere
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_manifest import matches_manifest, read_manifest
from smtrain.worker.checkpoint.megatron.block_source import PieceSource
from smtrain.worker.checkpoint.megatron.names import (
    EMBEDDING,
    HEAD,
    FusedTensor,
    canonical,
    describe_unknown,
    head,
    is_ignored,
    table,
    warn_of_mtp_layers,
)
from smtrain.worker.checkpoint.storage import Place, read_text
from smtrain.worker.checkpoint.tensor_blocks import TensorBlock
from smtrain.worker.checkpoint.torch_files.distributed import (
    METADATA,
    DistributedIndex,
    StoredChunk,
)

METADATA_JSON = "metadata.json"
# No number behind `layers` or `experts` means a stack. Numbers: a run with layers of several
# kinds, or with singleton_local_shards.
_LAYER_STACK = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.experts)\.(?!\d)(.+)")
# singleton_local_shards stores [gate; up] as two tensors, _w and then _v.
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
# All other keys are the optimizer's and the run's state, which is not converted.
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.", "encoder.")


def backend(location: Place) -> str | None:
    """The format that metadata.json names; None without one."""
    if METADATA_JSON not in location.files():
        return None
    try:
        metadata = parse_json(read_text(location, METADATA_JSON))
    except ValueError:
        return None
    name = metadata.get("sharded_backend") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None


class TorchDistSource(PieceSource):
    """A `torch_dist` checkpoint as a `WeightSource`.

    `folder` is that of one iteration below `where`, "" for `where` itself. Raises CheckpointError
    if a file is missing, cut short or of another format, or does not fit the config.
    """

    def __init__(self, location: Place, folder: str, config: dict[str, Any]) -> None:
        at = location.subfolder(folder) if folder else location
        entry = read_manifest(location).get("files", {}).get(f"{folder}/{METADATA}", {})
        if not matches_manifest(at, METADATA, entry):
            raise CheckpointError(
                f"{at}/{METADATA} is not what was written; convert the model again.",
                code="checkpoint.damaged",
            )
        self.folder = folder
        shape = ModelShape.from_config(config)
        refuse_elsewhere(shape, "Megatron")
        fused_tensors = {f.key: f for f in (*table(shape), head(shape))}
        blocks: dict[str, list[TensorBlock]] = {}
        metadata = DistributedIndex(at)
        warn_of_mtp_layers(at, metadata.sizes)
        for key, size in metadata.sizes.items():
            if is_ignored(key) or not key.startswith(_MODEL_PREFIXES):
                continue
            chunks = metadata.chunks(key)
            name, sizes, half = _parse_key(canonical(key), size, shape)
            chunks_by_index = _by_index(chunks, sizes)
            for index in product(*(range(n) for n in sizes)):
                tensor_name = name.format(*index)
                if tensor_name not in fused_tensors:
                    raise CheckpointError(
                        f"{at} holds {key[:200]}, which is {describe_unknown(key, shape)}.",
                        code="checkpoint.other_model",
                    )
                _check(at, fused_tensors[tensor_name], key, size[len(sizes) :], half)
                blocks.setdefault(tensor_name, []).extend(
                    _blocks(fused_tensors[tensor_name], chunks_by_index.get(index, ()), half)
                )
        twins = blocks.pop(HEAD, None) if shape.tied else None
        super().__init__(location, config, table(shape), blocks, twins)


def _parse_key(
    key: str, size: tuple[int, ...], shape: ModelShape
) -> tuple[str, tuple[int, ...], int | None]:
    """(name in the whole model, sizes of the stacks that fill its braces, half of a gated MLP's
    input or None).
    """
    sizes: list[int] = []
    half = None
    if part := _HALF.fullmatch(key):
        key, half = part[1], "wv".index(part[2])
    # The key becomes a format string for the numbers of layer and expert.
    key = key.replace("{", "{{").replace("}", "}}")
    experts = shape.experts.count if shape.experts is not None else 0
    for pattern, unit, count in (
        (_LAYER_STACK, "layers", shape.layers),
        (_EXPERTS, "experts", experts),
    ):
        if not (match := pattern.fullmatch(key)) or len(sizes) == len(size):
            continue
        if size[len(sizes)] != count and (count or unit == "layers"):
            raise CheckpointError(
                f"{key[:200]} is of {size[len(sizes)]} {unit}, config.json of {count}; take this"
                " model's.",
                code="checkpoint.other_model",
            )
        sizes.append(size[len(sizes)])
        key = f"{match[1]}.{{}}.{match[2]}"
    return key, tuple(sizes), half


def _check(
    location: Place, fused_tensor: FusedTensor, key: str, size: tuple[int, ...], half: int | None
) -> None:
    expected_shape = (
        fused_tensor.shape
        if half is None
        else (fused_tensor.shape[0] // 2, *fused_tensor.shape[1:])
    )
    vocabulary = (
        fused_tensor.key in (EMBEDDING, HEAD)
        and len(size) == 2
        and size[0] >= expected_shape[0]
        and size[1:] == expected_shape[1:]
    )
    if size != expected_shape and not vocabulary:
        raise CheckpointError(
            f"{location}: {key[:200]} has shape {list(size)}, and config.json asks for"
            f" {list(expected_shape)}; the two are not of one model.",
            code="checkpoint.other_model",
        )


def _by_index(
    chunks: Sequence[StoredChunk], sizes: tuple[int, ...]
) -> Mapping[tuple[int, ...], list[StoredChunk]]:
    """The chunks of a stack of these sizes by the place in it, without its dimensions."""
    out: dict[tuple[int, ...], list[StoredChunk]] = {}
    depth = len(sizes)
    for chunk in chunks:
        slab = chunk.slab
        # A checksum is of the whole chunk; a part of a stack has none.
        part_crc = slab.crc32 if prod(slab.shape[:depth]) == 1 else None
        # No further than the stack itself, whose sizes are config.json's: a damaged chunk may call
        # itself endless.
        counts = (
            min(n, of - first)
            for n, of, first in zip(slab.shape, sizes, chunk.offsets, strict=False)
        )
        for at in product(*(range(n) for n in counts)):
            skipped_bytes = (
                sum(n * stride for n, stride in zip(at, slab.strides, strict=False))
                * slab.dtype.itemsize
            )
            part = replace(
                slab,
                offset=slab.offset + skipped_bytes,
                shape=slab.shape[depth:],
                strides=slab.strides[depth:],
                crc32=part_crc,
            )
            # strict=False: `at` has only the stack's dimensions, offsets have all.
            index = tuple(n + first for n, first in zip(at, chunk.offsets, strict=False))
            out.setdefault(index, []).append(StoredChunk(chunk.offsets[depth:], part))
    return out


def _blocks(
    fused_tensor: FusedTensor, chunks: Sequence[StoredChunk], half: int | None
) -> Iterator[TensorBlock]:
    shift = 0 if half is None else half * fused_tensor.shape[0] // 2
    for chunk in chunks:
        spans = tuple((a, a + n) for a, n in zip(chunk.offsets, chunk.slab.shape, strict=True))
        # _v is the second half, so its rows begin in the middle of [gate; up].
        spans = ((spans[0][0] + shift, spans[0][1] + shift), *spans[1:])
        # The intersection drops the padding of a vocabulary.
        block = TensorBlock(spans, chunk.slab, (0,) * len(spans)).intersect(
            [(0, n) for n in fused_tensor.shape]
        )
        if block is not None:
            yield block
