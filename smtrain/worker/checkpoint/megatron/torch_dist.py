"""Read Megatron-core's `torch_dist` checkpoints: torch's distributed format with tensors of the
whole model.

`.metadata` locates the chunks of every tensor in the `.distcp` files; each chunk is a stream of
torch.save. Layers may be stacked along a first dimension or stored one by one, and so may the
experts of a layer. Sequential and grouped experts are stored alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.core.model.other_forms import refuse_elsewhere
from smtrain.core.model.shape import ModelShape
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.conversion_manifest import matches_manifest, read_manifest
from smtrain.worker.checkpoint.dtypes import DType
from smtrain.worker.checkpoint.megatron.block_source import PieceSource, TensorBlock
from smtrain.worker.checkpoint.megatron.names import (
    EMBEDDING,
    HEAD,
    FusedTensor,
    canonical,
    describe_unknown,
    head,
    is_ignored,
    table,
)
from smtrain.worker.checkpoint.storage import Place, read_text
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Opaque, unpickle

METADATA, METADATA_JSON = ".metadata", "metadata.json"
# No number behind `layers` or `experts` means a stack. Numbers: a run with layers of several
# kinds, or with singleton_local_shards.
_LAYER_STACK = re.compile(r"(decoder\.layers)\.(?!\d)(.+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts\.experts)\.(?!\d)(.+)")
# singleton_local_shards stores [gate; up] as two tensors, _w and then _v.
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
# All other keys are the optimizer's and the run's state, which is not converted.
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.", "encoder.")
_LIMIT = 1 << 30


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
        for key, size, chunks in _tensors(at):
            if is_ignored(key) or not key.startswith(_MODEL_PREFIXES):
                continue
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


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    slab: Slab


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
    chunks: Sequence[_Chunk], sizes: tuple[int, ...]
) -> Mapping[tuple[int, ...], list[_Chunk]]:
    """The chunks of a stack of these sizes by the place in it, without its dimensions."""
    out: dict[tuple[int, ...], list[_Chunk]] = {}
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
            out.setdefault(index, []).append(_Chunk(chunk.offsets[depth:], part))
    return out


def _blocks(
    fused_tensor: FusedTensor, chunks: Sequence[_Chunk], half: int | None
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


def _tensors(location: Place) -> Iterator[tuple[str, tuple[int, ...], list[_Chunk]]]:
    """(key, shape, chunks) of every tensor. Raises CheckpointError if `.metadata` is damaged."""
    try:
        yield from _read(location)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle leads to whatever it likes
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{location}/{METADATA} is not what torch writes ({reason}); copy this file again.",
            code="checkpoint.damaged",
        ) from None


def _read(location: Place) -> Iterator[tuple[str, tuple[int, ...], list[_Chunk]]]:
    size = location.files().get(METADATA)
    if size is None or size > _LIMIT:
        raise CheckpointError(
            f"{location} has no {METADATA}; copy this file into it.", code="checkpoint.damaged"
        )

    def make_slab(key: str, dtype: DType, numel: int) -> Slab:
        raise ValueError("it holds tensors itself")

    top = _state(
        unpickle(bytes(location.read(METADATA, 0, size)), make_slab, lenient=True), "Metadata"
    )
    storage: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for index, info in top["storage_data"].items():
        at = _state(index, "MetadataIndex")
        storage[at["fqn"], at.get("offset")] = _state(info, "_StorageInfo")
    for key, entry in top["state_dict_metadata"].items():
        # BytesStorageMetadata: fp8 states and objects, no weights.
        if not isinstance(entry, Opaque) or not entry.name.endswith("TensorStorageMetadata"):
            continue
        if is_ignored(key) or not key.startswith(_MODEL_PREFIXES):
            continue
        state = _state(entry, "TensorStorageMetadata")
        chunks = []
        for chunk in state["chunks"]:
            part = _state(chunk, "ChunkStorageMetadata")
            if (key, part["offsets"]) not in storage:
                raise ValueError(f"{key} lacks the chunk at {part['offsets']}")
            slab = _slab(location, key, storage[key, part["offsets"]])
            if slab.shape != part["sizes"]:
                raise ValueError(
                    f"a chunk of {key} has shape {list(slab.shape)} instead of"
                    f" {list(part['sizes'])}"
                )
            chunks.append(_Chunk(_numbers(part["offsets"]), slab))
        yield key, _numbers(state["size"]), chunks


def _state(value: Any, kind: str) -> dict[str, Any]:
    if (
        not isinstance(value, Opaque)
        or not value.name.endswith(f".{kind}")
        or not isinstance(value.state, dict)
    ):
        raise ValueError(f"it lacks {with_article(kind)}")
    return value.state


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError("it has something else in place of a shape")
    return value


def _slab(location: Place, key: str, info: dict[str, Any]) -> Slab:
    file, (offset, length) = info["relative_path"], _numbers((info["offset"], info["length"]))
    # .metadata comes with the checkpoint: a path in it could name any file of this machine.
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(
            f"it points {key} to {str(file)[:100]!r}, which is not a file in its folder"
        )
    # torch sets it if an extension changed the stream, such as a compression.
    if info.get("transform_descriptors"):
        raise ValueError(
            f"{key} is stored transformed ({str(info['transform_descriptors'])[:100]}), which is"
            " not read"
        )
    if offset + length > location.files().get(file, -1):
        raise CheckpointError(
            f"{location}/{file} is missing or cut short; copy this file again.",
            code="checkpoint.damaged",
        )
    slab = torchzip.load(_Part(location, file, offset, length), f"{file}@{offset}")
    if not isinstance(slab, Slab):
        raise ValueError(f"{key} is not a tensor in {file}")
    return slab


class _Part:
    """A place whose only file, `NAME@OFFSET`, is a range of another file."""

    def __init__(self, location: Place, file: str, offset: int, length: int) -> None:
        self._where, self._file, self._offset, self._length = location, file, offset, length

    def __str__(self) -> str:
        return str(self._where)

    def files(self) -> dict[str, int]:
        return {f"{self._file}@{self._offset}": self._length}

    def stamp(self) -> list[list[Any]]:
        return self._where.stamp()

    def read(self, file: str, start: int, stop: int) -> memoryview:
        if stop > self._length:
            raise CheckpointError(
                f"{self._where}/{file} is cut short: it ends before byte {stop}; copy this file"
                " again.",
                code="checkpoint.damaged",
            )
        return self._where.read(self._file, self._offset + start, self._offset + stop)

    def subfolder(self, folder: str) -> Place:
        return self._where.subfolder(folder)

    def path(self) -> Path | None:
        return self._where.path()
