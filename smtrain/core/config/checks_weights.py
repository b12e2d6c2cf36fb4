"""Faults of weights apart from their model, and of what a model cannot be asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smtrain.core.config.checks_data import Fault
from smtrain.core.config.cluster_paths import readable_schemes
from smtrain.core.config.schema import JobConfig
from smtrain.core.model.hf_config import HFConfig
from smtrain.core.model.hf_folder import checkpoint_in, tokenizer_in, weights_in
from smtrain.core.model.remedies import (
    DEQUANTIZE,
    broken_link,
    file_misfit,
    folder_misfit,
    missing_shards,
    quantization,
)
from smtrain.core.near import near_path
from smtrain.core.protocol.uris import respelled


def weights_faults(config: JobConfig) -> Iterator[Fault]:
    """What cannot be with `model.weights`."""
    named = config.model.weights
    if config.export.megatron and config.train.adapter and not config.export.merge:
        yield (
            {"export.megatron", "train.adapter", "export.merge"},
            "export.megatron: Megatron has no form for an adapter alone; set export.merge: true",
        )
    if named is None:
        return
    if told := None if named.startswith(readable_schemes(config.target)) else respelled(named, ("s3://",)):
        yield {"model.weights"}, f"model.weights: {told}"
    elif "://" in named:
        if not named.startswith(("s3://", *readable_schemes(config.target))):
            yield {"model.weights"}, f"model.weights: {named} is neither a folder nor an s3:// URI"
    elif not Path(named).is_dir():
        yield (
            {"model.weights"},
            f"model.weights: {named} is not a folder; {near_path(named)}give one with weights, or an s3:// URI",
        )
    if config.model.init == "scratch":
        yield (
            {"model.weights", "model.init"},
            "model.weights: has no effect with model.init: scratch, which starts at random; set only one",
        )
    if config.train.adapter and not config.export.merge:
        yield (
            {"model.weights", "train.adapter", "export.merge"},
            "model.weights: an adapter alone needs a base that peft can load; set export.merge: true, or convert the "
            "weights with `smtrain convert --to hf` and name the result as model.path",
        )
    if config.evaluate.tasks and config.evaluate.base:
        yield (
            {"model.weights", "evaluate.base"},
            "model.weights: the base model is evaluated from a Hugging Face folder; set evaluate.base: false, or "
            "convert the weights with `smtrain convert --to hf` and name the result as model.path",
        )


def shape_and_run(config: JobConfig, model: HFConfig, positions: int | None) -> Iterator[Fault]:
    """Sequences longer than the model's `positions`, an engine that does not train the family, a form it has not."""
    shape = model.shape
    if config.export.megatron and model.parallel_residual:
        yield (
            {"export.megatron", "model.path"},
            "export.megatron: Megatron-core has no parallel residual, which config.json asks for "
            "(use_parallel_residual); leave it out",
        )
    longest, length = shape.positions or positions, config.train.seq_len
    if longest is not None and longest < length:
        more = (
            ", which it has learned one by one"
            if shape.positions is not None
            else ", or raise max_position_embeddings (and the rope settings) in its config.json if it is to learn "
            "longer ones"
        )
        yield (
            {"model.path", "train.seq_len"},
            f"train.seq_len: {length} is beyond the model's {longest} positions; use at most that{more}",
        )
    if config.train.engine == "nxd" and shape.family == "gpt2":
        yield (
            {"model.path", "train.engine"},
            "model.path: engine nxd, which ml.trn1 needs, trains no gpt2 models; set train.engine: native and take "
            "machines that run it (ml.trn2, GPUs)",
        )


def _faults_of_weights(folder: Path, names: list[str], described: Mapping[str, Any]) -> Iterator[str]:
    """Weights that are not there, not whole, or not of the form that their names say; by names and first bytes only."""
    first = weights_in(names)
    there, absent = missing_shards(names)
    if first is None and not there:
        if not checkpoint_in(names):
            yield (
                broken_link(folder)
                or folder_misfit(names, folder)
                or (
                    f"{folder} holds no model.safetensors or pytorch_model.bin (nor an index); save the weights as "
                    "safetensors, or set model.init: scratch"
                )
            )
        return
    if absent and (first is None or first.endswith(".index.json")):
        yield (
            f"{folder} lacks {len(absent)} of its {len(there) + len(absent)} files of weights "
            f"({', '.join(absent[:3])}); copy those files into it"
        )
    read = [first] if first is not None and not first.endswith(".index.json") else [*filter(None, [first]), *there]
    strange = next((fault for name in read if (fault := file_misfit(folder / name))), None)
    if strange:
        yield strange
    if method := quantization(described):
        yield (
            f"{folder}/config.json says that the weights are quantized ({method}), which cannot be trained; "
            f"{DEQUANTIZE}; if they are plain numbers, take quantization_config out of config.json"
        )


def file_faults(config: JobConfig, folder: Path, described: Mapping[str, Any]) -> Iterator[Fault]:
    """What a model's folder lacks beside its config.json."""
    names = [path.name for path in folder.iterdir()]
    elsewhere = config.model.init != "weights" or config.model.weights is not None
    if not elsewhere:
        yield from (({"model.path"}, f"model.path: {fault}") for fault in _faults_of_weights(folder, names, described))
    if config.data.prepared is None and (strange := next(filter(None, map(file_misfit, _tokenizer(folder))), None)):
        yield {"model.path"}, f"model.path: {strange}"
    if config.data.prepared is None and not tokenizer_in(names):
        yield (
            {"model.path"},
            f"model.path: {folder} holds no tokenizer.json (nor vocab.json with merges.txt, nor tokenizer.model), "
            "which preparing text needs; save the tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or set data.prepared",
        )


def _tokenizer(folder: Path) -> list[Path]:
    """The files that the tokenizer is read from."""
    made_of = tokenizer_in(path.name for path in folder.iterdir())
    return [folder / name for name in (*made_of, "tokenizer_config.json")]
