"""Collectives of tensors on any device, through host memory and gloo: several ranks can share one
GPU, which NCCL refuses.

    through_host.register("cuda")
    dist.init_process_group(through_host.NAME, ...)

It says nothing about NCCL, about speed, or about work that overlaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from smtrain.worker.engine.native import comm

NAME = "through_host"


def register(device: str) -> None:
    """Let the engine use this backend on a kind of device in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=[device])
    comm.BACKENDS[device] = NAME


class _Work:
    """A message or collective; `finish` copies to the device."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work, self._finish = work, finish
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._is_done:
            self._work.wait()
            self._finish()
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        return self._is_done


_ProcessGroup: Any = dist.ProcessGroup  # its stubs name arguments otherwise than its callers do


class Group(_ProcessGroup):  # type: ignore[misc]
    """Gloo over copies in host memory; only messages are asynchronous."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo: Any = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, options.timeout
        )
        self._name = ""

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return _through(lambda host: self._gloo.allreduce(host, options), tensors)

    def reduce(self, tensors: Any, options: Any) -> Any:
        return _through(lambda host: self._gloo.reduce(host, options), tensors)

    def broadcast(self, tensors: Any, options: Any) -> Any:
        return _through(lambda host: self._gloo.broadcast(host, options), tensors)

    def allgather(self, outputs: Any, inputs: Any, options: Any) -> Any:
        host_inputs = _host(inputs)
        (parts,) = outputs
        return _through(lambda host: self._gloo.allgather([host], host_inputs, options), parts)

    def all_gather_single(self, output: Any, own: Any, options: Any) -> Any:
        (host_own,) = _host([own])
        return _through(
            lambda host: self._gloo._allgather_base(host[0], host_own, options), [output]
        )

    def reduce_scatter_single(self, output: Any, whole: Any, options: Any) -> Any:
        (host_whole,) = _host([whole])
        return _through(
            lambda host: self._gloo._reduce_scatter_base(host[0], host_whole, options), [output]
        )

    def all_to_all_single(
        self, output: Any, given: Any, output_sizes: Any, input_sizes: Any, options: Any
    ) -> Any:
        (host_given,) = _host([given])
        return _through(
            lambda host: self._gloo.alltoall_base(
                host[0], host_given, output_sizes, input_sizes, options
            ),
            [output],
        )

    # The names of torch before 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        host = _host(tensors)  # alive as long as the work
        return _Work(self._gloo.send(host, peer, tag), lambda: host.clear())

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        host = _host(tensors)
        return _Work(self._gloo.recv(host, peer, tag), lambda: _copy_back(tensors, host))


def _host(tensors: Any) -> list[torch.Tensor]:
    """Contiguous copies in host memory; waits for the device."""
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def _copy_back(tensors: Any, host: list[torch.Tensor]) -> None:
    for tensor, values in zip(tensors, host, strict=True):
        tensor.copy_(values)


def _through(collective: Callable[[list[torch.Tensor]], Any], tensors: Any) -> _Work:
    """Run a collective on copies of the tensors that it changes; they have its results at once."""
    host = _host(tensors)
    work = _Work(collective(host), lambda: _copy_back(tensors, host))
    work.wait()
    return work


def _group(options: Any, _backend: Any = None) -> Group:
    return Group(options)
