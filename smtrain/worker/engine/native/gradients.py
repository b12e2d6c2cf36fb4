"""Sum the gradients of a step over its micro-batches in one flat fp32 buffer.

Linears, embeddings and experts write the first product of a step straight into it and add the later
ones. Gradients that torch accumulates itself (norms, biases, routers, tied and cut embeddings,
adapters) are added to zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from smtrain.core.model.layout import FlatTable, Layout
from smtrain.worker.engine.native.comm import ReplicaGroup
from smtrain.worker.engine.native.linears import Sink, add_product


class Writing(Protocol):
    """A module that can write its weight's gradient into a `sink`."""

    sink: Sink | None


class Gradients:
    """The gradients of trained parameters."""

    def __init__(
        self, flat_parameters: FlatParameters, writing: Mapping[str, Writing], device: torch.device
    ) -> None:
        self.flat = torch.zeros(len(flat_parameters.flat), dtype=torch.float32, device=device)
        self.of: dict[str, torch.Tensor] = {}
        """Views of `flat` by the parameter's name."""
        self._trained = flat_parameters
        self._writing = {
            name: writing[name] for name in flat_parameters.parameters if name in writing
        }
        self._written_names: set[str] = set()
        self._callbacks: dict[str, list[Callable[[], None]]] = {}
        self._leaves: dict[str, torch.Tensor] = {}
        """Views of `flat` in the shapes of the model's parameters, by the first name of each."""
        zero_ranges, written_end = list[tuple[int, int]](), 0
        for name, at, size in flat_parameters.table.entries:
            leaf = flat_parameters.leaf(name)
            self.of[name] = self.flat[at : at + size].view_as(flat_parameters.parameters[name])
            if flat_parameters.first_name(name) != name:
                continue
            view = self._leaves[name] = self.flat[at : at + leaf.numel()].view_as(leaf)
            if name in self._writing:
                self._writing[name].sink = _Sink(self, name, view, flat_parameters.flat.dtype)
                zero_ranges.append((written_end, at))
                written_end = at + leaf.numel()
            elif leaf.requires_grad:
                _accumulate(leaf, view)
        # Also after the last parameter: a step that overflows leaves NaN there.
        zero_ranges.append((written_end, len(self.flat)))
        self._zero_views = [self.flat[start:stop] for start, stop in zero_ranges if start < stop]
        """The ranges that no module writes."""

    def expected(self, name: str) -> bool:
        """Whether a parameter has a gradient; it is 0 for stored numbers that are not trained."""
        return self._trained.leaf(name).requires_grad

    def when_added(self, name: str, callback: Callable[[], None]) -> None:
        """Call `callback` whenever a micro-batch's gradient of a parameter has been added."""
        first = self._trained.first_name(name)
        if first in self._writing:
            self._callbacks.setdefault(first, []).append(callback)
        else:
            self._trained.leaf(name).register_post_accumulate_grad_hook(lambda _: callback())  # type: ignore[no-untyped-call]

    def complete(self) -> None:
        """After the last backward pass: set gradients that it never reached to 0."""
        for name in self._writing.keys() - self._written_names:
            self._leaves[name].zero_()

    def begin(self) -> None:
        """Prepare for the first backward pass of the next step."""
        self._written_names.clear()
        if self._zero_views:
            torch._foreach_zero_(self._zero_views)

    def shared_sink(self, name: str) -> Sink | None:
        """A sink that adds to what torch accumulates for a parameter; None if no part of the
        parameter is trained here.
        """
        parameter = self._trained.parameters.get(name)
        return (
            _SharedSink(self.of[name])
            if parameter is not None and parameter.requires_grad
            else None
        )

    def note_write(self, name: str) -> bool:
        """Note that a module writes to a parameter's view; False if this is its first gradient of
        the step.
        """
        was_written = name in self._written_names
        self._written_names.add(name)
        return was_written

    def announce_added(self, name: str) -> None:
        """Announce that a micro-batch's gradient of a parameter has been added."""
        for callback in self._callbacks.get(name, ()):
            callback()


