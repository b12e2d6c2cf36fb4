"""Streams of torch.save that stand within a file of others, as in `.distcp` files, or whole in memory."""

from __future__ import annotations

from smtrain.worker.checkpoint.tensor_files import Tensor
from smtrain.worker.checkpoint.torch_files import zip_writer as torchzip_writer


class Alone:
    """A stream of torch.save with one tensor: what stands before and after its numbers, and the length of all."""

    def __init__(self, stem: str, tensor: Tensor) -> None:
        whole = torchzip_writer.container(
            f"{stem}.pt", {"": tensor}, b"\x80\x02" + torchzip_writer.pickle_tensor(0, tensor) + b"."
        )
        self.head = b"".join(data for _, data in whole.fixed)
        self._whole, self._size = whole, tensor.size
        self.size = len(self.head) + tensor.size + len(self.tail(0))

    def tail(self, crc32: int) -> bytes:
        assert self._whole.tail is not None
        return torchzip_writer.descriptor(crc32, self._size) + self._whole.tail({"": crc32})


def alone(stem: str, pickled: bytes) -> bytes:
    """A file of torch.save with an object that has no tensors."""
    whole = torchzip_writer.container(f"{stem}.pt", {}, pickled)
    assert whole.tail is not None
    return b"".join(data for _, data in whole.fixed) + whole.tail({})
