"""Write neuronx-nemo-megatron checkpoints in the form that a release's training script loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smtrain.core.model.layout import Shard
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.megatron.fused_source import FusedCut, FusedSource
from smtrain.worker.checkpoint.megatron.legacy_writer import stage_layers, stage_names
from smtrain.worker.checkpoint.megatron.names import HEAD, LAYER
from smtrain.worker.checkpoint.nemo_megatron.names import (
    file_key,
    forms,
    halves,
    queries,
    rank_folder,
)
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.targets import Megatron, NemoMegatron, Release
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, TensorFile, Write
from smtrain.worker.checkpoint.torch_files import zip_writer as torchzip_writer
from smtrain.worker.checkpoint.torch_files.pickling import Called, Name, New, Opcodes, dumps

# Each release unpickles its class of reference; NeMo's also needs shape and type (_xser).
_REFERENCES = {
    "2.15": Name("torch_xla.utils.serialization", "TensorReference"),
    "2.21": Name("nemo.collections.nlp.parts.serialization", "TensorReference"),
}
REPLACES = ("mp_rank_*", "tp_rank_*_pp_rank_*", "*.ckpt")


class _NNMCut(FusedCut):
    """A `FusedCut` with tensors that are parts of one, whose names end in + or ++."""

    def __init__(self, source: FusedSource, tp: int, divisor: int, shape: ModelShape) -> None:
        super().__init__(source, tp, divisor)
        self._shape = shape

    def shard(self, name: str, tp_rank: int) -> Shard:
        if part_number := name.count("+"):
            of = queries if ".linear_qkv." in name else halves
            ranges = of(self._shape, part_number, self.tp, tp_rank)
            return Shard(0, tuple(ranges), sum(b - a for a, b in ranges))
        return super().shard(name, tp_rank)


def write_nnm(
    source: WeightSource,
    target: Path | str,
    to: NemoMegatron,
    overwrite: bool = True,
    companions: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write each rank's `.ckpt`, config.json and a manifest; a few blocks are in memory at a time.

    Release 2.15 stores gate and up, and grouped queries, as separate tensors, 2.21 as one. Raises
    ConfigError if the model cannot be cut so, CheckpointError if the source cannot be read.
    """
    shape = ModelShape.from_config(source.config)
    layers = stage_layers(shape, Megatron(tp=to.tp, pp=to.pp))
    fused_source = FusedSource(source)
    layout = _NNMCut(fused_source, to.tp, to.vocab_divisor, shape)
    name = "model_optim_rng.ckpt"
    # The llama converters of 2.19 and 2.21 name files so; those for NeoX keep the old name.
    if to.release == "2.21" and not shape.plain:
        name = "llmv2_converted_checkpoint--step=0.ckpt"
    containers: list[TensorFile] = []
    groups: list[list[Job]] = []
    for p in range(to.pp):
        table: dict[str, str] = {}
        # [0]: without virtual stages, of which writing supports none.
        for key, local in stage_names(shape, layers, p)[0]:
            for form in forms(shape, to.release, fused_source.fused_tensor(key)):
                match = LAYER.match(local)
                table[form] = file_key((local if match else key) + form.removeprefix(key))
            # The copy on the last stage of a tied model is not called output_layer.
            if key == HEAD and shape.tied:
                table[key] = "model.word_embeddings.weight"
        ranks = []
        for t in range(to.tp):
            tensors = {
                key: Tensor(fused_source.dtype(key), layout.local_shape(key, t)) for key in table
            }
            file = rank_folder(to.tp, to.pp, t, p) + name
            rank_containers, by_key = (_xser if to.form == "xser" else _plain)(
                file, tensors, table, to.release
            )
            containers += rank_containers
            ranks.append(by_key)
        groups.append([(Write(key, (key,), tuple(rank[key] for rank in ranks)),) for key in table])
    metadata = {
        "kind": "nemo-megatron",
        "release": to.release,
        "form": "xser" if to.form == "xser" else "ckpt",
        "topology": {"tp": to.tp, "pp": to.pp},
    }
    extras = companions.with_config(source.config)
    execute(
        fused_source,
        target,
        ConversionPlan(layout, groups, containers, extras, metadata, REPLACES),
        overwrite,
    )


def _checkpoint(state: dict[str, Any]) -> bytes:
    return dumps(
        {"epoch": 0, "global_step": 0, "pytorch-lightning_version": "1.8.6", "state_dict": state}
    )


def _plain(
    file: str, tensors: dict[str, Tensor], table: dict[str, str], release: Release
) -> tuple[list[TensorFile], dict[str, TensorFile]]:
    state = {
        table[key]: Opcodes(torchzip_writer.pickle_tensor(number, tensor))
        for number, (key, tensor) in enumerate(tensors.items())
    }
    container = torchzip_writer.container(file, tensors, _checkpoint(state))
    return [container], dict.fromkeys(tensors, container)


def _xser(
    file: str, tensors: dict[str, Tensor], table: dict[str, str], release: Release
) -> tuple[list[TensorFile], dict[str, TensorFile]]:
    by_key, state = torchzip_writer.one_file_each(file, tensors), {}
    for tid, (key, tensor) in enumerate(tensors.items()):
        reference: dict[str, Any] = {"tid": tid}
        if release == "2.21":
            shape = Called(Name("torch", "Size"), (tensor.shape,))
            reference |= {"shape": shape, "dtype": Name("torch", tensor.dtype.name)}
        state[table[key]] = New(_REFERENCES[release], reference)
    return [*by_key.values(), torchzip_writer.container(file, {}, _checkpoint(state))], by_key
