"""One (tp, pp) rank's part of a Hugging Face causal LM.

The model is transformers' own, built without memory on `meta`. Layers of other stages are dropped,
every other parameter gets its local shape, and tensor-parallel collectives are put before attention
and MLP and after linears whose columns are cut. There is no second model code, so it equals
transformers by construction.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from smtrain.core.errors import ConfigError
from smtrain.core.model.blocks import Role
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import A, AdapterShape, B, Lora, stage_faults
from smtrain.core.model.quantized import cut_faults, is_quantized
from smtrain.core.model.transformers_build import (
    base_of,
    build_rotary,
    check_model,
    rotary_arguments,
    rotary_of,
    scales_by_cache_position,
    transformers_config,
)
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.nf4 import functional
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.initial_weights import RandomFactors, RandomWeights, name_in
from smtrain.worker.engine.native import attention_function, comm
from smtrain.worker.engine.native.attention import AttentionContext
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.cross_entropy import Columns
from smtrain.worker.engine.native.experts import Mixture
from smtrain.worker.engine.native.experts_next_to_mlp import ExpertsNextToMlp
from smtrain.worker.engine.native.fused_loss import LabelledRows, LinearCrossEntropy
from smtrain.worker.engine.native.gated_delta import cut_net, keep_apart
from smtrain.worker.engine.native.gradients import FlatParameters, Gradients, Writing
from smtrain.worker.engine.native.layers import Layers
from smtrain.worker.engine.native.linears import (
    Embedding,
    HandedOver,
    Linear,
    RowParallel,
    WideNorm,
)
from smtrain.worker.engine.native.load_balancing import Balance
from smtrain.worker.engine.native.lora import Dropout, Factors
from smtrain.worker.engine.native.quantized import QuantizedWeight

log = logging.getLogger(__name__)
_DROPOUT = (
    "attention_dropout",
    "residual_dropout",
    "hidden_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
)
"""Keys of config.json with the share of numbers that a training drops."""


class Stage(nn.Module):
    """The layers of pipeline rank `mesh.pp_rank`, cut for tensor-parallel rank `mesh.tp_rank`,
    without values yet.

    With `lora` the model's own parameters are frozen, and adapters next to its linears are trained.
    """

    def __init__(
        self,
        config: dict[str, Any],
        layout: Layout,
        mesh: ProcessMesh,
        options: ParallelOptions,
        lora: Lora | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layout, self.mesh = layout, mesh
        self.dtype: torch.dtype = getattr(torch, BY_PRECISION[options.precision].name)
        self.sequence_parallel = options.sequence_parallel and mesh.tp > 1
        self.is_sharded = options.shard == "full" and mesh.shards > 1
        """Whether `full_shard` gives the parameters their values and cuts them over `mesh.shards`;
        they stay on `meta` until then.
        """
        self.first, self.last = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp - 1
        self.described = normalise(config)
        self._embedding_scale = self.described.scales.get("embedding", 1.0)
        if (
            layout.shape.rules.root_embedding
        ):  # rounded, as the published weights were trained with it
            self._embedding_scale = float(torch.tensor(layout.shape.hidden**0.5, dtype=self.dtype))
        self.config = transformers_config(config)
        for key in _DROPOUT:
            if getattr(self.config, key, 0):
                value = getattr(self.config, key)
                log.warning(
                    "config.json has %s = %s: the native engine trains without dropout", key, value
                )
        implementation = attention_function.register(options.compile)
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self.config, attn_implementation=implementation, dtype=self.dtype
            )
        # Not train(): dropout would need random state in every checkpoint, and pre-training uses
        # none.
        self.model.eval()
        self.balance = None if layout.shape.experts is None else self._balance(options, lora)
        self._capacity = options.expert_capacity
        self.quantized: dict[str, QuantizedWeight] = {}
        """The weights that are kept in 4 bits, by name; their modules' parameters stay on `meta`.
        """
        self._scales: dict[str, torch.Tensor] = {}
        """Scales of their blocks that are not quantised yet."""
        self._keep_own_part()
        self._make_parameters(lora is not None, lora is not None and lora.quantize is not None)
        if mesh.tp > 1:
            self._insert_collectives()
        if mesh.cp > 1:
            self._check_cut_rows()
        self.trained, self.dropout = self.dense, None
        self.trained_experts = self.experts if self.experts is not self.dense else None
        """The parameters of experts, if they are divided over other ranks than `trained`."""
        if lora is not None:
            self.dropout = Dropout(lora.dropout, seed, mesh) if lora.dropout else None
            self._adapt(lora)
        self.writing: dict[str, Writing] = {}
        """Modules and parameters whose weight's gradient goes to a `sink`, by the name of the
        weight in files.
        """
        # FSDP2 takes the gradients that torch accumulates.
        if lora is None and not self.is_sharded:
            self._find_writing(options.compile)
            for mixture in self.mixtures:  # which is never compiled
                self.writing |= mixture.writing
        self.loss = self._loss(options.compile) if self.last else None
        self.before_layer: Callable[[int], None] = lambda layer: (
            None
        )  # called once more after the last
        stateful = [state for state in (self.dropout, self.balance) if state is not None]
        self.layers = Layers(self.blocks, self.mixers, options, stateful, mesh.device.type)
        self.context = AttentionContext(
            self.rotary,
            self._attention_windows(),
            self.dtype,
            mesh,
            [kind.widest_head for kind in layout.shape.by_layer],
            options.compile,
            layout.shape.rules.sinks,
        )

    def named_own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (file name, local parameter) of this rank; a tied matrix of one stage comes
        once.
        """
        parameters = {**self.dense.parameters, **self.experts.parameters}
        yield from (
            (name, parameters[name])
            for name in self.layout.names(self.mesh.pp_rank)
            if name in parameters
        )

    # Building

    def _keep_own_part(self) -> None:
        shape, base = self.layout.shape, base_of(self.model, self.described)
        with self.mesh.device:
            build_rotary(base)
        self._rotary_arguments = rotary_arguments(base)
        self.model.tie_weights()  # transformers 5.0 does not do it on `meta`
        check_model(self.model, self.described)
        family = FAMILIES[shape.family]
        layers = getattr(base, family.layers)
        own_layers = nn.ModuleDict(
            {str(i): layers[i] for i in self.layout.layers(self.mesh.pp_rank)}
        )
        # Keyed by the layer's number in the model, so that parameters keep their names in files.
        setattr(base, family.layers, own_layers)
        # After `tie_weights`: a tied matrix stays on the last stage, as the weight of its head.
        for name in (family.embed, family.positions) if not self.first else ():
            if name is not None:
                setattr(base, name, None)
        if not self.last:
            setattr(base, family.norm, None)
            self.model.set_output_embeddings(None)
        if (
            self.first and family.root_embedding
        ):  # its own class multiplies; `_scale_embeddings` does, on any mesh
            setattr(base, family.embed, _plain_embedding(getattr(base, family.embed)))
        self.embed: nn.Embedding | Embedding | None = getattr(base, family.embed)
        self.norm: nn.Module | None = getattr(base, family.norm)
        self.rotary = {
            sliding: rotary_of(base, self.described, sliding).turn
            for sliding in self.described.ropes
        }
        self.positions: nn.Embedding | None = (
            getattr(base, family.positions) if family.positions else None
        )
        self.blocks: list[Any] = list(own_layers.values())
        for block in (
            self.blocks if family.full_sizes else ()
        ):  # Gemma 4: for assistants that share keys and values
            block.self_attn.store_full_length_kv = False
        self._scales_by_cache_position = scales_by_cache_position(self.blocks[0], self.described)
        self.mixers: list[Any] = []
        """The module of each block that looks at other tokens: attention, or a gated delta net."""
        self.mlps: list[Any] = []
        """The module of each block that looks at each token."""
        self.mixtures: list[Mixture] = []
        """The layers' experts."""
        for i, block in zip(self.layout.layers(self.mesh.pp_rank), self.blocks, strict=True):
            net = shape.by_layer[i].delta is not None
            self.mixers.append(getattr(block, (family.linear or "") if net else family.attention))
            if net:
                keep_apart(self.mixers[-1], self.mesh if self.mesh.cp > 1 else None)
            self.mlps.append(self._mlp(i, block))

    def _mlp(self, layer: int, block: Any) -> nn.Module:
        """The MLP of a block; its experts are replaced by ours."""
        name = "mlp" if hasattr(block, "mlp") else "block_sparse_moe"  # Mixtral in transformers 4
        if self.layout.shape.by_layer[layer].experts is not None:
            pair = self.layout.shape.family == "gpt_oss" or name != "mlp"
            args = (
                *(layer, self.layout, self.mesh, self.described, self.balance, self._capacity),
                *(getattr(block, name), pair),
            )
            mixture: Mixture
            if hasattr(block, "experts"):
                mixture = block.experts = ExpertsNextToMlp(*args, block=block)
            else:
                mixture = Mixture(*args)
                setattr(block, name, mixture)
            self.mixtures.append(mixture)
        mlp: nn.Module = getattr(block, name)
        return mlp

    def _balance(self, options: ParallelOptions, lora: Lora | None) -> Balance:
        assert self.described.routing is not None
        aux = options.aux_loss
        if aux is None:  # adapters leave the router as it is, and only those of experts follow it
            aux = self.described.routing.aux if lora is None or lora.of_experts else 0.0
        layers = self.layout.layers(self.mesh.pp_rank)
        return Balance(self.layout.shape, layers, self.mesh, aux, options.aux_by_layer)

    def _make_parameters(self, is_frozen: bool, quantizes: bool) -> None:
        """Make all parameters views of one flat buffer, but for those that are quantised."""
        mesh, layout = self.mesh, self.layout
        buffer_args = self.dtype, mesh.device, mesh.tp_rank
        if self.is_sharded:
            # Trained rows are their own masters; those of an adapter's base are frozen.
            dtype = self.dtype if is_frozen else torch.float32
            buffer_args = dtype, torch.device("meta"), mesh.tp_rank
        if quantizes:
            self._make_quantized()
        self.dense = FlatParameters.of(
            layout,
            layout.flat_table(mesh.pp_rank, excluded_names=self.quantized),
            mesh.replicas,
            *buffer_args,
        )
        self.experts = self.dense
        if mesh.ep > 1:
            self.experts = FlatParameters.of(
                layout,
                layout.flat_table(mesh.pp_rank, mesh.ep_rank),
                mesh.expert_replicas,
                *buffer_args,
            )
        parameters = self.dense.parameters
        # With duplicates: both modules of a tied matrix must get the same view.
        for module_name, _ in list(self.model.named_parameters(remove_duplicate=False)):
            name = self.layout.shape.file_name(module_name)
            module, _, leaf = module_name.rpartition(".")
            parameter = (
                parameters[name] if name in parameters else self.quantized[name].placeholder()
            )
            setattr(self.model.get_submodule(module), leaf, parameter)
        # Stored numbers that are not trained: parameters without a gradient, so that checkpoints
        # hold them too.
        for name in [name for name, _ in self.model.named_buffers() if name in parameters]:
            module, _, leaf = name.rpartition(".")
            delattr(self.model.get_submodule(module), leaf)
            setattr(self.model.get_submodule(module), leaf, parameters[name].requires_grad_(False))
        self.router_biases = {
            name: torch.zeros(layout.spec(name).shape, dtype=torch.float32, device=mesh.device)
            for name in layout.names(mesh.pp_rank)
            if layout.spec(name).role is Role.ROUTER_BIAS
        }
        """The biases of choices by name, which no optimizer updates."""
        for mixture in self.mixtures:
            mixture.take(self.dense, self.experts, self.router_biases)

    def _make_quantized(self) -> None:
        """Prepare the linears whose weights are quantised when they are loaded."""
        layout, mesh = self.layout, self.mesh
        functional()  # before weights are read
        if faults := [*cut_faults(layout.shape, mesh.tp)]:
            raise ConfigError(faults, code="config.combination")
        for name in layout.names(mesh.pp_rank):
            if is_quantized(spec := layout.spec(name)):
                out, into = layout.local_shape(name, mesh.tp_rank)
                shard = layout.shard(name, mesh.tp_rank)
                self.quantized[name] = QuantizedWeight(
                    (out, into), (spec.shape[0], spec.shape[1]), shard
                )

    def _adapt(self, lora: Lora) -> None:
        """Freeze the model's parameters and attach trained fp32 factors to the linears that `lora`
        names.
        """
        self.model.requires_grad_(False)
        shape = AdapterShape.of(self.layout.shape, lora)
        cuts = self.layout.uneven
        if faults := stage_faults(shape, self.mesh.pp, cuts):
            raise ConfigError(faults, code="config.combination")
        mesh, ep = self.mesh, self.mesh.ep if lora.of_experts else 1
        layout = Layout(shape, mesh.tp, mesh.pp, cuts=cuts or None, ep=ep)
        buffer_args = torch.float32, mesh.device, mesh.tp_rank
        self.trained = FlatParameters.of(
            layout, layout.flat_table(mesh.pp_rank), mesh.replicas, *buffer_args
        )
        self.trained_experts, experts = None, self.trained.parameters
        if ep > 1:
            table = layout.flat_table(mesh.pp_rank, mesh.ep_rank)
            self.trained_experts = FlatParameters.of(
                layout, table, mesh.expert_replicas, *buffer_args
            )
            experts = self.trained_experts.parameters
        for mixture in self.mixtures:
            mixture.adapt(experts, lora, self.dropout)
        for name in (
            n for n in self.trained.parameters if n.endswith(A) and not layout.spec(n).of_experts
        ):
            module_name = name.removesuffix(A)
            cut = layout.shard(name, self.mesh.tp_rank)
            width = layout.spec(name).shape[1]
            input_ranges = ((0, width),) if cut.dim is None else cut.ranges
            factor_pair = (self.trained.parameters[name], self.trained.parameters[module_name + B])
            factors = Factors(
                module_name, *factor_pair, lora.scale, width, input_ranges, self.dropout
            )
            self._own_linear(module_name).factors = factors
        for name, weight in self.quantized.items():
            self._own_linear(name.removesuffix(".weight")).quantized = weight

    def _own_linear(self, module_name: str) -> Linear | RowParallel:
        """The model's linear as a module of ours."""
        linear: Any = self.model.get_submodule(module_name)
        return (
            linear
            if isinstance(linear, (Linear, RowParallel))
            else self._replace(module_name, Linear(linear))
        )

    def _insert_collectives(self) -> None:
        layout, tp = self.layout, self.mesh.tp

        def entry(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": self._enter(kwargs["hidden_states"])}
            return (self._enter(args[0]), *args[1:]), kwargs

        for mixture in self.mixtures:
            mixture.divide(self._enter, self._leave)
        for i, attention, mlp in zip(
            layout.layers(self.mesh.pp_rank), self.mixers, self.mlps, strict=True
        ):
            if hasattr(attention, "conv1d"):
                cut_net(attention, tp)
            kv_heads = len(layout.kv_slots(self.mesh.tp_rank, layout.shape.by_layer[i].kv_heads))
            if layout.shape.rules.fused:  # its forward pass cuts the product by these
                # A copy, as all layers share one config, from which Phi-3 reads the heads of q.
                attention.config = copy.copy(attention.config)
                attention.config.num_attention_heads = layout.shape.heads // tp
                attention.num_key_value_heads = kv_heads
            if layout.shape.qk_norm == "wide":
                self._widen_norms(attention)
            if hasattr(attention, "split_size"):  # GPT-2: the size of q, of k and of v
                attention.split_size = layout.shape.heads // tp * layout.shape.head_dim
            if hasattr(attention, "num_key_value_groups"):
                # Not the model's ratio: if key/value heads are repeated over ranks, a rank has
                # fewer queries for each.
                attention.num_key_value_groups = layout.shape.heads // tp // kv_heads
            for module in (attention, mlp):
                module.register_forward_pre_hook(entry, with_kwargs=True)
        for name, module in list(self.model.named_modules()):
            if not isinstance(module, (nn.Linear, Conv1D)):
                continue
            is_transposed = isinstance(module, Conv1D)
            # Conv1D has its inputs first, so a cut of the inputs is dimension 0 there.
            file_name = layout.shape.file_name(f"{name}.weight")
            dim = layout.shard(file_name, self.mesh.tp_rank).dim
            if dim == (0 if is_transposed else 1):
                # A mixture adds the ranks' shares up, with those of the other experts.
                is_share = layout.spec(file_name).role is Role.SHARED_ROW
                leave = _leave_as_it_is if is_share else self._leave
                self._replace(name, RowParallel(module, leave, is_transposed))
            elif is_transposed:
                # transformers' Conv1D shapes its output by `nf`, not by its weight.
                module.nf = module.weight.shape[1]

    def _check_cut_rows(self) -> None:
        if faults := self.layout.shape.mesh_faults(self.mesh.tp, self.mesh.pp, cp=self.mesh.cp):
            raise ConfigError(faults, code="config.combination")

    def _attention_windows(self) -> tuple[int | Literal["state"] | None, ...]:
        """Each layer's view of a row, for `AttentionContext`."""
        by_layer = zip(self.described.windows, self.layout.shape.by_layer, strict=True)
        return tuple(window if kind.delta is None else "state" for window, kind in by_layer)

    def _widen_norms(self, attention: Any) -> None:
        """Let the norms over all heads see those of the other ranks."""
        shape, group = self.layout.shape, self.mesh.tp_group
        for name, heads, copies in (
            ("q_norm", shape.heads, 1),
            ("k_norm", shape.kv_heads, self.layout.kv_multiplier),
        ):
            norm = getattr(attention, name)
            rounds_first = not shape.rules.wide_norms
            wide_norm = WideNorm(norm, heads * shape.head_dim, copies, group, rounds_first)
            setattr(attention, name, wide_norm)

    def _find_writing(self, is_compiled: bool) -> None:
        """Replace modules whose weights are used only once by ours, but not in layers that are
        compiled.

        A compiled graph has no place for a sink, so autograd hands the gradients of its parameters
        over.
        """
        # A matrix shared with the head gets two gradients in a micro-batch, and a sink takes one:
        # torch accumulates the embedding's, and `share_head` adds the loss's.
        shares_head = self._shares_head
        compiled_ids = (
            {id(p) for block in self.blocks for p in block.parameters()} if is_compiled else set()
        )
        for name, module in list(self.model.named_modules()):
            replacement: Any = None
            if id(getattr(module, "weight", None)) in compiled_ids:
                continue
            if (
                isinstance(module, nn.Embedding)
                and module is self.embed
                and not shares_head
                # With tp > 1 `_embed` reads the weight itself and never calls the module.
                and self.mesh.tp == 1
            ):
                self.embed = replacement = Embedding(module)
            elif type(module) is nn.Linear and not (
                shares_head and module is self.model.get_output_embeddings()
            ):
                replacement = Linear(module)
            elif isinstance(module, RowParallel) and not module.turned:
                replacement = module
            if replacement is not None:
                self._replace(name, replacement)
                self.writing[self.layout.shape.file_name(f"{name}.weight")] = replacement
        for name, parameter in self.dense.parameters.items():
            if id(parameter) in compiled_ids and parameter.requires_grad:
                self.writing[name] = HandedOver(parameter)

    def _replace(self, name: str, replacement: Any) -> Any:
        """Put another module in the place of the model's module `name`; returns it."""
        parent, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(parent), leaf, replacement)
        return replacement

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        """Make activations whole for a tensor-parallel region."""
        move = comm.gather_sequence if self.sequence_parallel else comm.copy_to
        return move(x, self.mesh.tp_group)

    def _leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum the results of the ranks of a tensor-parallel region."""
        move = comm.scatter_sequence if self.sequence_parallel else comm.reduce_from
        return move(x, self.mesh.tp_group)

    # Values

    @torch.no_grad()
    def load(
        self, source: WeightSource | RandomWeights, keep: Callable[[str, torch.Tensor], None]
    ) -> None:
        """Read this rank's slices; `keep` gets each parameter's fp32 values before they are rounded
        to its dtype.

        Raises `CheckpointError` if a parameter is missing or has another shape.
        """
        names = set(source.names())
        self._load_quantized(source, names)
        for name, parameter in self.named_own_parameters():
            stored_name = name_in(source, names, self.layout, name)
            # Filled on the host: a cut along columns is a write into slices, for which Neuron has
            # no kernel.
            direct = parameter.dtype == torch.float32 and parameter.device.type == "cpu"
            wide = parameter if direct else torch.empty(parameter.shape)
            self._fill(
                self.layout,
                name,
                wide,
                lambda *cut, stored_name=stored_name: source.read(stored_name, *cut),
            )
            if wide is not parameter:
                keep(name, wide)
                parameter.copy_(wide)
        for name, bias in self.router_biases.items():
            bias.copy_(source.read(name_in(source, names, self.layout, name)))

    def _load_quantized(self, source: WeightSource | RandomWeights, names: set[str]) -> None:
        """Quantise this rank's parts as they are read: one of them exists in full at a time."""
        for name, weight in self.quantized.items():
            stored_name = name_in(source, names, self.layout, name)
            wide = torch.empty(weight.shape)
            self._fill(
                self.layout,
                name,
                wide,
                lambda *cut, stored_name=stored_name: source.read(stored_name, *cut),
            )
            scales = weight.quantize(wide.to(self.dtype))
            if self.mesh.tp == 1:
                weight.settle(scales, None, self.mesh.device)
            else:
                self._scales[name] = scales

    def settle_quantized(self) -> None:
        """Quantise the scales together with the other tensor-parallel ranks, after all have read
        their weights.
        """
        for name, scales in self._scales.items():
            self.quantized[name].settle(scales, self.mesh.tp_group, self.mesh.device)
        self._scales.clear()

    @torch.no_grad()
    def load_adapters(self, source: RandomFactors) -> None:
        """Fill this rank's parts of the factors."""
        for flat_parameters in filter(None, (self.trained, self.trained_experts)):
            for name, parameter in flat_parameters.parameters.items():
                values = torch.empty(parameter.shape)
                self._fill(
                    flat_parameters.layout,
                    name,
                    values,
                    lambda *cut, name=name: source.read(name, *cut),
                )
                parameter.copy_(values)

    def _fill(
        self, layout: Layout, name: str, parameter: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> None:
        shard = layout.shard(name, self.mesh.tp_rank)
        if layout.ep > 1 and layout.spec(name).is_stacked:
            # A source cuts along one dimension: it cuts the experts, and `dim` is cut here.
            own_experts = layout.experts(self.mesh.ep_rank)
            block = read(0, own_experts.start, own_experts.stop)

            def read(dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
                return block if dim is None else block.narrow(dim, start, stop - start)

        if shard.dim is None:
            parameter.copy_(read())
            return
        at = 0
        for start, stop in shard.ranges:
            if start < stop:
                parameter.narrow(shard.dim, at, stop - start).copy_(read(shard.dim, start, stop))
            at += stop - start
        # Rows beyond the vocabulary stay 0, or they would count in the norms of parameters.
        parameter.narrow(shard.dim, at, shard.size - at).zero_()

    # Forward

    def hidden_shape(self, input_ids: torch.Tensor) -> tuple[int, int, int]:
        """The shape of the hidden states between stages for a micro-batch of these ids."""
        batch, length = input_ids.shape
        return (
            batch,
            length // (self.mesh.tp if self.sequence_parallel else 1),
            self.layout.shape.hidden,
        )

    def loss_sum(
        self,
        h: torch.Tensor,
        labels: torch.Tensor,
        scale: torch.Tensor,
        labelled_rows: LabelledRows | None = None,
    ) -> torch.Tensor:
        """The sum of the losses of final hidden states, fp32 []; `LinearCrossEntropy.sum` has its
        gradient.
        """
        return self._last_loss.sum(self._head_input(h), labels, scale, labelled_rows)

    def token_losses(
        self, h: torch.Tensor, labels: torch.Tensor, labelled_rows: LabelledRows | None = None
    ) -> torch.Tensor:
        """The loss of each token of final hidden states, fp32 [B, S]; 0 without a label."""
        return self._last_loss.token_losses(self._head_input(h), labels, labelled_rows)

    def evaluate(
        self, h: torch.Tensor, labels: torch.Tensor, labelled_rows: LabelledRows | None = None
    ) -> torch.Tensor:
        """[3]: sum of losses, labels that are the likeliest token, and labels; without a
        gradient.
        """
        return self._last_loss.evaluate(self._head_input(h), labels, labelled_rows)

    def likeliest(self, h: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each position of final hidden states, int64 [B, S], on all tp
        ranks.
        """
        return self._last_loss.likeliest(self._head_input(h))

    def local_logits(self, h: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits [B, S, ceil(V / tp)], with the padding of the
        vocabulary.
        """
        return self._last_loss.logits(self._head_input(h))

    def share_head(self, gradients: Gradients) -> None:
        """Let the loss add its gradient of a matrix shared with this stage's embedding to the
        trained ones.
        """
        if self.loss is not None and self._shares_head:
            self.loss.shared = gradients.shared_sink(self.layout.shape.embed_name)

    @property
    def _shares_head(self) -> bool:
        """Whether the output matrix is also the embedding of this stage."""
        return (
            self.last
            and self.embed is not None
            and self.model.get_output_embeddings().weight is self.embed.weight
        )

    @property
    def _last_loss(self) -> LinearCrossEntropy:
        assert self.loss is not None, "only the last stage has logits"
        return self.loss

    def _head_input(self, h: torch.Tensor) -> torch.Tensor:
        """Hidden states for this rank's columns of the output matrix."""
        return self._enter(h) if self.mesh.tp > 1 else h

    def _loss(self, fast: bool) -> LinearCrossEntropy:
        mesh, head = self.mesh, self.model.get_output_embeddings()
        rows = len(head.weight)
        start = mesh.tp_rank * rows
        # If tp does not divide the vocabulary, the last ranks have fewer tokens than columns, or 0.
        valid = max(0, min(rows, self.layout.shape.vocab - start))
        columns = Columns(start, valid, mesh.tp_group if mesh.tp > 1 else None)
        # transformers applies these scales in the model's forward pass, which is not called
        return LinearCrossEntropy(head, columns, self.described.scales, mesh.device, fast)

    def hidden_states(self, x: torch.Tensor, segments: torch.Tensor | None = None) -> torch.Tensor:
        """Run this stage's layers, and the final norm on the last stage; attention stays within
        `segments`, which have whole rows.
        """
        # Sequence parallelism cuts hidden states between stages; token ids always have whole rows.
        length = x.shape[1] * (self.mesh.tp if self.sequence_parallel and not self.first else 1)
        positions, rotary, masks = self.context(x.shape[0], length, segments)
        return self.run_gathered(x, lambda x: self._run_layers(x, positions, rotary, masks))

    def run_gathered(
        self, x: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """`run` of `x`; with full sharding FSDP2 gathers embedding, norm and output matrix before
        it. Only `x`, as FSDP2 moves all tensors that it sees to the device.
        """
        return run(x)

    def _run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, rotary: Any, masks: Any
    ) -> torch.Tensor:
        # Embeddings are read before the loop, and their new weights may still be on the way.
        self.before_layer(0)
        h = self._embed(x) if self.first else x
        if self.positions is not None:
            own_positions = (
                positions.chunk(self.mesh.tp, 1)[self.mesh.tp_rank]
                if self.sequence_parallel
                else positions
            )
            h = h + self.positions(
                own_positions.clamp(max=self.described.positions - 1)
            )  # beyond that there is only padding
        for at, (i, block) in enumerate(
            zip(self.layout.layers(self.mesh.pp_rank), self.blocks, strict=True)
        ):
            self.before_layer(at)
            kwargs = {"attention_mask": masks[i]}
            if rotary[i] is not None:
                kwargs |= self.position_arguments(positions, rotary[i])
            h = self.layers(block, h, **kwargs)
        self.before_layer(len(self.blocks))
        return self.norm(h) if self.norm is not None else h

    def position_arguments(self, positions: torch.Tensor, rotary: Any) -> dict[str, Any]:
        """A block's arguments for positions [B, S], and the cosines and sines that belong to them."""
        arguments = {"position_ids": positions, **dict.fromkeys(self._rotary_arguments, rotary)}
        if self._scales_by_cache_position:
            arguments["cache_position"] = positions[:, None]  # one axis more, for the heads
        return arguments

    def _scale_embeddings(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings if self._embedding_scale == 1 else embeddings * self._embedding_scale

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.embed is not None
        if self.mesh.tp == 1:
            all_embeddings: torch.Tensor = self.embed(ids)
            return self._scale_embeddings(all_embeddings)
        weight, padding = self.embed.weight, self.embed.padding_idx
        rows = weight.shape[0]
        start = self.mesh.tp_rank * rows
        local = ids - start
        is_own = (local >= 0) & (local < rows)
        if padding is not None:
            padding = padding - start if 0 <= padding - start < rows else None
        # `clamp`, because an index outside is an error; the product with `is_own` makes such rows
        # 0, and the sum over the ranks then has one addend for each token.
        own_embeddings = F.embedding(local.clamp(0, rows - 1), weight, padding_idx=padding)
        return self._scale_embeddings(
            self._leave(own_embeddings * is_own[..., None].to(own_embeddings.dtype))
        )


def _leave_as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _plain_embedding(embedding: nn.Embedding) -> nn.Embedding:
    """An embedding of torch with the same weight."""
    rows, width = embedding.weight.shape
    plain = nn.Embedding(
        rows, width, embedding.padding_idx, device="meta", dtype=embedding.weight.dtype
    )
    plain.weight = embedding.weight
    return plain
