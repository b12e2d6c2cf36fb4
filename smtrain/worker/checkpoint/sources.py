"""The interface of all sources of weights, whatever their files look like.

A source uses Hugging Face parameter names (as in `model.safetensors` of the family) and reads
windows, so that a whole model never has to be in memory. Only `window` and `read`, which return
tensors, need torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smtrain.core.model.blocks import keeps_fp32
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import Bits, DType
from smtrain.worker.checkpoint.storage import Bounds, Place
from smtrain.worker.checkpoint.tensor_ranges import Tally

if TYPE_CHECKING:
    import torch


ReadCallback = Callable[[str, Callable[[], int | None]], None]
"""(name, check): `check` raises `CheckpointError` if the bytes under the name are not those
written.

If no checksum was written, `check` returns their crc32 instead.
"""


class WeightSource(ABC):
    """Weights under Hugging Face names, read lazily."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The model's `config.json`."""

    @abstractmethod
    def names(self) -> list[str]:
        """All parameters, sorted, without a tied `lm_head.weight`."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The whole (unsharded) shape."""

    @abstractmethod
    def dtype(self, name: str) -> DType: ...

    @abstractmethod
    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        """Read the part within (start, stop) along every dimension; read-only.

        Raises `CheckpointError` if the file is cut short or lacks the name.
        """

    @property
    @abstractmethod
    def location(self) -> Place:
        """The folder or prefix of the files."""

    @property
    def has_extended_rope(self) -> bool:
        """Whether a run gave the model other rotary embeddings (model.rope), which only its own
        `config` has.
        """
        return False

    def stamp(self) -> Any:
        """JSON that changes whenever the source's files do."""
        return self.location.stamp()

    def stored_with(self, name: str) -> tuple[str, ...]:
        """The parameters that share one tensor in the files with this one, in order, itself
        included.
        """
        return (name,)

    def seams(self, name: str) -> list[int]:
        """Rows at which another file begins; reading across one takes a copy."""
        return []

    def check(self, name: str, tally: Tally | None = None) -> None:
        """Raises `CheckpointError` if the tensor's bytes do not match its checksum; `tally` saves a
        second read.
        """
        return

    @property
    def read_alike(self) -> bool:
        """Whether all tp ranks read the same files, each its part of every tensor."""
        return False

    def watch(self, read: ReadCallback) -> None:
        """Call `read` for everything read from now on."""
        return

    def window(self, name: str, bounds: Bounds) -> torch.Tensor:
        """`bits` as a tensor on the CPU; read-only."""
        return dtypes.tensor(self.bits(name, bounds), self.dtype(name))

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """Read the whole tensor, or `start:stop` along `dim`."""
        shape = self.shape(name)
        return self.window(
            name,
            [
                (start, n if stop is None else stop) if i == dim else (0, n)
                for i, n in enumerate(shape)
            ],
        )


def precisions_of(source: WeightSource) -> set[DType]:
    """The types of a source's weights, without those that are fp32 in every precision."""
    return {source.dtype(name) for name in source.names() if not keeps_fp32(name)}


# `window` and `read` are not passed on: the base class makes them of `bits` and `dtype`, which
# subclasses change.
class WrappedSource(WeightSource):
    """A source that passes everything on to another; subclasses change some of it."""

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
    def location(self) -> Place:
        return self._source.location

    @property
    def has_extended_rope(self) -> bool:
        return self._source.has_extended_rope

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

    def watch(self, read: ReadCallback) -> None:
        self._source.watch(read)


class Cast(WrappedSource):
    """Another source's weights, converted to one type as they are read; biases of routers to fp32."""

    def __init__(self, source: WeightSource, dtype: DType) -> None:
        super().__init__(source)
        self._dtype = dtype

    def dtype(self, name: str) -> DType:
        return dtypes.FP32 if keeps_fp32(name) else self._dtype

    def bits(self, name: str, bounds: Bounds, tally: Tally | None = None) -> Bits:
        return dtypes.cast(
            self._source.bits(name, bounds, tally), self._source.dtype(name), self.dtype(name)
        )

    def stamp(self) -> Any:
        # The type is part of the stamp: a journal of a conversion to another type is of other work.
        return [str(self._dtype), self._source.stamp()]
