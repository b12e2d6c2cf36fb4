"""A planner of torch.distributed.checkpoint for chunks whose place in their tensors is known."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

KeyPath = tuple[str | int, ...]
"""The keys that lead to a value in a nested state dict; joined by dots, its key in the folder."""


@dataclass(frozen=True)
class TensorChunk:
    """The place of a part of a tensor."""

    path: KeyPath
    offsets: tuple[int, ...]
    """Its first element along every dimension of the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def key(self) -> str:
        return ".".join(map(str, self.path))


class ChunkPlanner(DefaultSavePlanner):
    """Plans the chunks and other values of one rank; equal chunks of several ranks are written
    once.
    """

    def __init__(
        self,
        chunks: Mapping[str, TensorChunk],
        tensors: Mapping[str, torch.Tensor],
        objects: Mapping[KeyPath, Any],
    ) -> None:
        """Tensors go by the names of their chunks."""
        super().__init__()
        self._chunks, self._tensors, self._objects = chunks, tensors, objects
        self._data: dict[MetadataIndex, Any] = {}

    def create_local_plan(self) -> SavePlan:
        items, self._data, paths = list[WriteItem](), {}, dict[str, KeyPath]()
        for name, chunk in self._chunks.items():
            tensor = self._tensors[name]
            index = MetadataIndex(chunk.key, torch.Size(chunk.offsets))
            place = ChunkStorageMetadata(torch.Size(chunk.offsets), tensor.shape)
            properties = TensorProperties.create_from_tensor(tensor)
            data = TensorWriteData(place, properties, torch.Size(chunk.shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._data[index], paths[chunk.key] = tensor, chunk.path
        for path, value in self._objects.items():
            index = MetadataIndex(".".join(map(str, path)))
            items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self._data[index], paths[index.fqn] = value, path
        self.plan = SavePlan(items, planner_data=paths)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._data[write_item.index]
        if write_item.type != WriteItemType.BYTE_IO:
            tensor: torch.Tensor = value
            return tensor
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream
