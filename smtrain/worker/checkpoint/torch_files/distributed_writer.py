"""Lay out torch.distributed.checkpoint's folders: `.metadata` and `.distcp` files of whole or cut
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smtrain.worker.checkpoint.tensor_files import Job, Tensor, TensorFile, Write
from smtrain.worker.checkpoint.torch_files import zip_writer
from smtrain.worker.checkpoint.torch_files.pickling import Called, Name, New, dumps

_FILE = 1 << 30  # bytes of one .distcp file at least, so that several are written at a time
_MODULE = "torch.distributed.checkpoint.metadata"
Location = tuple[str, int, int]
"""File, offset, length."""


@dataclass(frozen=True)
class WrittenChunk:
    """A part of a stored tensor."""

    name: str
    """Its name among the parts of all files."""
    key: str
    """The stored tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor
    """The stored tensor's type and shape."""


Places = dict[str, Location]
"""Chunk -> its place."""


def lay_out_files(
    chunks: Sequence[WrittenChunk], folder: str = ""
) -> tuple[list[TensorFile], list[list[Job]], Places]:
    """Lay out files of at least `_FILE` bytes, in which each chunk is a stream of torch.save.

    `folder` is "" or ends in a slash; places are relative to it.
    """
    files: list[list[WrittenChunk]] = [[]]
    size = 0
    for chunk in chunks:
        if size >= _FILE:
            files.append([])
            size = 0
        files[-1].append(chunk)
        size += Tensor(chunk.tensor.dtype, chunk.sizes).size
    containers: list[TensorFile] = []
    groups: list[list[Job]] = []
    places: Places = {}
    streams: dict[Tensor, zip_writer.TensorStream] = {}  # of thousands of experts, a few differ
    for number, members in enumerate(files):
        # torch's FileSystemWriter: __RANK_NUMBER.distcp.
        file = f"__{number}_0.distcp"
        offsets: dict[str, int] = {}
        fixed_blocks: list[tuple[int, bytes]] = []
        ends = {}
        at = 0
        for chunk in members:
            tensor = Tensor(chunk.tensor.dtype, chunk.sizes)
            stream = streams[tensor] = streams.get(tensor) or zip_writer.TensorStream(
                "archive", tensor
            )
            fixed_blocks.append((at, stream.head))
            offsets[chunk.name] = at + len(stream.head)
            ends[chunk.name] = stream
            places[chunk.name] = (file, at, stream.size)
            at += stream.size
        container = TensorFile(f"{folder}{file}", offsets, at, fixed_blocks, partial(_end, ends))
        containers.append(container)
        groups.append([(Write(chunk.name, (chunk.name,), (container,)),) for chunk in members])
    return containers, groups, places


def _end(ends: dict[str, zip_writer.TensorStream], name: str, crc32: int, _size: int) -> bytes:
    return ends[name].tail(crc32)


def metadata_of(
    chunks: Sequence[WrittenChunk],
    places: Mapping[str, Location],
    objects: Mapping[str, Location],
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> bytes:
    """The `.metadata` file that torch.distributed.checkpoint.FileSystemReader reads.

    `objects` are values that are no tensors. `paths` leads to each key in the nested dict that was
    saved; without, readers that know no keys build a flat one.
    """

    def size(numbers: tuple[int, ...]) -> Called:
        return Called(Name("torch", "Size"), (numbers,))

    def index(key: str, offsets: tuple[int, ...] | None) -> New:
        location = None if offsets is None else size(offsets)
        # `index` is only a hint for look-ups and not part of equality (torch's MetadataIndex).
        return New(Name(_MODULE, "MetadataIndex"), {"fqn": key, "offset": location, "index": None})

    def info(file: str, offset: int, length: int) -> New:
        kind = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
        return New(kind, {"relative_path": file, "offset": offset, "length": length})

    # torch pickles a layout as this call (copyreg in torch/serialization.py).
    strided_layout = Called(Name("torch.serialization", "_get_layout"), ("torch.strided",))
    # 0 is TORCH_CONTIGUOUS_FORMAT.
    contiguous = Called(Name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    tensors: dict[str, Any] = {}
    by_key: dict[str, list[WrittenChunk]] = {}
    for chunk in chunks:
        by_key.setdefault(chunk.key, []).append(chunk)
    for key, members in by_key.items():
        dtype = Name("torch", members[0].tensor.dtype.name)
        kind = Name(_MODULE, "ChunkStorageMetadata")
        parts = [New(kind, {"offsets": size(c.offsets), "sizes": size(c.sizes)}) for c in members]
        # A tuple in the order of __getstate__: dtype, layout, requires_grad, format, pin_memory.
        properties = New(
            Name(_MODULE, "TensorProperties"), (dtype, strided_layout, False, contiguous, False)
        )
        tensor_metadata = {
            "properties": properties,
            "size": size(members[0].tensor.shape),
            "chunks": parts,
        }
        tensors[key] = New(Name(_MODULE, "TensorStorageMetadata"), tensor_metadata)
    storage_data = {index(c.key, c.offsets): info(*places[c.name]) for c in chunks}
    for key, place in objects.items():
        tensors[key] = New(Name(_MODULE, "BytesStorageMetadata"), {})
        storage_data[index(key, None)] = info(*place)
    top = {
        "state_dict_metadata": tensors,
        "planner_data": None if paths is None else dict(paths),
        "storage_data": storage_data,
        "storage_meta": None,
    }
    return dumps(New(Name(_MODULE, "Metadata"), top))
