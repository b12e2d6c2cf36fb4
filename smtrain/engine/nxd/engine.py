"""The nxd engine: a model over neuronx-distributed's layers, its pipeline and its ZeRO-1 behind the `Engine` seam."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed import (
    initialize_parallel_model,
    initialize_parallel_optimizer,
    neuronx_distributed_config,
)
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils import get_device, mark_step
from torch import nn
from torch_neuronx.utils import get_platform_target

from smtrain.checkpoint.pruning import Arrived, prune
from smtrain.checkpoint.sources import WeightSource
from smtrain.contract.lineage import Lineage
from smtrain.engine.base import Evaluation, OptimizerOptions, ParallelOptions, StepResult
from smtrain.engine.initial import RandomWeights
from smtrain.engine.nxd import persist, whole
from smtrain.engine.nxd.attention import CoreAttention, Rotary
from smtrain.engine.nxd.library import Everyone, local_rank
from smtrain.engine.nxd.limits import refusals
from smtrain.engine.nxd.model import Build, CausalLM, LlamaAttention, layer_class
from smtrain.engine.nxd.optimizer import ClippedAdamW, groups
from smtrain.engine.nxd.persist import SaveOptions
from smtrain.engine.nxd.weights import begin_with, fill
from smtrain.errors import CheckpointError, ConfigError
from smtrain.model.families import FAMILIES, ModelShape
from smtrain.model.hf_config import normalise
from smtrain.model.labels import IGNORED
from smtrain.model.layout import Layout
from smtrain.model.transformers_build import transformers_config


class NxdEngine:
    """A Hugging Face causal LM on a tp x pp x dp mesh; build it inside a job that `library.init_distributed` joined.

    `config` is the model's config.json, `weights` where its values come from, None a random start from `seed`; every
    step has `micro_batches` of `options.micro_batch_size` samples on each data-parallel rank. Raises `ConfigError` if
    the mesh does not fit the job or the model, `CheckpointError` on every rank if the weights do not fit.
    """

    steps_ahead = 1

    def __init__(
        self, config: dict[str, Any], options: ParallelOptions, optimizer: OptimizerOptions,
        weights: WeightSource | None, seed: int, micro_batches: int, saving: SaveOptions | None = None,
    ) -> None:  # fmt: skip
        self.config, self.options, self.saving = config, options, saving or SaveOptions()
        self.allowed: Callable[[], None] = lambda: None
        self.shape = ModelShape.from_config(config)
        self.dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
        self.micro_batches = micro_batches
        self.everyone = Everyone()
        if faults := refusals(self.shape, options, self.everyone.size):
            raise ConfigError(faults)
        order: Any = "tiled" if get_platform_target() in ("trn1", "trn1n", "inf2") else "grouped"
        self.layout = Layout(self.shape, options.tp, options.pp, order)
        self.nxd_config = neuronx_distributed_config(
            tensor_parallel_size=options.tp,
            pipeline_parallel_size=options.pp,
            pipeline_config=self._pipeline() if options.pp > 1 else None,
            optimizer_config={"zero_one_enabled": options.zero1, "grad_clipping": False},
            sequence_parallel=self.sequence_parallel,
            activation_checkpoint_config=self._recomputed(),
            model_init_config={
                "meta_device_init": True,
                "param_init_fn": _leave_empty,
                "sequential_move_factor": 11,
            },
            mixed_precision_config={
                "use_master_weights": options.zero1,
                "use_fp32_grad_acc": options.zero1,
                "use_master_weights_in_ckpt": options.zero1,
            },
        )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.dp_rank, self.dp_size = parallel_state.get_data_parallel_rank(), options.dp
        self.parameters = self.trained = self.shape.parameters()
        self.model = initialize_parallel_model(self.nxd_config, self._build)
        if options.pp == 1:
            self.model.original_module().tie()  # the library unties what it moves from `meta`, on one stage
        fault = None
        exact: dict[str, torch.Tensor] = {}
        try:
            exact = fill(
                self._named(), weights or RandomWeights(config, self.shape, seed), self.layout, self.tp_rank,
                (self.dp_rank, self.dp_size),
            )  # fmt: skip
        except CheckpointError as error:
            fault = str(error)
        self.everyone.agree(fault, "the weights cannot be loaded")
        for module in self.model.modules():
            if isinstance(module, LlamaAttention):
                module.sum_copies()
        replicas = 1 if options.zero1 else options.dp
        self.optimizer = initialize_parallel_optimizer(
            self.nxd_config,
            ClippedAdamW,
            groups(self._named(), self.layout, self.tp_rank, self.pp_rank, replicas, optimizer.weight_decay),
            lr=0.0,
            betas=optimizer.betas,
            eps=optimizer.eps,
            clip=optimizer.grad_clip,
        )
        if exact:
            begin_with(exact, self._named(), self.optimizer.optimizer)
        self.optimizer_steps = 0

    @property
    def sequence_parallel(self) -> bool:
        return self.options.sequence_parallel and self.options.tp > 1

    @property
    def last(self) -> bool:
        """Whether this rank's stage has the loss."""
        return self.pp_rank == self.options.pp - 1

    @property
    def adamw(self) -> ClippedAdamW:
        """Ours, within the library's wrappers."""
        inner = self.optimizer.optimizer
        found: ClippedAdamW = inner.base_optimizer if self.options.zero1 else inner
        return found

    def step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lr: float, segments: torch.Tensor | None = None
    ) -> StepResult:
        return self.begin_step(input_ids, labels, lr, segments)()

    def begin_step(
        self, input_ids: torch.Tensor, labels: torch.Tensor, lr: float, segments: torch.Tensor | None = None
    ) -> Callable[[], StepResult]:
        self._check(input_ids, segments)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self._batch(input_ids, labels)
        if self.options.pp > 1:
            loss = self.model.run_train(**batch)
        else:
            loss = sum(self._backward(micro) for micro in self._micro_batches(batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark_step()
        self.optimizer_steps += 1
        norm = self.adamw.norm
        assert norm is not None
        return lambda: StepResult(self._mean(loss), float(norm))

    def evaluate(
        self, input_ids: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor | None = None
    ) -> Evaluation:
        self._check(input_ids, segments)
        tokens = self._tokens(labels)
        batch = self._batch(input_ids, labels)
        if self.options.pp > 1:
            return Evaluation(self._mean(self.model.run_eval(**batch)), tokens, 0)
        with torch.no_grad():
            losses = []
            for micro in self._micro_batches(batch):
                losses.append(self.model(**micro).detach())
                mark_step()
            return Evaluation(self._mean(sum(losses) / self.micro_batches), tokens, 0)

    def save(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        persist.save(self, Path(folder), step, state)
        if not self.saving.asynchronous:
            persist.finish(self)

    def begin_save(self, folder: Path, step: int, state: dict[str, Any], read_back: bool = True) -> None:
        # its hashes are of what is read back anyway
        persist.save(self, Path(folder), step, state)

    def end_save(self, wait: bool = True) -> int | None:
        # the library does not tell when its thread is done
        return persist.finish(self) if wait or not self.saving.asynchronous else None

    def abandon_save(self) -> None:
        persist.abandon(self)

    def load(self, checkpoint: Path) -> dict[str, Any]:
        return persist.load(self, Path(checkpoint))

    def prune(
        self, line: Lineage, keep: int, arrived: Arrived | None = None, distrusted: Collection[str] = (),
        spared: Collection[str] = (),
    ) -> None:  # fmt: skip
        everyone = self.everyone
        prune(
            line, keep, arrived, whole, distrusted, spared,
            gather=everyone.gather, rank=everyone.rank, local_rank=local_rank(),
        )  # fmt: skip

    def any(self, flag: bool) -> bool:
        return self.everyone.sum(float(flag))[0] > 0

    def close(self) -> None:
        persist.finish(self)
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    # Building

    def _build(self) -> CausalLM:
        described = normalise(self.config)
        rotary = Rotary(transformers_config(self.config), described)
        padding = self.config.get("pad_token_id")
        return CausalLM(Build(described, self.layout, padding, self.dtype, self.sequence_parallel, rotary))

    def _pipeline(self) -> dict[str, Any]:
        """The library's pipeline settings; the stages are cut where the layout cuts them."""
        options, family = self.options, FAMILIES[self.shape.family]
        stages = options.pp * options.virtual_stages
        cut = Layout(self.shape, 1, stages, cuts=options.pipeline_cuts or None)
        return {
            "transformer_layer_cls": layer_class(self.shape),
            "num_microbatches": self.micro_batches,
            "virtual_pipeline_size": options.virtual_stages,
            "pipeline_cuts": [f"{family.prefix}.layers.{cut.layers(s)[-1]}" for s in range(stages - 1)],
            "output_loss_value_spec": True,
            "input_names": ["input_ids", "labels", "weights"],
            "leaf_module_cls": ["RMSNorm", "LayerNorm", "WeighedLoss"],
            "use_zero1_optimizer": options.zero1,
            "use_optimizer_wrapper": True,
        }

    def _recomputed(self) -> Any:
        """The module class whose activations are not kept."""
        kinds: dict[str, type[nn.Module]] = {"full": layer_class(self.shape), "selective": CoreAttention}
        return kinds.get(self.options.activation_checkpointing)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """(NxD's name, parameter) of what this rank holds, without the wrappers' part of the names."""
        return [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in self.model.named_parameters()]

    # Batches

    def _check(self, input_ids: torch.Tensor, segments: torch.Tensor | None) -> None:
        rows, length = input_ids.shape
        if segments is not None:
            raise ConfigError(
                [
                    "train.engine: nxd attends over whole rows only, and this data keeps samples of a row apart; set "
                    "train.engine: native, or pack without boundaries"
                ]
            )
        if rows != self.micro_batches * self.options.micro_batch_size:
            raise ConfigError(
                [
                    f"train.global_batch_size: {rows} samples came to a data-parallel rank, the pipeline was built for "
                    f"{self.micro_batches} micro-batches of {self.options.micro_batch_size}; they must agree"
                ]
            )
        if self.sequence_parallel and length % self.options.tp:
            raise ConfigError(
                [
                    f"parallel.sequence_parallel cuts {length} tokens (train.seq_len) into {self.options.tp} parts "
                    "(parallel.tp): make train.seq_len a multiple of parallel.tp"
                ]
            )

    def _batch(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Weights so that NxD's mean over micro-batches and data-parallel ranks is the mean over all tokens."""
        counted = labels != IGNORED
        scale = self.micro_batches * self.dp_size / max(1, self._tokens(labels))
        return {"input_ids": input_ids, "labels": labels.clamp(min=0), "weights": counted.float() * scale}

    def _tokens(self, labels: torch.Tensor) -> int:
        """How many labels of the global batch count."""
        held = self.options.tp * self.options.pp  # ranks that have this very batch
        return round(self.everyone.sum(int((labels != IGNORED).sum()) / held)[0])

    def _micro_batches(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        device = get_device()
        cut = {name: x.split(self.options.micro_batch_size) for name, x in batch.items()}
        return [{name: parts[i].to(device) for name, parts in cut.items()} for i in range(self.micro_batches)]

    def _backward(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**micro) / self.micro_batches
        loss.backward()
        mark_step()
        return loss.detach()

    def _mean(self, loss: Any) -> float:
        """From the losses on the last stages to the mean, on every rank."""
        mine = float(loss) if self.last and self.tp_rank == 0 else 0.0
        return self.everyone.sum(mine)[0] / self.dp_size


def _leave_empty(_module: nn.Module, _device: torch.device) -> None:
    """Parameters made on `meta` get memory from the library and their values from `fill`."""