class _Sink:
    """Writes the gradients of a parameter to its view, and adds the later ones of a step."""

    def __init__(
        self, gradients: Gradients, name: str, view: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """`dtype` is the parameter's."""
        self._gradients, self._name, self._view, self._dtype = gradients, name, view, dtype

    def __call__(self, gradient: Callable[[torch.Tensor | None], torch.Tensor]) -> None:
        # The first gradient of a step overwrites the last step's: `begin` does not clear this view.
        if self._gradients.note_write(self._name):
            self._view.add_(gradient(None))
        elif self._dtype == self._view.dtype:
            gradient(self._view)
        else:
            self._view.copy_(gradient(None))
        self.announce_added()

    def add_product(self, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        add_product(self._view, lhs, rhs, fresh=not self._gradients.note_write(self._name))

    def announce_added(self) -> None:
        self._gradients.announce_added(self._name)


class _SharedSink:
    """Adds a module's gradients of a parameter that another module uses too; torch accumulates and
    announces those.
    """

    def __init__(self, view: torch.Tensor) -> None:
        self._view = view

    def __call__(self, gradient: Callable[[torch.Tensor | None], torch.Tensor]) -> None:
        self._view.add_(gradient(None))

    def add_product(self, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        add_product(self._view, lhs, rhs, fresh=False)

    def announce_added(self) -> None:
        """torch announces the gradient, as the backward pass comes to the other module later."""


def _accumulate(parameter: nn.Parameter, view: torch.Tensor) -> None:
    """Make torch add a parameter's gradients to `view`."""
    if parameter.dtype == view.dtype:
        # torch adds to an existing .grad in place, so the sum stays in the flat buffer.
        parameter.grad = view
        return

    def add(p: torch.Tensor) -> None:
        view.add_(p.grad)  # type: ignore[arg-type]
        p.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class FlatParameters:
    """The parameters of a stage that the optimizer updates: the model's, or its adapters'."""

    layout: Layout
    table: FlatTable
    flat: torch.Tensor
    """All of them in one buffer, padded to equal parts for the ranks of `replicas`."""
    parameters: dict[str, nn.Parameter]
    """By name; views of `flat`."""
    replicas: ReplicaGroup
    leaves: dict[str, tuple[str, nn.Parameter]] = field(default_factory=dict)
    """The parameter of the model that has one of `parameters` as a part, if it has more than that
    one, and the name of its first part.
    """

    @classmethod
    def of(
        cls,
        layout: Layout,
        table: FlatTable,
        replicas: ReplicaGroup,
        dtype: torch.dtype,
        device: torch.device,
        tp_rank: int,
    ) -> FlatParameters:
        """Make a buffer of zeros and this rank's parameters in it."""
        padded_size = (
            max(1, -(-table.size // replicas.size)) * replicas.size
        )  # a stage may have no experts
        flat = torch.zeros(padded_size, dtype=dtype, device=device)
        parameters = {
            name: nn.Parameter(flat[at : at + size].view(layout.local_shape(name, tp_rank)))
            for name, at, size in table.entries
        }
        return cls(layout, table, flat, parameters, replicas)

    def leaf(self, name: str) -> nn.Parameter:
        """The parameter of the model that has this one, and its gradient."""
        return self.leaves[name][1] if name in self.leaves else self.parameters[name]

    def first_name(self, name: str) -> str:
        """The name of the first part of the parameter of the model that has this one."""
        return self.leaves[name][0] if name in self.leaves else name

    def join(self, names: list[str], shape: tuple[int, ...]) -> nn.Parameter:
        """Make one parameter of the model, of `shape`, from those of `names`, which follow one
        another in `flat`.
        """
        starts = {name: at for name, at, _ in self.table.entries}
        start, size = starts[names[0]], self.parameters[names[0]].numel()
        assert [starts[name] for name in names] == [start + i * size for i in range(len(names))], (
            names
        )
        leaf = nn.Parameter(self.flat[start : start + len(names) * size].view(shape))
        self.leaves.update(dict.fromkeys(names, (names[0], leaf)))
        return leaf
