"""Run a stage's layers, with compilation and activation checkpointing."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from smtrain.core.errors import ConfigError
from smtrain.worker.engine.base import ParallelOptions

log = logging.getLogger(__name__)
Forward = Callable[..., Any]


class Stateful(Protocol):
    """A state that changes with each micro-batch."""

    def kept(self, block: Forward) -> Forward:
        """`block` with the state of now, whenever it is called."""
        ...


COMPILED: dict[str, dict[str, Any]] = {"neuron": {"backend": "neuron", "dynamic": False}}
"""Arguments of torch.compile by device. TorchNeuron refuses graphs of changing shapes."""


class Layers:
    """Calls a stage's blocks; a module that is computed again in the backward pass keeps only its input."""

    def __init__(
        self, blocks: Sequence[Any], mixers: Sequence[Any], options: ParallelOptions, states: Sequence[Stateful],
        device: str,
    ) -> None:  # fmt: skip
        """`mixers` are the blocks' modules that look at other tokens."""
        self._states, self._whole = states, options.activation_checkpointing == "full"
        if options.activation_checkpointing == "selective":
            for module in mixers:
                module.forward = self._again(module.forward)
        if options.compile:
            if fault := compiler_fault(device):
                raise ConfigError([f"train.compile: {fault}; set it to false"], code="config.combination")
            # One graph for each kind of layer and length: a limit below that leaves the later ones uncompiled.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
            for i, block in enumerate(blocks):
                block.forward = compiled(block.forward, f"layer {i} of this stage", device)

    def __call__(self, block: Any, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = (self._again(block) if self._whole else block)(h, **kwargs)
        made: torch.Tensor = out[0] if isinstance(out, tuple) else out  # transformers 4 returns tuples
        return made

    def _again(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            again = forward
            for state in self._states:
                again = state.kept(again)
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run


def compiled(forward: Forward, name: str, device: str) -> Forward:
    """Compile a function at its first call; if the compiler fails on it, say so once and run it as it is."""
    fast: Forward | None = torch.compile(forward, **COMPILED.get(device, {}))

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal fast
        if fast is not None:
            try:
                return fast(*args, **kwargs)
            except torch._dynamo.exc.TorchDynamoException as error:
                fast = None
                reason = textwrap.shorten(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0], 300)
                log.warning("train.compile: %s runs uncompiled: %s", name, reason)
        return forward(*args, **kwargs)

    return run


def compiler_fault(device: str) -> str | None:
    """Explain why torch.compile cannot work for a kind of device here; None if it can."""
    if device == "cpu":
        wanted = os.environ.get("CXX") or "g++"
        return None if shutil.which(wanted) else f"torch.compile needs the C++ compiler {wanted}, which is not there"
    if device != "cuda":
        return None  # its own backend reports it
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton, which is not installed here"
    wanted = os.environ.get("CC") or "gcc"
    if not any(map(shutil.which, (wanted, "clang"))):
        return f"torch.compile needs the C compiler {wanted}, which is not there"
    return None
