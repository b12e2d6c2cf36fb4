"""Write Megatron-core's `torch_dist` form: chunks of the whole model's tensors, independent of any
mesh.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from smtrain.core.model.layout import Shard
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.megatron.args import arguments
from smtrain.worker.checkpoint.megatron.fused_source import FusedCut, FusedSource
from smtrain.worker.checkpoint.megatron.legacy import TRACKER
from smtrain.worker.checkpoint.megatron.legacy_writer import ITERATION, REPLACES, stage_layers
from smtrain.worker.checkpoint.megatron.names import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LAYER,
    FusedTensor,
    canonical,
    has_two_names,
    spell_key,
    table,
)
from smtrain.worker.checkpoint.megatron.torch_dist import METADATA_JSON
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.targets import Megatron
from smtrain.worker.checkpoint.tensor_files import Tensor
from smtrain.worker.checkpoint.torch_files import zip_writer as torchzip_writer
from smtrain.worker.checkpoint.torch_files.distributed import METADATA
from smtrain.worker.checkpoint.torch_files.distributed_writer import (
    WrittenChunk,
    lay_out_files,
    metadata_of,
)
from smtrain.worker.checkpoint.torch_files.pickling import Name, New, dumps

_EMPTY_STATE_FILE, _EMPTY_STATE = (
    "__states_0.distcp",
    torchzip_writer.save_object("archive", dumps([None])),
)
"""The state of Transformer Engine's layers without fp8: None, stored once for all of them."""
# Modules of TE whose _extra_state Megatron-core asks for when it loads.
_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj")
_ATTENTION = "self_attention.core_attention"
_LINEARS = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class _FusedChunk(WrittenChunk):
    """A part of a stored tensor; `name` is a key of `megatron.names.table`, a second half ends in
    +.
    """

    rows: tuple[int, int] = (0, 0)
    """Its rows of the tensor of that key."""

    @property
    def fused_key(self) -> str:
        return self.name.rstrip("+")


class _Cut:
    """The cut for a single rank that holds the rows of each chunk."""

    def __init__(self, chunks: list[_FusedChunk], source: FusedSource) -> None:
        self._shards = {}
        for chunk in chunks:
            a, b = chunk.rows
            # The rows behind the vocabulary are padding: they count in the size only.
            stop = min(b, source.shape(chunk.fused_key)[0])
            self._shards[chunk.name] = Shard(0, ((a, stop),), b - a)

    def shard(self, name: str, tp_rank: int) -> Shard:
        return self._shards[name]


