"""Megatron-core's `torch_dist` checkpoints: torch's distributed format, whose tensors are of the whole model.

`.metadata` says where the chunks of every tensor lie in the `.distcp` files, each of which is a stream of torch.save.
Layers are stacked along a first dimension or stand for themselves; both are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.families import ModelShape
from smtrain.worker.checkpoint.block_source import PieceSource, TensorBlock
from smtrain.worker.checkpoint.conversion_manifest import read_manifest
from smtrain.worker.checkpoint.dtypes import DType
from smtrain.worker.checkpoint.megatron.names import EMBEDDING, HEAD, Fused, canonical, head, ignored, table
from smtrain.worker.checkpoint.storage import Place, read_text
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Opaque, unpickle

METADATA, SAID = ".metadata", "metadata.json"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias))_([wv])")
_OURS = ("embedding.", "decoder.", "output_layer.", "encoder.")
_LIMIT = 1 << 30


def backend(where: Place) -> str | None:
    """What metadata.json names; None where there is none."""
    if SAID not in where.files():
        return None
    try:
        said = json.loads(read_text(where, SAID))
    except (ValueError, RecursionError):
        return None
    found = said.get("sharded_backend") if isinstance(said, dict) else None
    return found if isinstance(found, str) else None


class TorchDistSource(PieceSource):
    """A `torch_dist` checkpoint as a `WeightSource`.

    `folder` is that of one iteration below `where`, "" for `where` itself. Raises CheckpointError where a file is
    missing, cut short or none of the format, or does not fit the config.
    """

    def __init__(self, where: Place, folder: str, config: dict[str, Any]) -> None:
        at = where.below(folder) if folder else where
        _vouched(where, at, folder)
        self.folder = folder
        shape = ModelShape.from_config(config)
        fused = {f.key: f for f in (*table(shape), head(shape))}
        blocks: dict[str, list[TensorBlock]] = {}
        for key, size, chunks in _tensors(at):
            if ignored(key) or not key.startswith(_OURS):
                continue
            for name, layer, shift in _names(canonical(key), size, shape):
                if name not in fused:
                    raise CheckpointError(
                        f"{at} holds {key[:200]}, which is "
                        + ("of a mixture of experts, which smtrain does not read yet." if "expert" in key else
                           f"no parameter of a {shape.family} model as its config.json describes it.")
                    )  # fmt: skip
                _check(at, fused[name], key, size if layer is None else size[1:], shift)
                blocks.setdefault(name, []).extend(_blocks(fused[name], chunks, layer, shift))
        twins = blocks.pop(HEAD, None) if shape.tied else None
        super().__init__(where, config, table(shape), blocks, twins)


def _vouched(where: Place, at: Place, folder: str) -> None:
    """Raises CheckpointError where a manifest of ours says that `.metadata` is another."""
    about = read_manifest(where).get("files", {}).get(f"{folder}/{METADATA}", {})
    size = at.files().get(METADATA, 0)
    if "sha256" in about and hashlib.sha256(at.read(METADATA, 0, size)).hexdigest() != about["sha256"]:
        raise CheckpointError(
            f"{at}/{METADATA} is not what was written; convert the model again.", code="checkpoint.damaged"
        )


@dataclass(frozen=True)
class _Chunk:
    offsets: tuple[int, ...]
    slab: Slab


def _names(key: str, size: tuple[int, ...], shape: ModelShape) -> Iterator[tuple[str, int | None, int]]:
    """(name in the whole model, which layer of a stack, how many rows further down it begins)."""
    shift = 0
    if half := _HALF.fullmatch(key):
        key, shift = half[1], shape.intermediate if half[2] == "v" else 0
    if (found := _STACKED.fullmatch(key)) and size:
        if size[0] != shape.layers:
            raise CheckpointError(
                f"{key[:200]} is of {size[0]} layers, config.json of {shape.layers}; take this model's."
            )
        yield from ((f"decoder.layers.{layer}.{found[1]}", layer, shift) for layer in range(size[0]))
    else:
        yield key, None, shift


def _check(where: Place, fused: Fused, key: str, size: tuple[int, ...], shift: int) -> None:
    wanted = fused.shape if not _HALF.fullmatch(key) else (fused.shape[0] // 2, *fused.shape[1:])
    vocabulary = fused.key in (EMBEDDING, HEAD) and len(size) == 2 and size[0] >= wanted[0] and size[1:] == wanted[1:]
    if size != wanted and not vocabulary:
        raise CheckpointError(
            f"{where}: {key[:200]} has shape {list(size)} where config.json asks for {list(wanted)}; the two are not "
            "of one model."
        )


def _blocks(fused: Fused, chunks: list[_Chunk], layer: int | None, shift: int) -> Iterator[TensorBlock]:
    for chunk in chunks:
        slab, offsets = chunk.slab, chunk.offsets
        if layer is not None:
            if not offsets[0] <= layer < offsets[0] + slab.shape[0]:
                continue
            skipped = (layer - offsets[0]) * slab.strides[0] * slab.dtype.itemsize
            whole = slab.crc32 if slab.shape[0] == 1 else None
            slab = replace(
                slab, offset=slab.offset + skipped, shape=slab.shape[1:], strides=slab.strides[1:], crc32=whole
            )
            offsets = offsets[1:]
        spans = tuple((a, a + n) for a, n in zip(offsets, slab.shape, strict=True))
        spans = ((spans[0][0] + shift, spans[0][1] + shift), *spans[1:])
        block = TensorBlock(spans, slab, (0,) * len(spans)).within([(0, n) for n in fused.shape])
        if block is not None:
            yield block


def _tensors(where: Place) -> Iterator[tuple[str, tuple[int, ...], list[_Chunk]]]:
    """(key, shape, chunks) of every tensor. Raises CheckpointError where `.metadata` is not what torch writes."""
    try:
        yield from _read(where)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle leads to whatever it likes
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{where}/{METADATA} is not what torch writes ({reason}); copy this file again."
        ) from None


def _read(where: Place) -> Iterator[tuple[str, tuple[int, ...], list[_Chunk]]]:
    size = where.files().get(METADATA)
    if size is None or size > _LIMIT:
        raise CheckpointError(f"{where} has no {METADATA}; copy this file into it.")

    def stored(key: str, dtype: DType, numel: int) -> Slab:
        raise ValueError("it holds tensors itself")

    top = _state(unpickle(bytes(where.read(METADATA, 0, size)), stored, lenient=True), "Metadata")
    found: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for index, info in top["storage_data"].items():
        at = _state(index, "MetadataIndex")
        found[at["fqn"], at.get("offset")] = _state(info, "_StorageInfo")
    for key, about in top["state_dict_metadata"].items():
        if not isinstance(about, Opaque) or not about.name.endswith("TensorStorageMetadata"):
            continue
        if ignored(key) or not key.startswith(_OURS):
            continue
        state = _state(about, "TensorStorageMetadata")
        chunks = []
        for chunk in state["chunks"]:
            part = _state(chunk, "ChunkStorageMetadata")
            if (key, part["offsets"]) not in found:
                raise ValueError(f"{key} lacks the chunk at {part['offsets']}")
            slab = _slab(where, key, found[key, part["offsets"]])
            if slab.shape != part["sizes"]:
                raise ValueError(f"a chunk of {key} has shape {list(slab.shape)} instead of {list(part['sizes'])}")
            chunks.append(_Chunk(_numbers(part["offsets"]), slab))
        yield key, _numbers(state["size"]), chunks


def _state(found: Any, kind: str) -> dict[str, Any]:
    if not isinstance(found, Opaque) or not found.name.endswith(f".{kind}") or not isinstance(found.state, dict):
        raise ValueError(f"it has no {kind} where one belongs")
    return found.state


def _numbers(found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple) or not all(type(n) is int and n >= 0 for n in found):
        raise ValueError("it has something else where a shape belongs")
    return found


def _slab(where: Place, key: str, info: dict[str, Any]) -> Slab:
    file, (offset, length) = info["relative_path"], _numbers((info["offset"], info["length"]))
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"it points {key} to {str(file)[:100]!r}, which is not a file of its own folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{key} is stored transformed ({str(info['transform_descriptors'])[:100]}), which is not read")
    if offset + length > where.files().get(file, -1):
        raise CheckpointError(
            f"{where}/{file} is missing or cut short; copy this file again.", code="checkpoint.damaged"
        )
    slab = torchzip.load(_Part(where, file, offset, length), f"{file}@{offset}")
    if not isinstance(slab, Slab):
        raise ValueError(f"{key} is not a tensor in {file}")
    return slab


class _Part:
    """A range of a file as a file of its own, `NAME@OFFSET`."""

    def __init__(self, where: Place, file: str, offset: int, length: int) -> None:
        self._where, self._file, self._offset, self._length = where, file, offset, length

    def __str__(self) -> str:
        return str(self._where)

    def files(self) -> dict[str, int]:
        return {f"{self._file}@{self._offset}": self._length}

    def stamp(self) -> list[list[Any]]:
        return self._where.stamp()

    def read(self, file: str, start: int, stop: int) -> memoryview:
        if stop > self._length:
            raise CheckpointError(
                f"{self._where}/{file} is cut short: it ends before byte {stop}; copy this file again.",
                code="checkpoint.damaged",
            )
        return self._where.read(self._file, self._offset + start, self._offset + stop)

    def below(self, folder: str) -> Place:
        return self._where.below(folder)

    def path(self) -> Path | None:
        return self._where.path()
