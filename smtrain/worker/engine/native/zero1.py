"""AdamW with ZeRO-1 and gradient clipping: parameters of a rank in one flat buffer, optimizer state
split over the data-parallel ranks.

A step sums the fp32 gradients of each rank's part on that rank, updates that part of the fp32
weights, and sends the parameters to all ranks (Rajbhandari et al. 2020; see `exchange`). In fp32
the weights are the flat buffer itself; in bf16 and fp16 there is a master copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from smtrain.worker.engine.base import OptimizerOptions
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.exchange import GradientSums, WeightShares
from smtrain.worker.engine.native.gradients import FlatParameters, Gradients
from smtrain.worker.engine.native.norms import Range, is_finite, merge, part_of
from smtrain.worker.engine.native.optimizer import AdamWSteps
from smtrain.worker.engine.native.replicas import GradientCopies
from smtrain.worker.engine.native.stage import Stage


class OptimizerShard:
    """This rank's part of the optimizer's state for one flat buffer, which the ranks that are alike
    divide.
    """

    def __init__(
        self,
        stage: Stage,
        flat_parameters: FlatParameters,
        mesh: ProcessMesh,
        options: OptimizerOptions,
    ) -> None:
        self.mesh, self.options = mesh, options
        self.table, self.flat = flat_parameters.table, flat_parameters.flat
        self.shard = len(self.flat) // flat_parameters.replicas.size
        # The flat buffer is padded to equal shards: rank r owns [r * shard, (r + 1) * shard).
        self.start = flat_parameters.replicas.rank * self.shard
        self.gradients = Gradients(flat_parameters, stage.writing, mesh.device)
        stage.share_head(self.gradients)
        self._copies = GradientCopies(stage, flat_parameters, mesh)
        self._weighted: list[tuple[int, int, float, str]] = []
        """The ranges of this rank's part, their weight in norms, and the parameter of each."""
        self._shape = flat_parameters.layout.shape
        for name, at, size in self.table.entries:
            low, high = max(at, self.start), min(at + size, self.start + self.shard)
            if low < high and (weight := self._copies.weights[name]):
                self._weighted.append((low - self.start, high - self.start, weight, name))
        self._by_part: dict[bool, list[Range]] = {}
        self._ranges = merge((start, stop, weight, "") for start, stop, weight, _ in self._weighted)
        own_part = self.part(self.flat)
        # In fp32 the weights are their own masters; a copy would double their memory.
        self.master = own_part if own_part.dtype == torch.float32 else own_part.float()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.sums = GradientSums(
            flat_parameters.replicas, flat_parameters.table, self.gradients, self._copies.names
        )
        self._grad_part = self.sums.own_part
        self.shares = WeightShares(flat_parameters, *_needed_by(stage))
        self._places = {name: (at, size) for name, at, size in self.table.entries}
        self._adamw = self._make_adamw()

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat buffer."""
        return flat[self.start : self.start + self.shard]

    def _make_adamw(self) -> torch.optim.AdamW:
        cut = min(max(self.table.decay_end - self.start, 0), self.shard)
        groups, states = [], []
        for span, decay in (
            (slice(0, cut), self.options.weight_decay),
            (slice(cut, self.shard), 0.0),
        ):
            # A shard may lie completely in the decayed or the undecayed part.
            if span.start < span.stop:
                # A view of the flat buffer: AdamW has at most two parameters, updated in place.
                parameter = nn.Parameter(self.master[span], requires_grad=False)
                parameter.grad = self._grad_part[span]
                groups.append({"params": [parameter], "weight_decay": decay})
                states.append((parameter, span))
        # Fused: TorchNeuron has no kernels for the single-tensor and foreach forms, whose state
        # would go by the CPU.
        adamw = torch.optim.AdamW(
            groups, betas=self.options.betas, eps=self.options.eps, fused=True
        )
        for parameter, span in states:
            adamw.state[parameter] = {
                # Fused AdamW wants its step on the device; a skipped step does not count in it.
                "step": torch.zeros((), device=self.master.device),
                "exp_avg": self.exp_avg[span],
                "exp_avg_sq": self.exp_avg_sq[span],
            }
        return adamw

    def take(self, name: str, values: torch.Tensor) -> None:
        """Start from a parameter's fp32 values, so that rounding to 16 bits loses nothing."""
        if name not in self._places:
            return
        at, size = self._places[name]
        low, high = max(at, self.start), min(at + size, self.start + self.shard)
        if low < high:
            self.master[low - self.start : high - self.start].copy_(
                values.reshape(-1)[low - at : high - at]
            )

    def complete(self) -> None:
        """Add up gradients over tensor-parallel ranks and both ends of the pipeline."""
        self.gradients.complete()
        self._copies.sum(self.gradients.of)

    def add_squares(self, total: torch.Tensor) -> None:
        """Add the squares of this rank's gradients to `total`; copies of a number share its
        weight.
        """
        for range_ in self._ranges:
            total += range_.square(self._grad_part)

    def squares(self, by_part: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """The squares of this rank's trained parameters, by `part_of` or together; copies share a
        number's weight.
        """
        if by_part not in self._by_part:
            self._by_part[by_part] = merge(
                (start, stop, weight, part_of(self._shape, name) if by_part else "")
                for start, stop, weight, name in self._weighted
                if self.gradients.expected(name)
            )
        for range_ in self._by_part[by_part]:
            yield range_.part, range_.square(self.master)

    def update(
        self, lr: float, divisor: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        """Divide the gradients by `divisor`, update, and begin to share the new parameters."""
        adamw: Any = self._adamw
        adamw.found_inf = found_inf  # fused AdamW skips the step, as with GradScaler
        adamw.grad_scale = None
        if divisor is not None and self.master.device.type in ("cpu", "cuda"):
            adamw.grad_scale = (
                divisor  # fused AdamW divides while it updates, which saves a pass over memory
            )
        elif divisor is not None:
            self._grad_part.div_(divisor)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        self.publish()
        self.gradients.begin()

    def publish(self) -> None:
        """Round the master weights to the parameters' dtype, and send them; the next forward pass
        may begin.
        """
        own_part = self.part(self.flat)
        if own_part.dtype != self.master.dtype:
            own_part.copy_(self.master)
        self.shares.send()

    def last_backward(self) -> None:
        """Announce the last backward pass of the step, which completes the gradients."""
        self.sums.last_backward()

    def finish(self) -> None:
        """Add up gradients over the ranks that hold the same parameters."""
        self.sums.finish()

    def settle(self) -> None:
        """Wait until every rank has all new parameters."""
        self.shares.settle()

    def is_finite(self) -> bool:
        """Whether this rank's master weights are finite numbers."""
        return is_finite(self.master)

    def set_step_count(self, steps: int) -> None:
        """Set the number of updates so far."""
        for state in self._adamw.state.values():
            state["step"].fill_(steps)


class Zero1AdamW(AdamWSteps):
    """The optimizer of one rank; it owns the stage's gradients from now on.

    In fp32 it updates the stage's values; in bf16 and fp16 call `take` with each parameter's fp32
    values. `experts` is the part for experts, if they are divided over other ranks than the rest.
    """

    def __init__(self, stage: Stage, mesh: ProcessMesh, options: OptimizerOptions) -> None:
        super().__init__(mesh, options, stage.dtype)
        self.dense = OptimizerShard(stage, stage.trained, mesh, options)
        experts = stage.trained_experts
        self.experts = None if experts is None else OptimizerShard(stage, experts, mesh, options)
        self.shards: list[OptimizerShard] = [self.dense, *([self.experts] if self.experts else [])]
        stage.before_layer = self._before_layer

    def _before_layer(self, layer: int) -> None:
        for shard in self.shards:
            shard.shares.wait_for_layer(layer)


def _needed_by(stage: Stage) -> tuple[dict[int, int], int]:
    """The first layer that needs each parameter, by its id, and the number of layers."""
    place = {id(p): i for i, block in enumerate(stage.blocks) for p in block.parameters()}
    ends = [
        (module, len(stage.blocks)) for module in (stage.norm, stage.model.get_output_embeddings())
    ]
    for module, layer in (
        *ends,
        (stage.embed, 0),
        (stage.positions, 0),
    ):  # a tied matrix is needed first
        place |= {id(p): layer for p in (module.parameters() if module is not None else ())}
    return place, len(stage.blocks)
