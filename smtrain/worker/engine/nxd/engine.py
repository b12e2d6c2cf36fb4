"""The nxd engine: neuronx-distributed's layers, pipeline and ZeRO-1 as an `Engine`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from neuronx_distributed import initialize_parallel_model, initialize_parallel_optimizer
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils import get_device, mark_step
from torch import nn
from torch_neuronx.utils import get_platform_target

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.transformers_build import transformers_config
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint import manifest
from smtrain.worker.checkpoint.native.pruning import ArrivalCheck, RankGroup, prune
from smtrain.worker.checkpoint.nxd.names import factor_of
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.base import Evaluation, OptimizerOptions, ParallelOptions, StepResult
from smtrain.worker.engine.initial_weights import RandomFactors, RandomWeights
from smtrain.worker.engine.nxd import completeness, persist
from smtrain.worker.engine.nxd.adapters import AdapterState
from smtrain.worker.engine.nxd.attention import Rotary, places_of
from smtrain.worker.engine.nxd.build import Build
from smtrain.worker.engine.nxd.library import Everyone
from smtrain.worker.engine.nxd.library_config import library_config, refusals
from smtrain.worker.engine.nxd.lora import LinearAdapter
from smtrain.worker.engine.nxd.model import CausalLM, LlamaAttention, PackedCausalLM
from smtrain.worker.engine.nxd.optimizer import ClippedAdamW, adapter_groups, groups
from smtrain.worker.engine.nxd.persist import SaveOptions
from smtrain.worker.engine.nxd.weights import begin_with, fill, fill_adapters
from smtrain.worker.engine.saving import Saver, local_rank


class NxdEngine:
    """A Hugging Face causal LM on a tp x pp x dp mesh; build it inside a job that
    `library.init_distributed` joined.

    `config` is the model's config.json, `weights` the source of its values, None a random start
    from `seed`; every step has `micro_batches` of `options.micro_batch_size` samples on each
    data-parallel rank. With `lora` the model is frozen and only adapters are trained, as in the
    native engine; checkpoints hold only the adapters, in our own format. Raises `ConfigError` if
    the mesh does not fit the job or the model, `CheckpointError` on every rank if the weights do
    not fit.
    """

    steps_ahead = 1

    def __init__(
        self,
        config: dict[str, Any],
        options: ParallelOptions,
        optimizer: OptimizerOptions,
        weights: WeightSource | RandomWeights | None,
        seed: int,
        micro_batches: int,
        saving: SaveOptions | None = None,
        lora: Lora | None = None,
    ) -> None:
        self.config, self.options, self.saving = config, options, saving or SaveOptions()
        self.require_owner: Callable[[], None] = lambda: None
        self.shape = ModelShape.from_config(config)
        self.dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
        self.micro_batches = micro_batches
        self.everyone = Everyone()
        if faults := refusals(self.shape, options, self.everyone.size, lora):
            raise ConfigError(faults, code="config.combination")
        order: Any = "tiled" if get_platform_target() in ("trn1", "trn1n", "inf2") else "grouped"
        self.layout = Layout(self.shape, options.tp, options.pp, order)
        self.adapters: Layout | None = None
        """The layout of LoRA's factors over all stages of the pipeline."""
        if lora is not None:
            stages, cuts = options.pp * options.virtual_stages, options.pipeline_cuts or None
            self.adapters = Layout(
                AdapterShape.of(self.shape, lora), options.tp, stages, order, cuts
            )
        self.nxd_config = library_config(self.shape, options, micro_batches)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # After `library_config`, which makes the groups that are asked here.
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.dp_rank, self.dp_size = parallel_state.get_data_parallel_rank(), options.dp
        self.parameters = self.shape.parameters()
        self.trained_count = (
            self.adapters.shape.parameters() if self.adapters is not None else self.parameters
        )
        self.model = initialize_parallel_model(self.nxd_config, self._build)
        if options.pp == 1:
            # moving from `meta` unties; with a pipeline the library ties again
            self.model.original_module().tie()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(lora is None or factor_of(name) is not None)
        fault = None
        exact: dict[str, torch.Tensor] = {}
        try:
            exact = fill(
                self.named_parameters(),
                weights or RandomWeights(config, self.shape, seed),
                self.layout,
                self.tp_rank,
                (self.dp_rank, self.dp_size),
            )
            if lora is not None and self.adapters is not None:
                factors = RandomFactors(AdapterShape.of(self.shape, lora), seed)
                fill_adapters(self.named_parameters(), factors, self.adapters, self.tp_rank)
        except CheckpointError as error:
            fault = str(error)
        self.everyone.agree(fault, "the weights cannot be loaded")
        for module in self.model.modules():
            if isinstance(module, LlamaAttention | LinearAdapter):
                module.sum_copies()
        self.optimizer = initialize_parallel_optimizer(
            self.nxd_config,
            ClippedAdamW,
            self._groups(optimizer.weight_decay),
            # `begin_step` sets the rate of each step before the update.
            lr=0.0,
            betas=optimizer.betas,
            eps=optimizer.eps,
            clip=optimizer.grad_clip,
        )
        if exact and lora is None:
            begin_with(exact, self.named_parameters(), self.optimizer.optimizer)
        self.optimizer_steps = 0
        self._saver: Saver | None = None
        if self.adapters is not None:
            self._state = AdapterState(self)
            self._saver = Saver(self.everyone, self._state, lambda: self.require_owner())

    @property
    def sequence_parallel(self) -> bool:
        return self.options.sequence_parallel and self.options.tp > 1

    @property
    def last(self) -> bool:
        """Whether this rank is on the last stage, which has the loss."""
        return self.pp_rank == self.options.pp - 1

    @property
    def adamw(self) -> ClippedAdamW:
        """Our optimizer, within the library's wrappers."""
        inner = self.optimizer.optimizer
        adamw: ClippedAdamW = inner.base_optimizer if self.options.zero1 else inner
        return adamw

    def step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        lr: float,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> StepResult:
        return self.begin_step(input_ids, labels, lr, segments, references)()

    def begin_step(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        lr: float,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> Callable[[], StepResult]:
        self._check(input_ids, segments, references)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self._batch(input_ids, labels, segments)
        if self.options.pp > 1:
            loss = self.model.run_train(**batch)
        else:
            loss = sum(self._backward(micro) for micro in self._micro_batches(batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark_step()
        self.optimizer_steps += 1
        # Taken now: the next step may replace it before the returned function runs (`steps_ahead`).
        norm = self.adamw.norm
        assert norm is not None
        return lambda: StepResult(self._means([float(loss) if self.last else 0.0])[0], float(norm))

    def evaluate(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> Evaluation:
        self._check(input_ids, segments, references)
        tokens = self._tokens(labels)
        batch = self._batch(input_ids, labels, segments)
        if self.options.pp > 1:
            sums = self.model.run_eval(**batch)
        else:
            with torch.no_grad():
                sums = 0
                for micro in self._micro_batches(batch):
                    sums = sums + self.model(**micro) / self.micro_batches
                    mark_step()
        loss, correct = self._means(sums.tolist() if self.last else [0.0, 0.0])
        return Evaluation(loss, tokens, round(correct * tokens))

    def save(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        if self._saver is not None:
            self._saver.begin(Path(folder), step, state)
            self._saver.end()
            return
        persist.save(self, Path(folder), step, state)
        if not self.saving.asynchronous:
            persist.finish(self)

    def begin_save(
        self, folder: Path, step: int, state: dict[str, Any], read_back: bool = True
    ) -> None:
        if self._saver is not None:
            self._saver.begin(Path(folder), step, state, read_back=read_back)
            return
        # No `read_back`: completing the save reads every file to hash it.
        persist.save(self, Path(folder), step, state)

    def end_save(self, wait: bool = True) -> int | None:
        if self._saver is not None:
            return self._saver.end(wait)
        # The library does not tell whether its thread is done, so wait or leave it.
        return persist.finish(self) if wait or not self.saving.asynchronous else None

    def abandon_save(self) -> None:
        if self._saver is not None:
            self._saver.abandon()
        else:
            persist.abandon(self)

    def load(self, checkpoint: Path, read: dict[str, int] | None = None) -> dict[str, Any]:
        return (
            persist.load(self, Path(checkpoint))
            if self._saver is None
            else self._state.load(Path(checkpoint))
        )

    def prune(
        self,
        lineage: Lineage,
        keep: int,
        has_arrived: ArrivalCheck | None = None,
        distrusted_names: Collection[str] = (),
        retained_names: Collection[str] = (),
    ) -> None:
        everyone = self.everyone
        disk, ranks = (
            completeness if self._saver is None else manifest,
            RankGroup(everyone.gather, everyone.rank, local_rank()),
        )
        prune(lineage, keep, has_arrived, disk, ranks, distrusted_names, retained_names)

    def is_any_set(self, flag: bool) -> bool:
        return self.everyone.sum(float(flag))[0] > 0

    def close(self) -> None:
        self.end_save()
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    # Building

    def _build(self) -> CausalLM:
        hf_config = normalise(self.config)
        rotary = Rotary(transformers_config(self.config), hf_config)
        padding = self.config.get("pad_token_id")
        model = PackedCausalLM if self.options.apart else CausalLM
        return model(
            Build(
                hf_config,
                self.layout,
                padding,
                self.dtype,
                self.sequence_parallel,
                rotary,
                self.adapters,
            )
        )

    def _groups(self, weight_decay: float) -> list[dict[str, Any]]:
        replicas = 1 if self.options.zero1 else self.options.dp
        if self.adapters is not None:
            return adapter_groups(
                self.named_parameters(), self.adapters, self.tp_rank, replicas, weight_decay
            )
        return groups(
            self.named_parameters(), self.layout, self.tp_rank, self.pp_rank, replicas, weight_decay
        )

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(NxD's name, parameter) of this rank, without the wrappers' part of the names."""
        return [
            (name.replace("_checkpoint_wrapped_module.", ""), p)
            for name, p in self.model.named_parameters()
        ]

    # Batches

    def _check(
        self,
        input_ids: torch.Tensor,
        segments: torch.Tensor | None,
        references: torch.Tensor | None,
    ) -> None:
        rows, length = input_ids.shape
        if references is not None:
            raise ConfigError(
                "train.objective: dpo is trained by engine native only; set train.engine: native",
                code="config.combination",
            )
        if (segments is not None) != self.options.apart:
            raise ValueError(
                "an engine takes batches with segments if it was built with options.apart, and only"
                " then"
            )
        if rows != self.micro_batches * self.options.micro_batch_size:
            raise ConfigError(
                f"train.global_batch_size: {rows} samples came to a data-parallel rank, the"
                f" pipeline was built for {self.micro_batches} micro-batches of"
                f" {self.options.micro_batch_size}; they must agree",
                code="config.combination",
            )
        if self.sequence_parallel and length % self.options.tp:
            raise ConfigError(
                f"parallel.sequence_parallel cuts {length} tokens (train.seq_len) into"
                f" {self.options.tp} parts (parallel.tp): make train.seq_len a multiple of"
                " parallel.tp",
                code="config.combination",
            )

    def _batch(
        self, input_ids: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Weigh labels so that NxD's mean over micro-batches and data-parallel ranks is the mean
        over all tokens.
        """
        has_label = labels != IGNORED_LABEL
        scale = self.micro_batches * self.dp_size / max(1, self._tokens(labels))
        batch = {
            "input_ids": input_ids,
            # The library's loss knows no ignored label: such a label is any token with weight 0.
            "labels": labels.clamp(min=0),
            "weights": has_label.float() * scale,
        }
        return batch if segments is None else {**batch, "places": places_of(segments)}

    def _tokens(self, labels: torch.Tensor) -> int:
        """The number of labels of the global batch that count."""
        copies = self.options.tp * self.options.pp  # ranks with this same batch
        return round(self.everyone.sum(int((labels != IGNORED_LABEL).sum()) / copies)[0])

    def _micro_batches(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        device = get_device()
        cut = {name: x.split(self.options.micro_batch_size) for name, x in batch.items()}
        return [
            {name: parts[i].to(device) for name, parts in cut.items()}
            for i in range(self.micro_batches)
        ]

    def _backward(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**micro) / self.micro_batches
        # Without the `mark_step` after it, XLA would trace the next micro-batch into this graph.
        loss.backward()
        mark_step()
        return loss.detach()

    def _means(self, numbers: list[float]) -> list[float]:
        """The means of the last stages' numbers, on every rank."""
        # The tensor-parallel ranks of a stage have the same numbers, so one of them adds its.
        own_numbers = numbers if self.last and self.tp_rank == 0 else [0.0] * len(numbers)
        return [total / self.dp_size for total in self.everyone.sum(*own_numbers)]
