"""Explain an out-of-memory error: requested, free, and the setting to change."""

from __future__ import annotations

import os
import re

from smtrain.core.config import JobConfig
from smtrain.core.machine import memory_here

GIB = 2**30
_SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB|TiB|PiB)"
_REQUEST = re.compile(rf"(?:[Tt]ried to allocate|Unable to allocate|requested|asked for) {_SIZE}")
# TorchNeuron raises a RuntimeError, often at an operator that needs little itself (beta users,
# 2026-06).
_NEURON = re.compile(r"NRT_RESOURCE|Neuron OOM")
_NEURON_REQUESTED = re.compile(r"requested_size\W+(\d+)")
_DEVICE = re.compile(rf"(\w+ \d+) has a total capacity of {_SIZE} of which {_SIZE} is free")
_MEMORY_ERROR = re.compile(r"out of memory|can't allocate memory|Unable to allocate", re.I)


def memory_sentence(error: BaseException, config: JobConfig) -> str | None:
    """Explain an out-of-memory error of device or host; None for other errors."""
    text = str(error)
    of_neuron = isinstance(error, RuntimeError) and _NEURON.search(text) is not None
    of_device = type(error).__name__ == "OutOfMemoryError" or of_neuron
    if not (
        of_device
        or isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError) and _MEMORY_ERROR.search(text))
    ):
        return None
    request_text = "more was asked for than there is"
    if request := _REQUEST.search(text):
        request_text = f"{_gib(*request.groups())} GiB were asked for"
    elif in_bytes := _NEURON_REQUESTED.search(text):
        request_text = f"{_gib(in_bytes[1], 'bytes')} GiB were asked for"
    if device := _DEVICE.search(text):
        name, total, unit, free, free_unit = device.groups()
        free_text = f"{_gib(free, free_unit)} of {_gib(total, unit)} GiB were free on {name}"
    else:
        free_here = memory_here()
        free_text = "nothing says how much was free"
        if not of_device and free_here is not None:
            free_text = f"{free_here / GIB:.2f} GiB were free on the host"
    return (
        f"out of memory: {request_text}, and {free_text};"
        f" {_advice(config, of_device or device is not None)}"
    )


def _gib(number: str, unit: str) -> str:
    return f"{float(number) * _SIZES[unit] / GIB:,.2f}"


def _advice(config: JobConfig, of_device: bool) -> str:
    """Settings that need less memory; those that change the run least come first."""
    if "RANK" not in os.environ:
        return "take a machine with more memory (compute.cpu_instance_type)"
    parallel, ways = config.parallel, []
    if not of_device:
        return (
            "take a machine with more memory, or fewer processes on one (`smtrain plan` says what a"
            " host needs)"
        )
    if parallel.activation_checkpointing == "none":
        ways.append("set parallel.activation_checkpointing: full")
    if parallel.micro_batch_size > 1:
        ways.append(f"lower parallel.micro_batch_size (now {parallel.micro_batch_size})")
    long = config.train.engine == "native" and config.train.seq_len >= 1 << 14
    ways.append(f"raise parallel.tp{', parallel.cp' if long else ''} or parallel.pp")
    return f"{', or '.join(ways)}; `smtrain plan CONFIG --best` names a mesh that fits"
