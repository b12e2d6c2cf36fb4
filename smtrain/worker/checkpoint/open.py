"""Weights from whatever a place holds: its kind and topology are read from it, not asked for."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.model.layout import KvOrder
from smtrain.core.model.remedies import broken_link, file_kind, folder_misfit, missing_shards
from smtrain.core.near import near_path
from smtrain.core.protocol.lineage import Lines
from smtrain.core.protocol.uris import not_here, respelled
from smtrain.worker.checkpoint import manifest as native_manifest
from smtrain.worker.checkpoint.conversion_manifest import read_manifest
from smtrain.worker.checkpoint.huggingface.folder import HFSource, is_hf_folder, read_config
from smtrain.worker.checkpoint.megatron.legacy import FOLDER, MegatronSource, iteration, rank_files
from smtrain.worker.checkpoint.megatron.torch_dist import TorchDistSource, backend
from smtrain.worker.checkpoint.native.reader import NativeSource
from smtrain.worker.checkpoint.nemo_megatron import names as nnm_names
from smtrain.worker.checkpoint.nemo_megatron.reader import NNMSource
from smtrain.worker.checkpoint.nxd.names import shard_files
from smtrain.worker.checkpoint.nxd.reader import NxDSource
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.storage import Place, is_uri, place, read_text, strange


def open_weights(
    path: Path | str, config: dict[str, Any] | None = None, kv_order: KvOrder = "tiled", masters: bool = False
) -> WeightSource:
    """A Hugging Face folder, NxD shards (or a folder of whole tags), a run's checkpoints (the newest whole one), or
    Megatron's.

    Of a run the newest line counts: `smtrain.core.protocol.lineage`.
    `path` is a folder or an s3:// URI. `config` is for NxD's and Megatron's own saves, which have no config.json, and
    `kv_order` says for which chip NxD's were laid out. With `masters` neuronx-nemo-megatron's fp32 master weights are
    read. Raises CheckpointError that says what was found where it is none of them.
    """
    path = folder_of(str(path))
    if told := not_here(path) or respelled(path, ("s3://",)):
        raise CheckpointError(f"{told}.")
    if not is_uri(path):
        if not Path(path).exists():
            raise CheckpointError(
                f"{path} does not exist; {near_path(path)}give a folder of weights.", code="checkpoint.missing"
            )
        if not Path(path).is_dir():
            raise CheckpointError(
                f"{path} is a file, and {file_kind(Path(path))}; give the folder of a model or of a checkpoint."
            )
    where = place(path)
    if format_of(where) == native_manifest.FORMAT:
        return _whole_model(NativeSource(where))
    steps = step_names(where)
    if (newest := newest_checkpoint(where)) is not None:
        if native_manifest.fault_at(newest) is None:
            return _whole_model(NativeSource(newest))
        return NxDSource(newest, config, kv_order)
    if steps and not shard_files(where.below(steps[-1]).files()):
        raise _none_whole(where, steps[-1])
    if shard_files(where.files()):
        return NxDSource(where, config, kv_order)
    if is_hf_folder(where) or missing_shards(where.files())[0]:
        return HFSource(where, config)
    if tag := _newest_tag(where):
        beside = read_config(where) if config is None and "config.json" in where.files() else config
        return NxDSource(where.below(tag), beside, kv_order)
    if megatron := open_megatron(where, config, masters):
        return megatron
    if found := folder_misfit(where.files(), path):
        raise CheckpointError(f"{found}.")
    if (folder := where.path()) is not None and (lost := broken_link(folder)):
        raise CheckpointError(f"{lost}.")
    held = sorted({file.split("/")[0] for file in where.files()} | _folders(where))
    shown = ", ".join(held[:5]) + (" and more" if len(held) > 5 else "") if held else "nothing"
    raise CheckpointError(
        f"{path} holds {shown}, and no weights known here; give a Hugging Face folder with model.safetensors, "
        "a folder of NxD shards, a checkpoint folder of Megatron or one of smtrain.",
        code="checkpoint.missing",
    )


def _none_whole(where: Place, newest: str) -> CheckpointError:
    """The error for a run without a whole checkpoint: why the newest is not."""
    step = where.below(newest)
    for file in (native_manifest.NAME, *(name for name in step.files() if name.endswith(".safetensors"))):
        if found := strange(step, file):
            return found
    fault = (native_manifest.fault_at(step) or "").removesuffix(": take another checkpoint").partition(", take")[0]
    return CheckpointError(
        f"{where} holds checkpoints of which none is whole ({fault}); copy the files that are missing, or train until "
        "one is complete."
    )


def _folders(where: Place) -> set[str]:
    folder = where.path()
    return set() if folder is None else {p.name for p in folder.iterdir()}


def newest_checkpoint(where: Place) -> Place | None:
    """The newest whole checkpoint of a run, of either engine; None where there is none."""
    for name in reversed(step_names(where)):
        if native_manifest.fault_at(where.below(name)) is None or ("/" in name and _is_done(where.below(name))):
            return where.below(name)
    return None


def best_checkpoint(where: Place) -> Place:
    """The checkpoint of a run with the lowest validation loss, as its newest one names it.

    Raises `CheckpointError` where none is named, or the one that is named is not whole.
    """
    newest = newest_checkpoint(where)
    known = None if newest is None or native_manifest.fault_at(newest) else NativeSource(newest).manifest
    best = ((known.state.get("validation") or {}).get("best") or {}).get("name") if known else None
    if best is None:
        raise CheckpointError(
            f"{where} names no best checkpoint; train with train.validation.keep_best: true, or export the newest one."
        )
    if fault := native_manifest.fault_at(where.below(best)):
        raise CheckpointError(f"the best checkpoint cannot be read ({fault}); export the newest one.")
    return where.below(best)


def step_names(where: Place) -> list[str]:
    """The folders of a run's checkpoints, whole or not, of its newest line; the oldest first."""
    lines = Lines(where.files(), lambda name: read_text(where, name))
    return [name for _, name in lines.steps(lines.parts(lines.newest))]


