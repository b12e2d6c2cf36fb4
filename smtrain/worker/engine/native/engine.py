"""The native engine: stage, pipeline and optimizer as an `Engine`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from smtrain.core.config.training import DpoSection
from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.facts.engines import full_shard_faults
from smtrain.core.model.footprint import IGNORED_LABEL
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint import manifest
from smtrain.worker.checkpoint.native.pruning import ArrivalCheck, RankGroup, prune
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.base import (
    Evaluation,
    OptimizerOptions,
    ParallelOptions,
    ParameterNorms,
    Scaling,
    StepResult,
)
from smtrain.worker.engine.initial_weights import RandomFactors, RandomWeights
from smtrain.worker.engine.native import comm, persist
from smtrain.worker.engine.native.attention import packed_segments
from smtrain.worker.engine.native.comm import Numbers, ProcessMesh, to_device
from smtrain.worker.engine.native.full_shard import FullShardAdamW
from smtrain.worker.engine.native.layers import compilable
from smtrain.worker.engine.native.load_balancing import find_padding
from smtrain.worker.engine.native.norms import parts_of
from smtrain.worker.engine.native.pipeline import MicroBatch, Pipeline
from smtrain.worker.engine.native.preference import PairBatch, PreferenceLoss, pair_counts
from smtrain.worker.engine.native.router_bias import update_bias
from smtrain.worker.engine.native.sharded_weights import (
    ShardedRows,
    ShardedWeights,
    shard_fully,
)
from smtrain.worker.engine.native.stage import Stage
from smtrain.worker.engine.native.zero1 import Zero1AdamW
from smtrain.worker.engine.saving import Saver, local_rank
from smtrain.worker.engine.step_timing import part


class NativeEngine:
    """A Hugging Face causal LM on a tp x pp x cp x dp mesh; build it inside a job that
    `init_distributed` joined.

    `config` is the model's config.json, `weights` the source of its values, None a random start
    from `seed`, the same on every mesh. With `lora` the model is frozen and only adapters
    are trained, initialised from `seed`; checkpoints hold only the adapters. `preference` makes
    steps and evaluations those on pairs. `checkpoint_format` dcp needs full sharding.
    Raises `ConfigError` if the mesh does not fit the job or the model, `CheckpointError` on every
    rank if the weights do not fit.
    """

    def __init__(
        self,
        config: dict[str, Any],
        options: ParallelOptions,
        optimizer: OptimizerOptions,
        weights: WeightSource | RandomWeights | None,
        seed: int,
        lora: Lora | None = None,
        preference: DpoSection | None = None,
        checkpoint_format: Literal["native", "dcp"] = "native",
    ) -> None:
        self.device = comm.current_device()
        self.steps_ahead = 0 if self.device.type == "cpu" else 1
        self.config, self.options = config, (options := compilable(options, self.device.type))
        if self.device.type != "cpu":
            comm.be_deterministic(options.deterministic)
        self.require_owner: Callable[[], None] = lambda: None
        if options.shard == "full":
            faults = full_shard_faults(quantizes=lora is not None and lora.quantize is not None)
            if faults:
                raise ConfigError([*faults.values()], code="config.combination")
        self.shape = ModelShape.from_config(config)
        self.layout = Layout(
            self.shape, options.tp, options.pp, cuts=options.pipeline_cuts or None, ep=options.ep
        )
        self.mesh = ProcessMesh(options, self.device)
        self.rank, self.world_size = self.mesh.rank, self.mesh.world_size
        self.dp_rank, self.dp_size = self.mesh.dp_rank, self.mesh.dp
        self.parameters = self.shape.parameters()
        self.lora = lora
        self.trained_count = (
            self.parameters if lora is None else AdapterShape.of(self.shape, lora).parameters()
        )
        self.stage = Stage(config, self.layout, self.mesh, options, lora, seed)
        is_whole_sharded = self.stage.is_sharded and lora is None
        make_optimizer = FullShardAdamW if is_whole_sharded else Zero1AdamW
        self.optimizer: Zero1AdamW | FullShardAdamW = make_optimizer(
            self.stage, self.mesh, optimizer
        )
        self._bases: list[ShardedWeights[ShardedRows]] = []
        """The frozen weights under an adapter, if their rows are cut; experts may be a second."""
        if self.stage.is_sharded and lora is not None:
            parameters = shard_fully(self.stage, self.mesh)
            self._bases = [ShardedWeights(self.stage.dense, parameters, ShardedRows)]
            if self.mesh.ep > 1:
                self._bases.append(ShardedWeights(self.stage.experts, parameters, ShardedRows))
        # After the optimizer, which takes each parameter's fp32 values before they are rounded.
        self.begin_from(weights or RandomWeights(config, self.shape, seed))
        if lora is not None:
            self.stage.load_adapters(RandomFactors(AdapterShape.of(self.shape, lora), seed))
        self._preference = None if preference is None else PreferenceLoss(preference)
        self.pipeline = Pipeline(self.stage, self.mesh, self._preference)
        whole_model, layers = [""], parts_of(self.stage.trained.layout.shape)
        self._normed: list[str] = {"none": [], "all": whole_model, "layers": layers}[
            options.param_norm
        ]
        has_biases = lora is None and bool(self.stage.router_biases)
        self._updates_biases = has_biases and options.router_bias_update_rate > 0
        self._to_compile = options.compile
        self._numbers: Numbers | None = None
        self._wide = torch.float64 if self.device.type in ("cpu", "cuda") else torch.float32
        contents = persist.StageContents(self)
        if checkpoint_format == "dcp":
            # Here, because torch.distributed.checkpoint takes a while to import.
            from smtrain.worker.engine.native.dcp_save import DcpContents

            contents = DcpContents(self)
        self._saver = Saver(self.mesh, contents, lambda: self.require_owner(), self.device.type)

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
        began = time.perf_counter()
        self._saver.prepare()
        preference = self._preference
        with part("forward and backward"):
            micro_batches = self._micro_batches(input_ids, labels, segments, references)
            counts = (
                [_count_labels(labels)]
                if preference is None
                else pair_counts(labels, segments, references)
            )
            label_counts = [self._count_sum(count) for count in counts]
            # At least 1, so that a batch without labels has loss 0.
            shares = [
                comm.count_of(c, self._wide).clamp(min=1).reciprocal().float() for c in label_counts
            ]
            scale = shares[0] if preference is None else preference.scale(*shares)
            scaling = self.optimizer.loss_scale
            # The tensor of this step: the optimizer's step puts another one in its place.
            scale_before = [] if scaling is None else [scaling.scale]
            scale = scale if scaling is None else scale * scaling.scale
            calls = len(micro_batches) * self.mesh.dp
            aux_scale = torch.full((), 1 / calls, device=self.device)
            aux_scale = aux_scale if scaling is None else aux_scale * scaling.scale
            total = self.pipeline.train(
                micro_batches, scale, self.optimizer.last_backward, aux_scale
            )
        with part("optimizer"):
            self._saver.finish_before_change()
            norm = self.optimizer.step(lr)
        with part("data parallel"):
            routing, size = self.pipeline.routing, total.numel()
            total = torch.cat([total.reshape(-1), routing]) if len(routing) else total
            for group in (
                self.mesh.shard_group,
                self.mesh.pp_group,
            ):  # only the last stages have the sum
                dist.all_reduce(total, group=group)
        if self._updates_biases:
            self._update_router_biases(total[size:], norm)
        norm_squares = [self.optimizer.parameter_squares(self._normed)] if self._normed else []
        values = [
            total,
            *label_counts,
            norm,
            *scale_before,
            *([] if scaling is None else [scaling.scale]),
            *norm_squares,
        ]
        step_numbers = self._numbers = Numbers(values, self._numbers)
        if self._to_compile and self.rank == 0:
            took = time.perf_counter() - began
            print(
                f"train.compile: the first step took {took:.0f} s, in which the layers were"
                " compiled",
                flush=True,
            )
        self._to_compile = False

        def numbers() -> StepResult:
            # Taken apart in the order of `values` above.
            read = step_numbers.read()
            read, squares = (
                read[: len(read) - len(self._normed)],
                read[len(read) - len(self._normed) :],
            )
            sums, read = read[: total.numel()], read[total.numel() :]
            sums, routing_sums = sums[:size], sums[size:]
            words, (grad_norm, *scales) = (
                read[: 2 * len(label_counts)],
                read[2 * len(label_counts) :],
            )
            sizes = [_size(words[at : at + 2]) for at in range(0, len(words), 2)]
            if preference is None:
                result = StepResult(sums[0] / sizes[0], grad_norm, ready=step_numbers.ready)
            else:
                loss, metrics = preference.loss(sums, *sizes), preference.metrics(sums, sizes[0])
                result = StepResult(loss, grad_norm, pairs=metrics, ready=step_numbers.ready)
            if self.stage.balance is not None:
                result = replace(result, routing=self.stage.balance.metrics(routing_sums, calls))
            if squares:
                by_part = (
                    dict(zip(self._normed, map(math.sqrt, squares), strict=True))
                    if len(squares) > 1
                    else {}
                )
                result = replace(
                    result, param_norms=ParameterNorms(math.sqrt(sum(squares)), by_part)
                )
            if not scales:
                return result
            used, following = scales
            return replace(
                result, scaling=Scaling(used, following, is_skipped=not math.isfinite(grad_norm))
            )

        return numbers

    def _update_router_biases(self, routing: torch.Tensor, norm: torch.Tensor) -> None:
        """Update the biases of choices by the loads of a step, the same on all ranks.

        A step whose gradients overflow changes nothing, so its rate is 0.
        """
        balance, rate = self.stage.balance, self.options.router_bias_update_rate * norm.isfinite()
        assert balance is not None
        counts = balance.counts_by_layer(routing)
        for mixture in self.stage.mixtures:
            update_bias(mixture.choice_bias, counts[mixture.layer], rate)

    def evaluate(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        segments: torch.Tensor | None = None,
        references: torch.Tensor | None = None,
    ) -> Evaluation:
        sums = self.pipeline.evaluate(self._micro_batches(input_ids, labels, segments, references))
        dist.all_reduce(sums, group=self.mesh.shard_group)
        dist.all_reduce(sums, group=self.mesh.pp_group)
        if self._preference is None:
            total, correct, tokens = sums.tolist()
            return Evaluation(total / max(1.0, tokens), round(tokens), round(correct))
        counts = pair_counts(labels, segments, references)
        count_sums = [self._count_sum(count).tolist() for count in counts]
        sizes, numbers = [_size(words) for words in count_sums], sums.tolist()
        metrics = self._preference.metrics(numbers, sizes[0])
        pairs = round(sizes[0]) if any(count_sums[0]) else 0
        return Evaluation(
            self._preference.loss(numbers, *sizes),
            pairs,
            round(metrics.accuracy * sizes[0]) if pairs else 0,
            metrics,
            self._preference.answer_loss(numbers, sizes[1]),
            round(sizes[1]),
        )

    def log_probabilities(
        self, input_ids: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor, pairs: int
    ) -> torch.Tensor:
        """The log-probabilities of the answers in a batch as for `step`, fp32 [batch / dp, pairs,
        2] on the host.

        `pairs` is the most of a row; what has no labels gets 0. Collective; the same on the ranks
        of one `dp_rank`.
        """
        no_references = torch.zeros(len(input_ids), pairs, 2)
        log_probs = self.pipeline.log_probabilities(
            self._micro_batches(input_ids, labels, segments, no_references)
        )
        dist.all_reduce(log_probs, group=self.mesh.pp_group)
        return log_probs.cpu()

    def sum_over_data_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of the values of all data-parallel ranks, on the host. Collective."""
        total = to_device(
            values if not self.mesh.cp_rank else torch.zeros_like(values), self.device
        )
        dist.all_reduce(total, group=self.mesh.shard_group)
        return total.cpu()

    def _count_sum(self, count: int) -> torch.Tensor:
        """`comm.count_sum` over the ranks with other rows; ranks that share rows have the same
        count.
        """
        return comm.count_sum(0 if self.mesh.cp_rank else count, self.mesh.shard_group, self.device)

    def begin_from(self, weights: WeightSource | RandomWeights) -> None:
        """Fill in the weights, which no step may have changed yet.

        Raises `CheckpointError` on every rank if they do not fit.
        """
        fault = None
        try:
            self.stage.load(weights, self._taker)
        except CheckpointError as error:
            fault = str(error)
        self.mesh.agree(fault, "the weights cannot be loaded")
        self.stage.settle_quantized()

    @property
    def _taker(self) -> Callable[[str, torch.Tensor], None]:
        """The taker of each parameter's fp32 values."""
        return self.optimizer.take if self.lora is None else self._take_frozen

    def _take_frozen(self, name: str, values: torch.Tensor) -> None:
        """Keep this rank's rows of a frozen parameter, if its rows are cut."""
        for base in self._bases:
            base.take(name, values)

    @torch.no_grad()
    def next_token(self, input_ids: torch.Tensor) -> int:
        """The likeliest token after ids [1, S] of any length, on every rank."""
        length = input_ids.shape[1]
        padded_ids = torch.nn.functional.pad(input_ids, (0, -length % self._parts))
        own_ids = self.mesh.own_tokens(padded_ids).to(self.device)
        h = self.pipeline.hidden_states(own_ids, None)
        token = torch.full((), -1.0, device=self.device)  # below every token of the last stage
        places = self.mesh.own_tokens(torch.arange(padded_ids.shape[1], device="cpu")[None])[
            0
        ].tolist()
        if h is not None:
            likeliest = self.stage.likeliest(h)
            token = (
                likeliest[0, places.index(length - 1)].float() if length - 1 in places else token
            )
        for group in (self.mesh.pp_group, self.mesh.cp_group):
            if group is not None:
                dist.all_reduce(token, op=dist.ReduceOp.MAX, group=group)
        return int(token)

    @torch.no_grad()
    def logits(
        self, input_ids: torch.Tensor, segments: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Logits [batch, sequence, vocabulary], fp32 on the CPU, on the ranks of the last pipeline
        stage; else None.
        """
        self._check_length(input_ids)
        h = self.pipeline.hidden_states(
            self.mesh.own_tokens(input_ids).to(self.device), packed_segments(segments)
        )
        if h is None:
            return None
        local = self.stage.local_logits(h).float()
        all_logits = (
            comm.all_gather(local, self.mesh.tp_group, dim=2) if self.mesh.tp > 1 else local
        )
        if self.mesh.cp_group is not None:
            all_logits = self.mesh.in_row_order(
                comm.all_gather(all_logits, self.mesh.cp_group, dim=1), 1
            )
        return all_logits[..., : self.shape.vocab].cpu()

    def save(self, folder: Path, step: int, state: dict[str, Any]) -> None:
        self._saver.begin(Path(folder), step, state, copy=False)
        self._saver.end()

    def begin_save(
        self, folder: Path, step: int, state: dict[str, Any], read_back: bool = True
    ) -> None:
        self._saver.begin(Path(folder), step, state, read_back=read_back)

    def end_save(self, wait: bool = True) -> int | None:
        return self._saver.end(wait)

    def abandon_save(self) -> None:
        self._saver.abandon()

    def load(self, checkpoint: Path, read: dict[str, int] | None = None) -> dict[str, Any]:
        self._saver.finish_before_change()
        return persist.load(self, Path(checkpoint), read)

    def prune(
        self,
        lineage: Lineage,
        keep: int,
        has_arrived: ArrivalCheck | None = None,
        distrusted_names: Collection[str] = (),
        retained_names: Collection[str] = (),
    ) -> None:
        mesh = self.mesh
        prune(
            lineage,
            keep,
            has_arrived,
            manifest,
            RankGroup(mesh.gather, mesh.rank, local_rank()),
            distrusted_names,
            retained_names,
        )

    def is_any_set(self, flag: bool) -> bool:
        return self.mesh.is_any_set(flag)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _micro_batches(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        segments: torch.Tensor | None,
        references: torch.Tensor | None = None,
    ) -> list[MicroBatch]:
        self._check_length(input_ids)
        size = self.options.micro_batch_size
        own_tensors = [self.mesh.own_tokens(tensor) for tensor in (input_ids, labels)]
        loss = self.stage.loss
        # From the host's labels: the count decides shapes, and reading the device's would wait.
        labelled_rows = [
            None if loss is None else loss.select_labelled(chunk)
            for chunk in torch.split(own_tensors[1], size)
        ]
        inputs, targets = (torch.split(to_device(x, self.device), size) for x in own_tensors)
        segment_chunks = (
            [None] * len(inputs)
            if segments is None
            else [packed_segments(s) for s in torch.split(segments, size)]
        )
        first = range(self.dp_rank * len(input_ids), (self.dp_rank + 1) * len(input_ids), size)
        places = [(self.optimizer.steps, sample) for sample in first]
        pairs: list[PairBatch | None] = [None] * len(inputs)
        if references is not None:
            assert segments is not None
            parts = zip(torch.split(segments, size), torch.split(references, size), strict=True)
            pairs = [PairBatch.of(*chunk_pair, self.mesh) for chunk_pair in parts]
        padding: list[torch.Tensor | None] = [None] * len(inputs)
        if self.stage.balance is not None and segments is not None:
            label_chunks = torch.split(labels, size), torch.split(segments, size)
            padding = [find_padding(*chunks) for chunks in zip(*label_chunks, strict=True)]
        return [
            MicroBatch(*parts)
            for parts in zip(
                inputs, targets, segment_chunks, places, pairs, labelled_rows, padding, strict=True
            )
        ]

    @property
    def _parts(self) -> int:
        """The parts into which a row is cut."""
        return self.mesh.cp * (self.mesh.tp if self.stage.sequence_parallel else 1)

    def _check_length(self, input_ids: torch.Tensor) -> None:
        length = input_ids.shape[1]
        if self.shape.positions is not None and length > self.shape.positions:
            raise ConfigError(
                [
                    f"train.seq_len: {length} is beyond the {self.shape.positions} positions that"
                    " the model has learned"
                ],
                code="config.combination",
            )
        if self.mesh.cp > 1 and length % self._parts:
            raise ConfigError(
                [
                    f"parallel.cp: {length} tokens (train.seq_len) cannot be cut into {self._parts}"
                    f" parts; make train.seq_len a multiple of {self._parts}"
                ],
                code="config.combination",
            )
        if self.stage.sequence_parallel and length % self.mesh.tp:
            raise ConfigError(
                [
                    f"parallel.sequence_parallel cuts {length} tokens (train.seq_len) into"
                    f" {self.mesh.tp} parts (parallel.tp): make train.seq_len a multiple of"
                    " parallel.tp"
                ],
                code="config.combination",
            )


def _size(words: Sequence[float]) -> float:
    """The count of two words of `comm.count_sum`, at least 1."""
    return max(1.0, comm.count_of(torch.tensor(words, dtype=torch.float64), torch.float64).item())


def _count_labels(labels: torch.Tensor) -> int:
    """The labels that count, of a batch on the host."""
    return int((labels.numpy(force=True) != IGNORED_LABEL).sum())
