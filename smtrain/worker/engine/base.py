"""The interface between the training loop and the engines that run a parallel model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from smtrain.core.config import JobConfig
from smtrain.core.config.training import Train
from smtrain.core.model.footprint import Precision
from smtrain.core.protocol.lineage import Lineage

if TYPE_CHECKING:  # the options of an engine need no torch
    import torch

    from smtrain.worker.checkpoint.native.pruning import ArrivalCheck


@dataclass(frozen=True)
class ParallelOptions:
    """The mesh of pp x dp x cp x tp processes, pp outermost and tp innermost, and options of the
    parallel model.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    """Samples of one forward pass of one data-parallel rank; the rest of its batch is accumulated.
    """
    sequence_parallel: bool = False
    """Cut the activations between the tensor-parallel parts along the sequence; tp must divide its
    length.
    """
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """`full` keeps only the input of each decoder layer and computes the layer again in the
    backward pass, `selective` computes only attention again: nxd its softmax, native the attention
    module.
    """
    precision: Precision = "fp32"
    """The dtype of weights, activations and their gradients; sums of gradients and optimizer state
    are fp32 always.
    """
    zero1: bool = True
    """Split the optimizer state over data-parallel ranks; only nxd can switch it off."""
    shard: Literal["optimizer", "full"] = "optimizer"
    """native: the data-parallel ranks divide the optimizer's state, or also weights and gradients.
    """
    pipeline_cuts: tuple[int, ...] = ()
    """The last layer of every stage but the last; by default the stages are even, the remainder
    last.
    """
    virtual_stages: int = 1
    """nxd: stages of each pipeline rank, dealt round robin."""
    apart: bool = False
    """nxd: every batch comes with segments, for which its graphs are made."""
    compile: bool = False
    """native: torch.compile of each layer."""
    param_norm: Literal["none", "all", "layers"] = "none"
    """native: measure `StepResult.param_norms`."""
    deterministic: bool = True
    """native: use only kernels that return the same bits each time, on accelerators."""
    ep: int = 1
    """native: neighbouring data-parallel ranks that divide the experts of each layer."""
    expert_capacity: float | None = None
    """native: most tokens of an expert from one rank, as a multiple of an even share; None: no
    limit.
    """
    aux_loss: float | None = None
    """native: the factor of the auxiliary loss of experts; None: as config.json says."""
    aux_by_layer: bool = False
    """native: the auxiliary loss is the sum of one for each layer, as in Megatron, not one over all
    layers.
    """
    router_bias_update_rate: float = 0.0
    """native: the step of the biases by which DeepSeek-V3's routers choose; 0: they stay."""
    cp: int = 1
    """native: ranks that share every sequence; cp, times tp with `sequence_parallel`, must divide
    its length.
    """

    @classmethod
    def of(cls, config: JobConfig) -> ParallelOptions:
        """The options in a config: each is the key of its name in section `parallel` or `train`,
        but for a few.
        """
        keys = {**dict(config.train), **dict(config.parallel)}
        values = {option.name: keys[option.name] for option in fields(cls) if option.name in keys}
        values |= {
            "dp": config.dp,
            # `auto` is `optimizer` if no plan has chosen.
            "shard": "full" if config.parallel.shard == "full" else "optimizer",
            "pipeline_cuts": config.parallel.cuts,
            "apart": config.needs_attention_mask,
            "compile": bool(config.train.compile),
            "deterministic": config.train.deterministic is not False,
        }
        return cls(**values)


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW. Weight decay touches matrices (embeddings too), not norms and biases."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    """The largest gradient norm of the whole model; 0 does not clip."""

    @classmethod
    def of(cls, train: Train) -> OptimizerOptions:
        """The options in section `train`, each the key of its name."""
        return cls(**{option.name: getattr(train, option.name) for option in fields(cls)})


@dataclass(frozen=True)
class PairMetrics:
    """Means over the pairs of a batch.

    A reward is beta times what a log-probability has gained on the reference's.
    """

    chosen_reward: float
    rejected_reward: float
    accuracy: float
    """Share of pairs whose chosen answer has the larger reward."""
    chosen_logp: float
    """Sum of the answer's tokens' log-probabilities."""
    rejected_logp: float

    @property
    def margin(self) -> float:
        return self.chosen_reward - self.rejected_reward

    def numbers(self) -> dict[str, float]:
        """The numbers under the names that TRL gives them."""
        return {
            "rewards/chosen": self.chosen_reward,
            "rewards/rejected": self.rejected_reward,
            "rewards/margins": self.margin,
            "rewards/accuracies": self.accuracy,
            "logps/chosen": self.chosen_logp,
            "logps/rejected": self.rejected_logp,
        }


class RoutingMetrics(NamedTuple):
    """The choices of experts in a step.

    A load is an expert's tokens over the mean of all experts of all layers.
    """

    aux_loss: float
    """Mean over micro-batches, without its factor; the experts of a token, if all loads are equal.
    """
    entropy: float
    """Mean entropy of the router's probabilities over that of equal ones: 1 is no choice, 0 a
    certain one.
    """
    loads: tuple[tuple[float, ...], ...]
    """The load of each expert, by the layers that have experts."""
    experts_per_token: int
    """Experts of a token."""
    dropped_choices: float = 0.0
    """The share of choices beyond an expert's capacity."""

    def numbers(self) -> dict[str, float]:
        """The numbers for a log."""
        loads = [load for layer in self.loads for load in layer]
        return {
            "experts/aux_loss": self.aux_loss,
            "experts/entropy": self.entropy,
            "experts/load_max": max(loads),
            "experts/load_min": min(loads),
            "experts/dropped": self.dropped_choices,
        }