def _whole_model(source: NativeSource) -> NativeSource:
    if source.manifest.adapter is not None:
        raise CheckpointError(
            f"{source.where} holds a LoRA adapter, not a model; write it as peft's with "
            f"`smtrain convert {source.where} TARGET --to peft`, or a model with "
            f"`smtrain convert BASE TARGET --to hf --merge-adapter {source.where}`."
        )
    return source


def format_of(where: Place) -> str | None:
    """The format that a manifest.json of ours names; None where there is none."""
    if native_manifest.NAME not in where.files():
        return None
    if found := strange(where, native_manifest.NAME):
        raise found
    try:
        content = json.loads(read_text(where, native_manifest.NAME))
    except (CheckpointError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None


def _is_done(where: Place) -> bool:
    """Whether it is a tag that NxD has marked as done."""
    return "done" in where.files() and bool(shard_files(where.files()))


def _newest_tag(where: Place) -> str | None:
    """NxD's own saves: of the tags marked as done, the highest step (times of files mean nothing after a copy)."""
    files = where.files()
    tags = [file.removesuffix("/done") for file in files if file.count("/") == 1 and file.endswith("/done")]
    done = [tag for tag in tags if shard_files(f.removeprefix(f"{tag}/") for f in files if f.startswith(f"{tag}/"))]
    return max(done, key=lambda tag: ([int(n) for n in re.findall(r"\d+", tag)], tag), default=None)


def open_megatron(
    where: Place, config: dict[str, Any] | None, masters: bool = False
) -> MegatronSource | TorchDistSource | NNMSource | None:
    """The newest iteration of a folder, or the one that it is itself, or neuronx-nemo-megatron's; None without any.

    config.json is taken from `config`, the folder, or the one that it is in. Raises CheckpointError where there is
    none, and for a form that is not read.
    """
    folder = "" if rank_files(where.files()) or backend(where) else iteration(where)
    if folder is None:
        named = nnm_names.rank_files(where.files())
        told = config if named and config is not None else _megatron_config(where, where) if named else {}
        return NNMSource(where, told, masters) if named else None
    at = where.below(folder) if folder else where
    ranks, found = rank_files(at.files()), backend(at)
    if not ranks and found is None:
        held = sorted({file.split("/")[0] for file in at.files()})
        if ".metadata" in held:
            raise CheckpointError(f"{at} has no metadata.json, which Megatron writes last; take a finished iteration.")
        raise CheckpointError(f"{at} holds {', '.join(held[:5]) or 'nothing'}, but no Megatron checkpoint.")
    if found not in (None, "torch_dist") and not ranks:
        raise CheckpointError(
            f"{at} is in Megatron's old form {found!r}; save it as torch_dist or torch with Megatron itself "
            "(--ckpt-convert-format)."
        )
    told = config if config is not None else _megatron_config(where, at)
    return MegatronSource(where, folder, told) if ranks else TorchDistSource(where, folder, told)


def _megatron_config(where: Place, at: Place) -> dict[str, Any]:
    for beside in (where, at):
        if "config.json" in beside.files():
            return _vouched_config(beside)
    root, _, name = str(where).rstrip("/").rpartition("/")
    if root and FOLDER.fullmatch(name) and "config.json" in (above := place(root)).files():
        return _vouched_config(above)
    raise CheckpointError(
        f"{where} has no config.json, as Megatron writes none; copy the model's into it, or name its folder with "
        "--config (config=)."
    )


def _vouched_config(beside: Place) -> dict[str, Any]:
    """config.json, which says where the vocabulary ends and its padding begins: so it must be the one that was written,
    where a manifest of ours tells."""
    about = read_manifest(beside).get("files", {}).get("config.json", {})
    held = beside.read("config.json", 0, beside.files()["config.json"])
    if "sha256" in about and hashlib.sha256(held).hexdigest() != about["sha256"]:
        raise CheckpointError(
            f"{beside}/config.json is not what was written with the weights, of whose vocabulary it tells the end; "
            "convert the model again, or name the folder of the right one with --config (config=).",
            code="checkpoint.damaged",
        )
    return read_config(beside)
