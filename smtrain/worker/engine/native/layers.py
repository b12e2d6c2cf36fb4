"""Run a stage's layers, with compilation and activation checkpointing."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.saving import local_rank

log = logging.getLogger(__name__)
Forward = Callable[..., Any]


class Stateful(Protocol):
    """A state that changes with each micro-batch."""

    def bind(self, block: Forward) -> Forward:
        """`block` with the state of now, whenever it is called."""
        ...


COMPILE_OPTIONS: dict[str, dict[str, Any]] = {"neuron": {"backend": "neuron", "dynamic": False}}
"""Arguments of torch.compile by device. TorchNeuron refuses graphs of changing shapes."""

GRAPHS = 32
"""Most graphs of one layer's code. Layers of one kind share theirs; a kind has one for training and
one for evaluation, each with and without a mask, and with adapters one more for the first layer,
whose input needs no gradient.
"""


class Layers:
    """Calls a stage's blocks; a module computed again in the backward pass keeps only its
    input.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        mixers: Sequence[Any],
        options: ParallelOptions,
        states: Sequence[Stateful],
        device: str,
    ) -> None:
        """`mixers` are the blocks' modules that look at other tokens."""
        self._states, self._recomputes_blocks = states, options.activation_checkpointing == "full"
        if options.activation_checkpointing == "selective":
            for module in mixers:
                recomputing_forward = self._recompute_in_backward(module.forward)
                # A compiled graph would compute it again with the state of the backward pass's
                # moment.
                disable: Any = torch.compiler.disable
                module.forward = (
                    disable(recomputing_forward)
                    if options.compile and states
                    else recomputing_forward
                )
        self._shapes: set[torch.Size] = set()
        """Shapes of hidden states that are compiled."""
        if options.compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
            for i, block in enumerate(blocks):
                block.forward = self._of_usual_shapes(
                    block.forward, f"layer {i} of this stage", device
                )

    def __call__(self, block: Any, h: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out = (self._recompute_in_backward(block) if self._recomputes_blocks else block)(
            h, **kwargs
        )
        hidden_states: torch.Tensor = (
            out[0] if isinstance(out, tuple) else out
        )  # transformers 4 returns tuples
        return hidden_states

    def _of_usual_shapes(self, forward: Forward, name: str, device: str) -> Forward:
        """Compile a block for the shapes of training, and for the first one if it is evaluated
        before.

        Other shapes, such as the last batch of a validation and an answer that grows by a token,
        run uncompiled: a graph for each costs more than it saves.
        """
        fast = compile_or_fall_back(forward, name, device)

        def run(h: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if h.shape not in self._shapes and (torch.is_grad_enabled() or not self._shapes):
                self._shapes.add(h.shape)
            return (fast if h.shape in self._shapes else forward)(h, *args, **kwargs)

        return run

    def _recompute_in_backward(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # Bound now: the backward pass may run when the states are of a later micro-batch.
            bound_forward = forward
            for state in self._states:
                bound_forward = state.bind(bound_forward)
            # The only random numbers are dropout's, which `Dropout.bind` repeats by their seed.
            return checkpoint(
                bound_forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )

        return run


def compile_or_fall_back(forward: Forward, name: str, device: str) -> Forward:
    """Compile a function at its first call; if the compiler fails on it, say so once and run it as
    it is.
    """
    fast: Forward | None = torch.compile(forward, **COMPILE_OPTIONS.get(device, {}))

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal fast
        if fast is not None:
            try:
                return fast(*args, **kwargs)
            # Only the compiler's errors: running uncompiled would not help an error of the model.
            except torch._dynamo.exc.TorchDynamoException as error:
                fast = None
                reason = textwrap.shorten(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0], 300)
                log.warning("train.compile: %s runs uncompiled: %s", name, reason)
        return forward(*args, **kwargs)

    return run


def compilable(options: ParallelOptions, device: str) -> ParallelOptions:
    """The options, without compilation if no compiler is there, which a log line of each host
    says.
    """
    fault = compiler_fault(device) if options.compile else None
    if fault is None:
        return options
    if local_rank() == 0:
        log.warning("train.compile: the layers run uncompiled: %s", fault)
    return replace(options, compile=False)


def compiler_fault(device: str) -> str | None:
    """Explain why torch.compile cannot work for a kind of device here; None if it can."""
    if device == "cpu":
        compiler = os.environ.get("CXX") or "g++"
        return (
            None
            if shutil.which(compiler)
            else f"torch.compile needs the C++ compiler {compiler}, which is not there"
        )
    if device != "cuda":
        return None  # its own backend reports it
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs triton, which is not installed here"
    compiler = os.environ.get("CC") or "gcc"
    if not any(map(shutil.which, (compiler, "clang"))):
        return f"torch.compile needs the C compiler {compiler}, which is not there"
    return None
