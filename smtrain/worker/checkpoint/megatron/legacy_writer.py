"""Write Megatron's legacy checkpoints, a file for every tensor- and pipeline-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smtrain.core.errors import ConfigError
from smtrain.core.model.layout import with_values
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.conversion_plan import ConversionPlan
from smtrain.worker.checkpoint.execute import execute
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.megatron.args import arguments
from smtrain.worker.checkpoint.megatron.fused_source import FusedCut, FusedSource
from smtrain.worker.checkpoint.megatron.legacy import TRACKER
from smtrain.worker.checkpoint.megatron.names import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LAYER,
    POSITIONS,
    Chunks,
    chunks,
    experts_cut,
    is_before_experts,
    latents_cut,
    mesh_faults,
    spell_key,
    table,
)
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.targets import Megatron, Spelling
from smtrain.worker.checkpoint.tensor_files import Job, Tensor, TensorFile, Write
from smtrain.worker.checkpoint.torch_files import pickling
from smtrain.worker.checkpoint.torch_files import zip_writer as torchzip_writer

# Name and tracker text as MindSpeed-LLM's converter writes them: iteration 1, tracker `1`.
ITERATION = "iter_0000001"
REPLACES = (ITERATION, TRACKER)


def stage_layers(shape: ModelShape, to: Megatron) -> Chunks:
    """Deal the layers to stages; raises ConfigError with every reason why Megatron cannot cut the
    model so.
    """

    def faults_of(tp: int, pp: int, _: int = 1) -> list[str]:
        return mesh_faults(shape, tp, pp, experts_cut(shape, tp), latents_cut(tp, to.spec))

    if faults := with_values(faults_of(to.tp, to.pp), shape, faults_of):
        raise ConfigError(faults, code="config.combination")
    if to.layers_per_stage is not None and (to.first_stage_layers or to.last_stage_layers):
        raise ConfigError(
            "layers_per_stage already includes first_stage_layers and last_stage_layers; give one"
            " or the other",
            code="config.combination",
        )
    return chunks(
        shape.layers,
        to.pp,
        to.vpp,
        to.first_stage_layers,
        to.last_stage_layers,
        to.layers_per_stage,
    )


def write_megatron(
    source: WeightSource,
    target: Path | str,
    to: Megatron,
    overwrite: bool = True,
    companions: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write `iter_0000001/mp_rank_TT[_PPP]/model_optim_rng.pt`, the tracker file, config.json and a
    manifest.

    A few blocks are in memory at a time. Raises ConfigError if Megatron cannot cut the model so,
    CheckpointError if the source cannot be read.
    """
    shape = ModelShape.from_config(source.config)
    layers = stage_layers(shape, to)
    fused_source = FusedSource(source)
    layout = FusedCut(fused_source, to.tp, to.vocab_divisor, to.spec)
    # args has one dtype for the whole model; the embedding's stands for it.
    settings = arguments(source.config, fused_source.dtype(EMBEDDING), layout.vocab, to)
    containers: list[TensorFile] = []
    groups: list[list[Job]] = []
    for p, stage in enumerate(layers):
        names = stage_names(shape, layers, p)
        ranks = []
        for t in range(to.tp):
            tensors = {
                key: Tensor(fused_source.dtype(key), layout.local_shape(key, t))
                for chunk in names
                for key, _ in chunk
            }
            file = (
                # Megatron looks for _PPP only if pp > 1.
                f"{ITERATION}/mp_rank_{t:02d}{f'_{p:03d}' if to.pp > 1 else ''}/model_optim_rng.pt"
            )
            ranks.append(
                torchzip_writer.container(
                    file,
                    tensors,
                    _pickle_rank(settings, names, tensors, _spellings(shape, names, to.spec)),
                )
            )
        containers += ranks
        groups.append([(Write(key, (key,), tuple(ranks)),) for chunk in names for key, _ in chunk])
        assert len(stage) == len(names)
    metadata = {
        "kind": "megatron",
        "form": "torch",
        "spec": to.spec,
        "topology": {"tp": to.tp, "pp": to.pp, "vpp": to.vpp},
    }
    extras = {**companions.with_config(source.config), TRACKER: b"1"}
    execute(
        fused_source,
        target,
        ConversionPlan(layout, groups, containers, extras, metadata, REPLACES),
        overwrite,
    )


def stage_names(shape: ModelShape, layers: Chunks, p: int) -> list[list[tuple[str, str]]]:
    """For each virtual stage of stage `p`: (name in the whole model, local spec's name in the
    rank's file).
    """
    out: list[list[tuple[str, str]]] = []
    last = len(layers) - 1
    for v, members in enumerate(layers[p]):
        names = []
        for key in (f.key for f in table(shape)):
            if match := LAYER.match(key):
                if int(match[1]) in members:
                    # Megatron numbers the layers of each chunk from 0.
                    local = f"decoder.layers.{int(match[1]) - members.start}.{match[2]}"
                    names.append((key, EXPERT.sub(r"\1.local_experts.\2.\3", local)))
            elif (p, v) == (
                (0, 0) if key in (EMBEDDING, POSITIONS) else (last, len(layers[p]) - 1)
            ):
                names.append((key, key))
        # With pp > 1 the last stage of a tied model keeps a copy of the embedding as its head;
        # with one stage Megatron's state_dict has no output_layer.
        if shape.tied and last > 0 and (p, v) == (last, len(layers[p]) - 1):
            names.append((HEAD, HEAD))
        out.append(names)
    return out


def _spellings(
    shape: ModelShape, names: list[list[tuple[str, str]]], spelling: Spelling
) -> dict[str, str]:
    """Name in the whole model -> name in the rank's file, as the spec has it."""
    return {
        # TE fuses no norm into experts, so this one keeps its name.
        key: local if is_before_experts(shape, key) else spell_key(shape, local, spelling)
        for chunk in names
        for key, local in chunk
    }


def _pickle_rank(
    settings: dict[str, Any],
    names: list[list[tuple[str, str]]],
    tensors: dict[str, Tensor],
    names_in_file: Mapping[str, str],
) -> bytes:
    number = {key: n for n, key in enumerate(tensors)}
    models = [
        {
            names_in_file[key]: pickling.Opcodes(
                torchzip_writer.pickle_tensor(number[key], tensors[key])
            )
            for key, _ in chunk
        }
        for chunk in names
    ]
    # Megatron's keys: `model`, or with virtual stages `model0`, `model1` and so on.
    model_entries = (
        {"model": models[0]}
        if len(models) == 1
        else {f"model{v}": model for v, model in enumerate(models)}
    )
    namespace = pickling.New(pickling.Name("argparse", "Namespace"), settings)
    return pickling.dumps(
        # Below version 2.0 Megatron would reorder q, k and v (fix_query_key_value_ordering).
        {"args": namespace, "checkpoint_version": 3.0, "iteration": 1, **model_entries}
    )
