"""Read torch.distributed.checkpoint's folders: `.metadata` locates the chunks of every tensor.

The chunks lie in the `.distcp` files, each as a stream of torch.save. Nothing in the pickle is
called (unpickle.py), and torch is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.dtypes import DType
from smtrain.worker.checkpoint.storage import Place
from smtrain.worker.checkpoint.tensor_ranges import Slab
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from smtrain.worker.checkpoint.torch_files.unpickle import Opaque, unpickle

METADATA = ".metadata"
_LIMIT = 1 << 30


@dataclass(frozen=True)
class StoredChunk:
    """A part of a tensor in a file."""

    offsets: tuple[int, ...]
    """Its first element in the tensor, along every dimension."""
    slab: Slab


class DistributedIndex:
    """The content of `.metadata`.

    Raises CheckpointError if it is missing or damaged, and later if a file of a tensor is.
    """

    def __init__(self, location: Place) -> None:
        self._place = location
        size = location.files().get(METADATA)
        if size is None or size > _LIMIT:
            raise CheckpointError(
                f"{location} has no {METADATA}; copy this file into it.", code="checkpoint.damaged"
            )
        self.sizes: dict[str, tuple[int, ...]] = {}
        """Key -> shape, of every tensor."""
        self.objects: set[str] = set()
        """Keys of all other values."""
        self._chunks: dict[str, list[tuple[Any, Any]]] = {}
        self._storage: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
        try:
            self._parse(bytes(location.read(METADATA, 0, size)))
        except Exception as error:  # a damaged pickle leads to whatever it likes
            raise self._not_of_torch(error) from None

    def chunks(self, key: str) -> list[StoredChunk]:
        """The chunks of a tensor; opens the head of each."""
        try:
            return [self._chunk(key, offsets, sizes) for offsets, sizes in self._chunks[key]]
        except CheckpointError:
            raise
        except Exception as error:
            raise self._not_of_torch(error) from None

    def value(self, key: str) -> Any:
        """Read a value other than a tensor: numbers, text, lists and dicts of them."""
        try:
            return _stream(self._place, key, self._storage[key, None])
        except CheckpointError:
            raise
        except Exception as error:
            raise self._not_of_torch(error) from None

    def _parse(self, data: bytes) -> None:
        top = _state(unpickle(data, _no_tensor, lenient=True), "Metadata")
        for index, info in top["storage_data"].items():
            at = _state(index, "MetadataIndex")
            self._storage[at["fqn"], at.get("offset")] = _state(info, "_StorageInfo")
        for key, entry in top["state_dict_metadata"].items():
            # BytesStorageMetadata: objects, no tensors.
            if not isinstance(entry, Opaque) or not entry.name.endswith("TensorStorageMetadata"):
                self.objects.add(key)
                continue
            state = _state(entry, "TensorStorageMetadata")
            self.sizes[key] = _numbers(state["size"])
            parts = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
            self._chunks[key] = [(part["offsets"], part["sizes"]) for part in parts]

    def _chunk(self, key: str, offsets: Any, sizes: Any) -> StoredChunk:
        if (key, offsets) not in self._storage:
            raise ValueError(f"{key} lacks the chunk at {offsets}")
        slab = _stream(self._place, key, self._storage[key, offsets])
        if not isinstance(slab, Slab):
            raise ValueError(f"{key} is not a tensor in its file")
        if slab.shape != sizes:
            raise ValueError(
                f"a chunk of {key} has shape {list(slab.shape)} instead of {list(sizes)}"
            )
        return StoredChunk(_numbers(offsets), slab)

    def _not_of_torch(self, error: Exception) -> CheckpointError:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        return CheckpointError(
            f"{self._place}/{METADATA} is not what torch writes ({reason}); copy this file again.",
            code="checkpoint.damaged",
        )


def _no_tensor(key: str, dtype: DType, numel: int) -> Slab:
    raise ValueError("it holds tensors itself")


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


def _stream(location: Place, key: str, info: dict[str, Any]) -> Any:
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
    return torchzip.load(_Part(location, file, offset, length), f"{file}@{offset}")


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
