"""Copies of a device's tensors in host memory, which a save writes while training continues."""

from __future__ import annotations

import weakref

import torch

Files = dict[str, dict[str, torch.Tensor]]
"""The tensors of each file of a checkpoint."""
_ALIGNMENT = 256  # bytes: every dtype, and the transfers of a device


class HostCopies:
    """Copies a checkpoint to the host, on CUDA to pinned memory that stays between saves.

    Training waits for the copy. New memory, if not pinned, costs a fault for each page and a
    second copy by the driver. The memory is as large as what this rank saves; other devices get new
    memory, free again after each save.
    """

    def __init__(self, device: str) -> None:
        """`device` is the kind of the tensors' device."""
        self._stays, self._memory = device == "cuda", torch.empty(0, dtype=torch.uint8)

    def of(self, files: Files) -> Files:
        """Copies of all tensors, complete on return; the copies of the save before are gone."""
        if not self._stays:
            return {
                file: {
                    name: tensor.detach().to("cpu", copy=True)
                    for name, tensor in file_tensors.items()
                }
                for file, file_tensors in files.items()
            }
        self._reserve(
            sum(
                _room(tensor) for file_tensors in files.values() for tensor in file_tensors.values()
            )
        )
        copies, at = Files(), 0
        for file, file_tensors in files.items():
            copies[file] = {}
            for name, tensor in file_tensors.items():
                copy = self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[file][name] = copy.copy_(tensor.detach(), non_blocking=True)
                # Rounded up, because `view(dtype)` of bytes needs an aligned offset.
                at += _room(tensor)
        if torch.accelerator.is_available():
            # The copies are only queued so far, and training changes the tensors after return.
            torch.accelerator.current_stream().synchronize()
        return copies

    def _reserve(self, size: int) -> None:
        if len(self._memory) != size:
            del self._memory  # first, or both would be there
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            _pin(self._memory)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pin(memory: torch.Tensor) -> None:
    """Pin host memory, if the driver allows it; else copies are only slower.

    Registered and not `pin_memory=True`, whose allocator rounds up to a power of two: 16 GiB for
    8.3.
    """
    if not torch.cuda.is_available() or not len(memory):
        return
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
