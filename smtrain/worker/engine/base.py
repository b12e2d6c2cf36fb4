"""What a training engine is: the seam between the training loop and the two ways to run a parallel model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

from smtrain.core.model.precision import Precision
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint.native.pruning import Arrived


@dataclass(frozen=True)
class ParallelOptions:
    """How the model and the batch are spread; tp x pp x dp processes make the mesh, tp innermost, pp outermost."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    """Samples of one forward pass of one data-parallel rank; the rest of its batch is accumulated."""
    sequence_parallel: bool = False
    """Cut the activations between the tensor-parallel parts along the sequence; tp must divide its length."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """`full` keeps only the input of each decoder layer and computes the layer again in the backward pass, `selective`
    computes only attention again: nxd its softmax, native the attention module."""
    precision: Precision = "fp32"
    """The dtype of weights, activations and their gradients; sums of gradients and optimizer state are fp32 always."""
    zero1: bool = True
    """Optimizer state split over data-parallel ranks; only nxd can do without."""
    pipeline_cuts: tuple[int, ...] = ()
    """nxd: the last layer of every stage but the last; by default the stages are even."""
    virtual_stages: int = 1
    """nxd: stages that each pipeline rank has, dealt round robin."""
    compile: bool = False
    """native: torch.compile of each layer."""
    deterministic: bool = True
    """native: on accelerators, only kernels that give the same bits each time."""


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW. Weight decay touches matrices (embeddings too), not norms and biases."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    """The largest gradient norm of the whole model; 0 does not clip."""


class Scaling(NamedTuple):
    """What became of an fp16 step's loss scale."""

    scale: float
    """What the loss was multiplied by."""
    following: float
    """The scale of the next step."""
    skipped: bool
    """The gradient was no finite number: weights, optimizer state and its count of steps stayed as they were."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same numbers on every rank."""

    loss: float
    """Mean over all tokens of the global batch whose label is not -100."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping."""
    scaling: Scaling | None = None
    """None where no loss is scaled."""

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing, as its gradient overflowed fp16."""
        return self.scaling is not None and self.scaling.skipped


@dataclass(frozen=True)
class Evaluation:
    """What a batch shows of the model without a step, the same numbers on every rank."""

    loss: float
    """Mean over the tokens of the global batch whose label is not -100; 0 where there are none."""
    tokens: int
    """How many those are."""
    correct: int
    """Of how many of them the label is the likeliest token; 0 from an engine that does not count them (nxd)."""


class Engine(Protocol):
    """A parallel model with its optimizer. Every method is collective: all ranks call it, in the same order.

    Batches are those of this rank's `dp_rank`; ranks that differ in tp and pp only must pass the same one.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    allowed: Callable[[], None]
    """Asked on rank 0 before each manifest; raises `SmtrainError` where the job may not write checkpoints any more."""
    parameters: int
    """How many numbers the whole model has."""
    trained: int
    """How many numbers the optimizer updates: those of the model, or of its adapters."""
    steps_ahead: int
    """How many more steps to begin before a step's numbers are read, so that the device never waits for the host."""

    def step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lr: float, segments: torch.Tensor | None = None
    ) -> StepResult:
        """Forward, backward, clip and update.

        `input_ids` and `labels` are int64 [global batch / dp, sequence]; labels are shifted by the loader already
        (position i holds the token after position i), -100 is ignored. `segments`, of the same shape, numbers the
        samples packed into a row: a run of equal numbers attends to itself only, and its positions count from 0.
        """
        ...

    def begin_step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lr: float, segments: torch.Tensor | None = None
    ) -> Callable[[], StepResult]:
        """`step` that returns once the device has its work; what it gives waits for the numbers, and is collective."""
        ...

    def evaluate(
        self, input_ids: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor | None = None
    ) -> Evaluation:
        """Loss of a global batch, shaped as `step` takes it, without a gradient; weights and state stay as they are."""
        ...

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        ...

    def save(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint `folder/step_00000010`; `state` is the caller's, anything JSON holds.

        Raises `CheckpointError` on every rank if any rank could not write; what was whole before stays whole.
        """
        ...

    def begin_save(self, folder: Path, step: int, state: dict[str, Any], read_back: bool = True) -> None:
        """`save` that returns once the values are copied, and writes while steps go on; `end_save` completes it.

        Ends the save before it first. The checkpoint becomes whole only if its files, `read_back` from the disk, are
        what was written. Raises `CheckpointError` on every rank where a weight is not a finite number.
        """
        ...

    def end_save(self, wait: bool = True) -> int | None:
        """The step whose checkpoint became whole by this call; None where no save was begun.

        Without `wait`, None also while any rank is still writing. Raises `CheckpointError` on every rank if any rank
        could not write; what was whole before stays whole.
        """
        ...

    def abandon_save(self) -> None:
        """Delete what was written of a save that was begun; what was whole before stays whole."""
        ...

    def load(self, checkpoint: Path, read: dict[str, int] | None = None) -> dict[str, Any]:
        """Continue from a checkpoint of any (tp, pp, dp) and precision; gives back its `state`.

        `read`, where it is given, takes the crc32 of each file that was read from the first byte to the last.
        """
        ...

    def prune(
        self, line: Lineage, keep: int, arrived: Arrived | None = None, distrusted: Collection[str] = (),
        spared: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Delete what is older than the newest `keep` checkpoints of a line that are whole and have arrived.

        Every host deletes on its own disk. `arrived`, which rank 0 asks, says what is whole where checkpoints are kept;
        without it that is the disks. Those that `distrusted` names, relative to the prefix, do not count as whole;
        those that `spared` names stay whatever their age.
        """
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...
