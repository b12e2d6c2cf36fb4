"""Sum the gradients of a step over its micro-batches in one flat fp32 buffer.

Linears and embeddings write the first product of a step straight into it and add the later ones. Gradients that torch
accumulates itself (norms, biases, tied and cut embeddings, adapters) are added to zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from smtrain.core.model.layout import FlatTable, Layout
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.linears import Sink

if TYPE_CHECKING:
    from smtrain.worker.engine.native.stage import Stage


class Gradients:
    """The gradients of a stage's trained parameters."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        trained = stage.trained
        self.flat = torch.zeros(len(trained.flat), dtype=torch.float32, device=device)
        self.of: dict[str, torch.Tensor] = {}
        """Views of `flat` by the parameter's name."""
        self._parameters = trained.parameters
        self._writing = stage.writing
        self._written: set[str] = set()
        self._then: dict[str, Callable[[], None]] = {}
        self._zeroed: list[tuple[int, int]] = []
        """The ranges that no module writes, also after the last parameter: a step that overflows leaves NaN there."""
        written = 0
        for name, at, size in trained.table.entries:
            parameter = trained.parameters[name]
            view = self.of[name] = self.flat[at : at + size].view_as(parameter)
            if name in self._writing:
                self._writing[name].sink = self._sink(name, view)
                self._zeroed.append((written, at))
                written = at + size
            elif parameter.requires_grad:
                _accumulate(parameter, view)
        self._zeroed = [span for span in (*self._zeroed, (written, len(self.flat))) if span[0] < span[1]]

    def expected(self, name: str) -> bool:
        """Whether a parameter has a gradient; it is 0 for stored numbers that are not trained."""
        return self._parameters[name].requires_grad

    def when_added(self, name: str, then: Callable[[], None]) -> None:
        """Call `then` whenever a micro-batch's gradient of a parameter has been added."""
        if name in self._writing:
            self._then[name] = then
        else:
            self._parameters[name].register_post_accumulate_grad_hook(lambda _: then())  # type: ignore[no-untyped-call]

    def complete(self) -> None:
        """After the last backward pass: set gradients that it never reached to 0."""
        for name in self._writing.keys() - self._written:
            self.of[name].zero_()

    def begin(self) -> None:
        """Prepare for the first backward pass of the next step."""
        self._written.clear()
        for start, stop in self._zeroed:
            self.flat[start:stop].zero_()

    def _sink(self, name: str, view: torch.Tensor) -> Sink:
        def add(gradient: Callable[[torch.Tensor | None], torch.Tensor]) -> None:
            if name in self._written:
                view.add_(gradient(None))
            elif self._parameters[name].dtype == view.dtype:
                gradient(view)
            else:
                view.copy_(gradient(None))
            self._written.add(name)
            if name in self._then:
                self._then[name]()

        return add


def _accumulate(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Make torch add a parameter's gradients to `view`."""
    if parameter.dtype == view.dtype:
        parameter.grad = view
        return

    def add(p: torch.Tensor) -> None:
        view.add_(p.grad)  # type: ignore[arg-type]
        p.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Trained:
    """The parameters of a stage that the optimizer updates: the model's, or its adapters'."""

    layout: Layout
    table: FlatTable
    flat: torch.Tensor
    """All of them in one buffer, padded to equal parts for the data-parallel ranks."""
    parameters: dict[str, nn.Parameter]
    """By name; views of `flat`."""


def flat_parameters(
    layout: Layout, table: FlatTable, mesh: ProcessMesh, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, nn.Parameter]]:
    """Make a buffer of zeros, padded to equal parts for the data-parallel ranks, and this rank's parameters in it."""
    padded = -(-table.size // mesh.shards) * mesh.shards
    flat = torch.zeros(padded, dtype=dtype, device=mesh.device)
    made = {
        name: nn.Parameter(flat[at : at + size].view(layout.local_shape(name, mesh.tp_rank)))
        for name, at, size in table.entries
    }
    return flat, made
