"""Convert any weights to any layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from smtrain.core import text
from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.hf_folder import OTHER_TOKENIZERS, folder_of, tokenizer_in
from smtrain.core.model.layout import KvOrder
from smtrain.core.model.other_forms import refuse_elsewhere
from smtrain.core.model.shape import ModelShape
from smtrain.core.public_api import public_class
from smtrain.core.text import Say
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.dcp.state import DcpState
from smtrain.worker.checkpoint.dcp.writer import write_dcp
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.huggingface.companions import (
    OF_A_WHOLE_MODEL,
    CompanionFiles,
    companions_of,
)
from smtrain.worker.checkpoint.huggingface.folder import HFSource, is_hf_folder, read_config
from smtrain.worker.checkpoint.huggingface.writer import tell_unchanged, write_hf
from smtrain.worker.checkpoint.megatron.legacy_writer import write_megatron
from smtrain.worker.checkpoint.megatron.torch_dist_writer import write_torch_dist
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.native.writer import write_native
from smtrain.worker.checkpoint.nemo_megatron.reader import NNMSource, ReorderedSource
from smtrain.worker.checkpoint.nemo_megatron.writer import write_nnm
from smtrain.worker.checkpoint.nxd.writer import write_nxd
from smtrain.worker.checkpoint.open import open_weights, step_names
from smtrain.worker.checkpoint.sources import Cast, WeightSource
from smtrain.worker.checkpoint.storage import is_uri, place, refuse_overlap
from smtrain.worker.checkpoint.targets import (
    Dcp,
    HuggingFace,
    Megatron,
    Native,
    NemoMegatron,
    Nxd,
    Peft,
    Target,
    unknown_value_fault,
)

if TYPE_CHECKING:
    from smtrain.worker.checkpoint.merge import MergeBase, MergeEffect


@public_class
@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Facts about a source that its files do not tell."""

    kv_order: KvOrder = "tiled"
    """Order of repeated heads in NxD shards without a manifest: `tiled` (trn1) or `grouped` (trn2).
    """
    masters: bool = False
    """neuronx-nemo-megatron: take the fp32 master weights that ZeRO-1 kept in the optimizer's
    files.
    """
    reordered_qkv: bool = False
    """The source is a GPT-NeoX made by convert_HF_to_nemo_neox.py, whose attention rows are out of
    order: undo that.
    """

    def __post_init__(self) -> None:
        if self.kv_order not in get_args(KvOrder):
            raise ConfigError(
                [unknown_value_fault("kv_order", self.kv_order, get_args(KvOrder))],
                code="config.wrong_value",
            )


def convert(
    source: Path | str,
    output: Path | str,
    *,
    to: Target,
    config: Path | str | None = None,
    read: ReadOptions = ReadOptions(),
    merge_adapter: Path | str | None = None,
    merge_base: MergeBase | None = None,
    overwrite: bool = False,
    say: Say = text.say,
) -> MergeEffect | None:
    """Convert between folders and s3:// URIs; `smtrain.convert` (tools/convert.py) describes
    arguments and errors.
    """
    paths = {"source": source, "output": output, "config": config, "merge_adapter": merge_adapter}
    faults = [
        f"{key}: is an empty name; name a folder or an s3:// URI"
        for key, path in paths.items()
        if path is not None and not str(path).strip()
    ]
    if isinstance(to, Peft) and merge_adapter is not None:
        faults.append(
            "merge_adapter: makes a model, and to: peft writes an adapter; take one of the two"
        )
    if merge_base is not None and merge_adapter is None:
        faults.append("merge_base: chooses weights for merge_adapter, which is not set; set it")
    if merge_base not in (None, "dequantized", "original"):
        faults.append(unknown_value_fault("merge_base", merge_base, ("dequantized", "original")))
    if faults:
        raise ConfigError(faults, code="config.wrong_value")
    source, config = folder_of(str(source)), None if config is None else folder_of(str(config))
    refuse_overlap(source, output)
    if merge_adapter is not None:
        merge_adapter = folder_of(str(merge_adapter))
        refuse_overlap(merge_adapter, output)
    # Before the source is read: an error here must not come after hours of conversion.
    _refuse_another_kind(output, to)
    if isinstance(to, Peft):
        _convert_adapter(source, output, config, overwrite, say)
        return None
    weights = _open_source(source, config, read)
    if isinstance(weights, HFSource) and weights.widened:
        say(
            f"{len(weights.widened)} tensors are {' and '.join({*weights.widened.values()})} in"
            f" {source}: they are written as the {to.dtype or 'bf16'} numbers that they stand for,"
            " and the new model is not quantized"
        )
    if config is None and isinstance(to, HuggingFace) and is_hf_folder(place(source)):
        config = source
    companions = (
        companions_of(place(config)) if config is not None else _companions(source, weights)
    )
    merged_source = None
    if merge_adapter is not None:
        from smtrain.worker.checkpoint.adapter import open_adapter
        from smtrain.worker.checkpoint.merge import MergedSource

        weights = merged_source = MergedSource(
            weights, open_adapter(merge_adapter, ModelShape.from_config(weights.config)), merge_base
        )
        if merged_source.note:
            say(merged_source.note)
    tell_unchanged(_write(weights, output, to, config, overwrite, companions), say)
    companions.tell(say)
    if (
        isinstance(to, HuggingFace)
        and not tokenizer_in(companions.files)
        and not {*OTHER_TOKENIZERS} & {*companions.files}
    ):
        say(
            f"{output} has no tokenizer, as {config or source} has none; name the model's folder"
            " with --config"
        )
    return None if merged_source is None else merged_source.change_summary()


