"""What a place that holds weights must answer, whatever its files look like.

A source speaks Hugging Face parameter names (as `model.safetensors` of the family has them) and hands out windows, so
that nobody ever needs a whole model in memory. Hugging Face folders, NxD shards and native checkpoints each are one.
None of them needs torch but for `window` and `read`, which give tensors of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smtrain.core.model.families import ModelShape
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checkpoint.tensor_ranges import Tally

if TYPE_CHECKING:
    import torch


Read = Callable[[str, Callable[[], int | None]], None]
"""(name, what raises `CheckpointError` where the bytes under it are not those written).

Where nobody wrote a checksum of them, it gives their crc32.
"""


class WeightSource(ABC):
    """Weights under Hugging Face names, read lazily."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every parameter, sorted. A tied `lm_head.weight` is not listed."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The whole (unsharded) shape."""

    @abstractmethod
    def dtype(self, name: str) -> DType: ...

    @abstractmethod
    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """The part of the parameter within (start, stop) along every dimension; not to be written to.

        Raises `CheckpointError` where the file is cut short or lacks the name.
        """

    @property
    @abstractmethod
    def where(self) -> Place:
        """The folder or prefix of the files."""

    def stamp(self) -> Any:
        """JSON that changes whenever the source's files do."""
        return self.where.stamp()

    def stored_with(self, name: str) -> tuple[str, ...]:
        """The parameters that are one tensor in the files, in its order, this one among them."""
        return (name,)

    def seams(self, name: str) -> list[int]:
        """Rows at which another file begins: reading across one takes a copy."""
        return []

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises `CheckpointError` where a checksum kept beside the tensor is not that of its bytes.

        What `tally` saw read is not read again.
        """
        return

    @property
    def read_alike(self) -> bool:
        """Whether all tp ranks read the same files of it, each its part of every tensor."""
        return False

    def watch(self, read: Read) -> None:
        """Have `read` told of all that is read from now on: what it is called, and what checks the whole of it."""
        return

    def window(self, name: str, bounds: Bounds) -> torch.Tensor:
        """`bits` as a tensor on the CPU; not to be written to."""
        return dtypes.tensor(self.bits(name, bounds), self.dtype(name))

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The whole tensor, or its rows/columns `start:stop` along `dim`."""
        whole = self.shape(name)
        return self.window(
            name, [(start, n if stop is None else stop) if i == dim else (0, n) for i, n in enumerate(whole)]
        )


class Wrapped(WeightSource):
    """Another source, seen through; a subclass changes what it must."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    @property
    def config(self) -> dict[str, Any]:
        return self._source.config

    def names(self) -> list[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> DType:
        return self._source.dtype(name)

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        return self._source.bits(name, bounds, tally)

    @property
    def where(self) -> Place:
        return self._source.where

    def stamp(self) -> Any:
        return self._source.stamp()

    def stored_with(self, name: str) -> tuple[str, ...]:
        return self._source.stored_with(name)

    def seams(self, name: str) -> list[int]:
        return self._source.seams(name)

    def check(self, name: str, tally: Tally | None = None) -> None:
        self._source.check(name, tally)

    @property
    def read_alike(self) -> bool:
        return self._source.read_alike

    def watch(self, read: Read) -> None:
        self._source.watch(read)


class Cast(Wrapped):
    """Another source's weights in one type, converted as they are read."""

    def __init__(self, source: WeightSource, dtype: DType) -> None:
        super().__init__(source)
        self._dtype = dtype

    def dtype(self, name: str) -> DType:
        return self._dtype

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        return dtypes.cast(self._source.bits(name, bounds, tally), self._source.dtype(name), self._dtype)

    def stamp(self) -> Any:
        return [str(self._dtype), self._source.stamp()]


class Upright(Wrapped):
    """Another source's weights with the outputs of every linear first, as all but GPT-2's Conv1D have them."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._turned = {spec.name for spec in ModelShape.from_config(source.config).specs if spec.turned}

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._source.shape(name)
        return found[::-1] if name in self._turned else found

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        if name in self._turned:
            return self._source.bits(name, bounds[::-1], tally).T
        return self._source.bits(name, bounds, tally)

    def seams(self, name: str) -> list[int]:
        return [] if name in self._turned else self._source.seams(name)
