"""Faults of weights apart from their model, and of what a model cannot be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from smtrain.config.checks_data import Fault
from smtrain.config.elsewhere import readable_schemes
from smtrain.config.schema import JobConfig
from smtrain.model.hf_config import HFConfig
from smtrain.model.hf_folder import checkpoint_in, tokenizer_in, weights_in


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
    if "://" in named:
        if not named.startswith(("s3://", *readable_schemes(config.target))):
            yield {"model.weights"}, f"model.weights: {named} is neither a folder nor an s3:// URI"
    elif not Path(named).is_dir():
        yield {"model.weights"}, f"model.weights: {named} is not a folder; give one with weights, or an s3:// URI"
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


def file_faults(config: JobConfig, folder: Path) -> Iterator[Fault]:
    """What a model's folder lacks beside its config.json."""
    names = [path.name for path in folder.iterdir()]
    elsewhere = config.model.init != "weights" or config.model.weights is not None
    if not elsewhere and weights_in(names) is None and not checkpoint_in(names):
        yield (
            {"model.path"},
            f"model.path: {folder} holds no model.safetensors or pytorch_model.bin (nor an index); save the "
            "weights as safetensors, or set model.init: scratch",
        )
    if config.data.prepared is None and not tokenizer_in(names):
        yield (
            {"model.path"},
            f"model.path: {folder} holds no tokenizer.json (nor vocab.json with merges.txt, nor tokenizer.model), "
            "which preparing text needs; save the tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or set data.prepared",
        )