def _refuse_another_kind(output: Path | str, to: Target) -> None:
    """Refuse to mix a run's checkpoints and a converted model in one folder: readers could not tell
    which is meant.
    """
    if is_uri(output) or not Path(output).is_dir():
        return
    location = place(output)
    if not isinstance(to, Native) and (steps := step_names(location)):
        raise CheckpointError(
            f"{output} holds checkpoints of a run ({steps[-1]}), which no conversion replaces; name"
            " another folder."
        )
    if isinstance(to, Native) and (is_hf_folder(location) or MANIFEST in location.files()):
        raise CheckpointError(
            f"{output} holds a model of another kind, and no checkpoint is written next to it; name"
            " another folder."
        )


def _convert_adapter(
    source: str, output: Path | str, config: str | None, overwrite: bool, say: Say
) -> None:
    from smtrain.worker.checkpoint.adapter import native_adapter
    from smtrain.worker.checkpoint.peft import write_peft

    adapter = native_adapter(place(source)) if is_uri(source) or Path(source).is_dir() else None
    if adapter is None:
        raise CheckpointError(
            f"{source} holds no checkpoint of a run with train.adapter; name its checkpoints.",
            code="checkpoint.missing",
        )
    companions = (
        CompanionFiles() if config is None else companions_of(place(config), OF_A_WHOLE_MODEL)
    )
    write_peft(adapter, output, config, overwrite, companions=companions)
    companions.tell(say)


def _open_source(source: str, config: str | None, read: ReadOptions) -> WeightSource:
    weights = open_weights(
        source, None if config is None else read_config(config), read.kv_order, read.masters
    )
    if read.masters and not isinstance(weights, NNMSource):
        raise CheckpointError(
            f"{source} is not a neuronx-nemo-megatron checkpoint, and --masters reads only those;"
            " leave out --masters (masters=True)."
        )
    return ReorderedSource(weights) if read.reordered_qkv else weights


def _companions(source: str, weights: WeightSource) -> CompanionFiles:
    """Read the files next to the weights, or next to the step's folder that holds them."""
    companions = companions_of(weights.location)
    return (
        companions
        if companions.files or str(weights.location) == source
        else companions_of(place(source))
    )


def _write(
    weights: WeightSource,
    output: Path | str,
    to: HuggingFace | Nxd | Native | Megatron | NemoMegatron | Dcp,
    config: str | None,
    overwrite: bool,
    companions: CompanionFiles,
) -> str:
    """Write the weights; returns the parts of a multimodal model that stay as they are."""
    # Optimizer state belongs to the weights as they were read: merged or reordered ones get none.
    state = (
        StateReader.present(weights) or DcpState.present(weights)
        if isinstance(to, Native | Dcp)
        else None
    )
    if to.dtype is not None:
        weights = Cast(weights, BY_PRECISION[to.dtype])
    # Elsewhere such a family would lose what the format lacks, such as its norms, without an error.
    if isinstance(to, Nxd | Megatron | NemoMegatron):
        refuse_elsewhere(ModelShape.from_config(weights.config), type(to).__name__)
    if isinstance(to, HuggingFace):
        return write_hf(
            weights, output, config, to.max_shard_size, overwrite, companion_files=companions
        )
    if isinstance(to, Native):
        write_native(weights, output, to, state, overwrite, companions)
    elif isinstance(to, Dcp):
        write_dcp(weights, output, to, state, overwrite, companions)
    elif isinstance(to, NemoMegatron):
        write_nnm(weights, output, to, overwrite, companions)
    elif isinstance(to, Nxd):
        write_nxd(weights, output, to, overwrite, companions)
    elif to.form == "torch":
        write_megatron(weights, output, to, overwrite, companions)
    else:
        write_torch_dist(weights, output, to, overwrite, companions)
    return ""