def write_torch_dist(
    source: WeightSource,
    target: Path | str,
    to: Megatron,
    overwrite: bool = True,
    companions: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write `iter_0000001/` with `.metadata`, `.distcp` files, common.pt and metadata.json; the
    tracker next to it.

    Any mesh reads it: `to` only says how the vocabulary is padded, and what stands in the settings
    kept along. Raises ConfigError if Megatron cannot cut the model so, CheckpointError if the
    source cannot be read.
    """
    shape = ModelShape.from_config(source.config)
    # For its errors only: no file depends on the stages, but args names them.
    stage_layers(shape, to)
    fused_source = FusedSource(source)
    layout = FusedCut(fused_source, to.tp, to.vocab_divisor)
    chunks = _chunks(shape, fused_source, layout.vocab)
    containers, groups, places = lay_out_files(chunks, f"{ITERATION}/")
    settings = arguments(source.config, fused_source.dtype(EMBEDDING), layout.vocab, to)
    common = {
        "args": New(Name("argparse", "Namespace"), settings),
        "checkpoint_version": 3.0,
        "iteration": 1,
        "num_floating_point_operations_so_far": 0,
        # With True Megatron would ask for a key for each expert, and for _w and _v.
        "content_metadata": {"singleton_local_shards": False},
    }
    backends = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    extras = {
        **companions.with_config(source.config),
        f"{ITERATION}/{METADATA}": metadata_of(
            [*chunks, *_repeat_norms(shape, chunks)],
            places,
            dict.fromkeys(_states(shape), (_EMPTY_STATE_FILE, 0, len(_EMPTY_STATE))),
        ),
        f"{ITERATION}/common.pt": torchzip_writer.save_object("common", dumps(common)),
        f"{ITERATION}/{_EMPTY_STATE_FILE}": _EMPTY_STATE,
        f"{ITERATION}/{METADATA_JSON}": json.dumps(backends).encode(),
        TRACKER: b"1",
    }
    metadata = {"kind": "megatron", "form": "torch_dist", "topology": {"tp": 1, "pp": 1}}
    plan = ConversionPlan(
        _Cut(chunks, fused_source), groups, containers, extras, metadata, REPLACES
    )
    execute(fused_source, target, plan, overwrite)


def _chunks(shape: ModelShape, source: FusedSource, vocab: int) -> list[_FusedChunk]:
    """All chunks in the order of the model: one for each layer's or expert's tensor, two for a
    gated MLP's input.
    """
    out = []
    for fused_tensor in table(shape):
        key, index, sizes = _stack_key(shape, fused_tensor)
        size = (
            (vocab, *fused_tensor.shape[1:])
            if fused_tensor.key in (EMBEDDING, HEAD)
            else fused_tensor.shape
        )
        # Gate and up are chunks of one tensor, gate first, as Megatron's factory splits them.
        halves = 2 if fused_tensor.is_gated else 1
        rows, tensor = size[0] // halves, Tensor(source.dtype(fused_tensor.key), (*sizes, *size))
        for half in range(halves):
            offsets = (*index, half * rows, *(0 for _ in size[1:]))
            span = (half * rows, (half + 1) * rows)
            parts = (*(1 for _ in index), rows, *size[1:])
            out.append(
                _FusedChunk(fused_tensor.key + "+" * half, key, offsets, parts, tensor, span)
            )
    return out


def _stack_key(
    shape: ModelShape, fused_tensor: FusedTensor
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """(key of the stored tensor, place in its stacks of layers and of experts, sizes of these).

    As Megatron does, layers of several kinds are stored one by one.
    """
    key = spell_key(shape, fused_tensor.key, "te")
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    match = LAYER.match(fused_tensor.key)
    if match and not shape.sparse:
        key, index, sizes = (
            key.replace(f"decoder.layers.{match[1]}.", "decoder.layers."),
            (int(match[1]),),
            (shape.layers,),
        )
    if expert := EXPERT.match(key):
        key = f"{expert[1]}.experts.{expert[3]}"
        index, sizes = (
            (*index, int(expert[2])),
            (
                *sizes,
                shape.experts.count if shape.experts else 0,
            ),
        )
    return key, index, sizes


def _repeat_norms(shape: ModelShape, chunks: list[_FusedChunk]) -> list[_FusedChunk]:
    """The norms that the two specs look for under different names: the same bytes, listed twice."""
    return [replace(c, key=canonical(c.key)) for c in chunks if has_two_names(shape, c.fused_key)]


def _states(shape: ModelShape) -> Iterator[str]:
    """The keys of the fp8 states that Megatron asks for."""
    for i, kind in enumerate(shape.by_layer):
        path, at, of = (
            (f"decoder.layers.{i}", (), ())
            if shape.sparse
            else ("decoder.layers", (i,), (shape.layers,))
        )
        has_shared = kind.experts is not None and kind.experts.shared
        mlp = "mlp" if kind.experts is None else "mlp.shared_experts" if has_shared else None
        for linear in (
            *_attention_states(shape),
            *(f"{mlp}.{fc}" for fc in _LINEARS if mlp is not None),
        ):
            # Megatron-core's ShardedObject: key/shard_OFFSET_SHAPE, numbers joined by dots.
            yield (
                f"{path}.{linear}._extra_state/shard_{_join_numbers(at or (0,))}_{_join_numbers(of or (1,))}"
            )
        if kind.experts is not None:
            for expert, fc in product(range(kind.experts.count), _LINEARS):
                shard = f"shard_{_join_numbers((*at, expert))}_{_join_numbers((*of, kind.experts.count))}"
                yield f"{path}.mlp.experts.experts.{fc}._extra_state/{shard}"
    if not shape.tied:
        yield "output_layer._extra_state/shard_0_1"


def _attention_states(shape: ModelShape) -> tuple[str, ...]:
    if (latent := shape.latent) is not None:
        queries = ("q_proj",) if latent.q_rank is None else ("q_down_proj", "q_up_proj")
        linears = (*queries, "kv_down_proj", "kv_up_proj", "proj")
        return tuple(f"self_attention.linear_{name}" for name in linears)
    # A module with parameters has a state.
    return (*_STATES, _ATTENTION) if shape.rules.sinks else _STATES


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
