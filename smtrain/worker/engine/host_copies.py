"""Copies of a device's tensors in host memory, made and written while training continues."""

from __future__ import annotations

import weakref
from threading import Thread

import torch

Files = dict[str, dict[str, torch.Tensor]]
"""The tensors of each file of a checkpoint."""
_ALIGNMENT = 256  # bytes: every dtype, and the transfers of a device


class Copying:
    """The copies of one save while they are made."""

    def __init__(self, sources: Files, copies: Files, device: str) -> None:
        self._copies, self._sources = copies, sources
        self._thread: Thread | None = None
        self._event: torch.cuda.Event | None = None
        self._error: Exception | None = None
        if device == "cpu":
            self._thread = Thread(target=self._copy_all, name="copy for a save", daemon=True)
            self._thread.start()
        elif device == "cuda" and torch.cuda.is_available():
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _copy(sources, copies, non_blocking=True)
            self._event = stream.record_event()
        else:
            _copy(sources, copies)

    def finish_before_change(self) -> None:
        """Wait as long as training may not change the tensors; on CUDA its stream waits, not the
        host.
        """
        if self._thread is not None:
            self._thread.join()
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait(self) -> Files:
        """The copies, once complete. Raises the error of the thread that makes them."""
        if self._thread is not None:
            self._thread.join()
        if self._event is not None:
            self._event.synchronize()
        self._sources = Files()  # until now a stream may have been reading them
        if self._error is not None:
            raise self._error
        return self._copies

    def _copy_all(self) -> None:
        try:
            _copy(self._sources, self._copies)
        # An exception of a thread is lost; `wait` raises it.
        except Exception as error:
            self._error = error


class HostCopies:
    """Copies checkpoints to host memory that stays between saves, as large as this rank's part.

    New memory costs a page fault for every 4 KiB, and on CUDA a second copy by the driver if it is
    not pinned. Copies are made during the next forward and backward pass, which only read the
    tensors (as by Maurya et al. 2024, arXiv 2406.10707): on a CPU by a thread, on CUDA by a
    stream. On other devices, whose streams are unchecked, `begin` makes them.
    """

    def __init__(self, device: str) -> None:
        """`device` is the kind of the tensors' device."""
        self._device, self._memory = device, host_memory(0, device)
        self._reserving: Thread | None = None

    def reserve(self, files: Files) -> None:
        """Reserve the memory of copies of these files in the background, if it must be pinned.

        That took 2.7 s for 5.8 GiB on a machine with an H200, in which its first save let training
        wait.
        """
        if self._device == "cuda":
            size = _size(files)
            self._reserving = Thread(
                target=self._resize, args=(size,), name="reserve for saves", daemon=True
            )
            self._reserving.start()

    def begin(self, files: Files) -> Copying:
        """Begin to copy all tensors; the copies of the save before are gone.

        The tensors may change only after `finish_before_change`.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        self._resize(_size(files))
        copies, at = Files(), 0
        for file, file_tensors in files.items():
            copies[file] = {}
            for name, tensor in file_tensors.items():
                values = self._memory[at : at + tensor.nbytes]
                copies[file][name] = values.view(tensor.dtype).view(tensor.shape)
                # Rounded up, because `view(dtype)` of bytes needs an aligned offset.
                at += _room(tensor)
        return Copying(files, copies, self._device)

    def _resize(self, size: int) -> None:
        if len(self._memory) != size:
            self._memory = host_memory(0, self._device)  # first, or both would be there
            self._memory = host_memory(size, self._device)


def host_memory(size: int, device: str) -> torch.Tensor:
    """Bytes on the host, on CUDA pinned if the driver allows it; else copies are only slower."""
    memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    if device != "cuda" or not torch.cuda.is_available() or not size:
        return memory
    # Registered and not `pin_memory=True`, whose allocator rounds up to a power of two: 16 GiB for
    # 8.3.
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


@torch.no_grad()
def _copy(sources: Files, copies: Files, non_blocking: bool = False) -> None:
    for file, tensors in sources.items():
        for name, tensor in tensors.items():
            copies[file][name].copy_(tensor.detach(), non_blocking=non_blocking)


def _size(files: Files) -> int:
    return sum(_room(tensor) for tensors in files.values() for tensor in tensors.values())


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