class Scaling(NamedTuple):
    """The loss scale of an fp16 step, and what became of it."""

    scale: float
    """The factor of the loss."""
    following: float
    """The scale of the next step."""
    is_skipped: bool
    """The gradient was not finite: weights, optimizer state and its count of steps are unchanged.
    """


@dataclass(frozen=True)
class ParameterNorms:
    """Norms of the trained parameters after a step, each number counted once over all ranks."""

    total: float
    parts: dict[str, float]
    """By `layer_00`..., `embedding`, `positions`, `norm` and `head`; empty unless they were asked
    for.
    """


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same numbers on every rank."""

    loss: float
    """Mean over all tokens of the global batch whose label is not -100, or over its pairs."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping."""
    scaling: Scaling | None = None
    """None if the loss is not scaled."""
    pairs: PairMetrics | None = None
    """None unless the step learned from pairs."""
    routing: RoutingMetrics | None = None
    """None without experts, or with adapters."""
    param_norms: ParameterNorms | None = None
    """None unless they were asked for."""
    ready: float | None = field(default=None, compare=False)
    """`time.perf_counter()` when the device had these numbers; None if the engine cannot say."""

    @property
    def is_skipped(self) -> bool:
        """Whether the step changed nothing because its gradient overflowed fp16."""
        return self.scaling is not None and self.scaling.is_skipped


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of a batch without a step, the same numbers on every rank."""

    loss: float
    """Mean over the tokens of the global batch whose label is not -100, or over its pairs; 0
    without any.
    """
    tokens: int
    """The number of those tokens or pairs."""
    correct: int
    """Labels that the model finds likeliest, or pairs whose chosen answer has the larger reward."""
    pairs: PairMetrics | None = None
    """None unless the batch holds pairs."""
    answer_loss: float = 0.0
    """A part of `loss`: the weighted mean over the tokens of chosen answers
    (train.dpo.sft_weight).
    """
    answer_tokens: int = 0
    """The number of those tokens."""


class Engine(Protocol):
    """A parallel model with its optimizer.

    Every method is collective: all ranks call it, in the same order.

    Batches are those of this rank's `dp_rank`; ranks that differ in tp, cp and pp only must pass
    the same one.
    """

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    require_owner: Callable[[], None]
    """Called on rank 0 before each manifest; raises `SmtrainError` if the job may not write
    checkpoints any more.
    """
    parameters: int
    """The number of parameters of the whole model."""
    trained_count: int
    """The number of parameters that the optimizer updates: the model's, or its adapters'."""
    steps_ahead: int
    """Steps to begin before an earlier step's numbers are read, so that the device never waits for
    the host.
    """

    def step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        lr: float,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> StepResult:
        """Forward, backward, clip and update.

        `input_ids` and `labels` are int64 [global batch / dp, sequence]; labels are shifted by the
        loader already (position i holds the token after position i), -100 is ignored. `segments`,
        of the same shape, numbers the samples packed into a row: a run of equal numbers attends to
        itself only, and its positions count from 0.

        `references`, fp32 [global batch / dp, most pairs of a row, 2], makes it a step on pairs:
        segments 2i and 2i + 1 of a row are the chosen and the rejected answer of its pair i, each
        with its prompt, and these are the reference's log-probabilities of the two; NaN if the row
        has no pair i.
        """
        ...

    def begin_step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        lr: float,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> Callable[[], StepResult]:
        """`step` that returns once the device has its work; the function that it returns waits for
        the numbers.

        That function is collective too.
        """
        ...

    def evaluate(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> Evaluation:
        """Evaluate a global batch, shaped as for `step`, without a gradient; weights and state do
        not change.
        """
        ...

    def is_any_set(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        ...

    def save(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint `folder/step_00000010`; `state` is the caller's JSON.

        Raises `CheckpointError` on every rank if any rank could not write; what was whole before
        stays whole.
        """
        ...

    def begin_save(
        self, folder: Path, step: int, state: dict[str, Any], read_back: bool = True
    ) -> None:
        """`save` that returns once the values are copied, and writes during the next steps;
        `end_save` completes it.

        Ends the save before it first. With `read_back` the checkpoint becomes whole only if the
        disk has the bytes that were written. Raises `CheckpointError` on every rank if a weight is
        not a finite number.
        """
        ...

    def end_save(self, wait: bool = True) -> int | None:
        """The step whose checkpoint became whole in this call; None if no save was begun.

        Without `wait`, also None while any rank is still writing. Raises `CheckpointError` on every
        rank if any rank could not write; what was whole before stays whole.
        """
        ...

    def abandon_save(self) -> None:
        """Delete the files of a save that was begun; what was whole before stays whole."""
        ...

    def load(self, checkpoint: Path, read: dict[str, int] | None = None) -> dict[str, Any]:
        """Load a checkpoint of any (tp, pp, dp) and precision; returns its `state`.

        `read` takes the crc32 of each file that was read from the first byte to the last.
        """
        ...

    def prune(
        self,
        lineage: Lineage,
        keep: int,
        has_arrived: ArrivalCheck | None = None,
        distrusted_names: Collection[str] = (),
        retained_names: Collection[str] = (),
    ) -> None:
        """Delete what is older than the newest `keep` checkpoints of a line that are whole and have
        arrived.

        Every host deletes on its own disk. Rank 0 calls `has_arrived` to find out which are whole
        in S3; without it the disks count. `distrusted_names`, relative to the prefix, do not count
        as whole; `retained_names` stay whatever their age.
        """
        ...

    def close(self) -> None:
        """Leave the process group."""
        ...
