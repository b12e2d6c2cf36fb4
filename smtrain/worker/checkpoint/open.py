"""Open the weights in a place; their kind and topology are detected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.model.layout import KvOrder
from smtrain.core.model.remedies import broken_link, file_kind, folder_misfit, missing_shards
from smtrain.core.model.text_part import text_part
from smtrain.core.protocol.lineage import Lines
from smtrain.core.protocol.uris import not_here, spelling_fault
from smtrain.core.suggest import near_path
from smtrain.worker.checkpoint import manifest as native_manifest
from smtrain.worker.checkpoint.conversion_manifest import matches_manifest, read_manifest
from smtrain.worker.checkpoint.dcp.reader import DcpSource
from smtrain.worker.checkpoint.dcp.reader import folder_in as dcp_folder
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
    path: Place | Path | str,
    config: dict[str, Any] | None = None,
    kv_order: KvOrder = "tiled",
    masters: bool = False,
) -> WeightSource:
    """Open a Hugging Face folder, NxD shards (or a folder of whole tags), a run's checkpoints,
    Megatron's, or a folder of torch.distributed.checkpoint.

    Of a run, the newest whole checkpoint of the newest line is opened
    (`smtrain.core.protocol.lineage`). `path` is a folder, an s3:// URI or a place. `config` is for
    NxD's and Megatron's own saves, which have no config.json, `kv_order` the chip's order of NxD's
    repeated heads. With `masters` neuronx-nemo-megatron's fp32 master weights are read. Raises
    CheckpointError, which describes the content, for anything else.
    """
    full_config = config
    config = None if config is None else text_part(config)
    location = _existing_place(folder_of(str(path))) if isinstance(path, (str, Path)) else path
    if format_of(location) == native_manifest.FORMAT:
        return _whole_model(NativeSource(location))
    steps = step_names(location)
    # A folder can hold steps of both engines: the manifest tells which one wrote the newest.
    if (newest := newest_checkpoint(location)) is not None:
        if native_manifest.fault_at(newest) is None:
            return _whole_model(NativeSource(newest))
        return NxDSource(newest, config, kv_order)
    if steps and not shard_files(location.subfolder(steps[-1]).files()):
        raise _none_whole(location, steps[-1])
    if shard_files(location.files()):
        return NxDSource(location, config, kv_order)
    if is_hf_folder(location) or missing_shards(location.files())[0]:
        return HFSource(location, full_config)
    if tag := _newest_tag(location):
        tag_config = (
            text_part(read_config(location))
            if config is None and "config.json" in location.files()
            else config
        )
        return NxDSource(location.subfolder(tag), tag_config, kv_order)
    if (dcp_step := dcp_folder(location)) is not None and backend(location) is None:
        return _open_dcp(location, dcp_step, full_config)
    if megatron := open_megatron(location, config, masters):
        return megatron
    if fault := folder_misfit(location.files(), str(location)):
        raise CheckpointError(f"{fault}.")
    if (folder := location.path()) is not None and (link_fault := broken_link(folder)):
        raise CheckpointError(f"{link_fault}.")
    names = sorted({file.split("/")[0] for file in location.files()} | _folders(location))
    listing = ", ".join(names[:5]) + (" and more" if len(names) > 5 else "") if names else "nothing"
    raise CheckpointError(
        f"{location} holds {listing}, and no weights known here; give a Hugging Face folder with"
        " model.safetensors, a folder of NxD shards, of torch.distributed.checkpoint, or a checkpoint"
        " folder of Megatron or of smtrain.",
        code="checkpoint.missing",
    )


def _open_dcp(location: Place, step: str, config: dict[str, Any] | None) -> DcpSource:
    """Open a folder of torch.distributed.checkpoint, or the step in it."""
    at = location.subfolder(step) if step else location
    # A run's config.json may be next to its steps.
    if config is None and "config.json" not in at.files() and "config.json" in location.files():
        config = read_config(location)
    return DcpSource(at, config)


def _existing_place(path: str) -> Place:
    """The place of a folder or URI. Raises CheckpointError if it does not exist."""
    if fault := not_here(path) or spelling_fault(path, ("s3://",)):
        raise CheckpointError(f"{fault}.")
    if not is_uri(path):
        if not Path(path).exists():
            raise CheckpointError(
                f"{path} does not exist; {near_path(path)}give a folder of weights.",
                code="checkpoint.missing",
            )
        if not Path(path).is_dir():
            raise CheckpointError(
                f"{path} is a file, and {file_kind(Path(path))}; give the folder of a model or of a"
                " checkpoint."
            )
    return place(path)


def _none_whole(location: Place, newest: str) -> CheckpointError:
    """The error for a run without a whole checkpoint: the fault of the newest one."""
    step = location.subfolder(newest)
    # First files that are a Git LFS pointer or a web page: their error says more than a size.
    for file in (
        native_manifest.NAME,
        *(name for name in step.files() if name.endswith(".safetensors")),
    ):
        if error := strange(step, file):
            return error
    fault = (
        (native_manifest.fault_at(step) or "")
        .removesuffix(": take another checkpoint")
        .partition(", take")[0]
    )
    return CheckpointError(
        f"{location} holds checkpoints, and no whole one ({fault}); copy the files that are"
        " missing, or train until one is complete."
    )


def _folders(location: Place) -> set[str]:
    folder = location.path()
    return set() if folder is None else {p.name for p in folder.iterdir()}


def newest_checkpoint(location: Place) -> Place | None:
    """The newest whole checkpoint of a run of either engine; None without one."""
    for name in reversed(step_names(location)):
        if native_manifest.fault_at(location.subfolder(name)) is None or (
            "/" in name and _is_done(location.subfolder(name))
        ):
            return location.subfolder(name)
    return None


def best_checkpoint(location: Place) -> Place:
    """The checkpoint of a run with the lowest validation loss, as its newest checkpoint records it.

    Raises `CheckpointError` if the record is missing, or that checkpoint is not whole.
    """
    newest = newest_checkpoint(location)
    manifest = (
        None
        if newest is None or native_manifest.fault_at(newest)
        else NativeSource(newest).manifest
    )
    best = (
        ((manifest.state.get("validation") or {}).get("best") or {}).get("name")
        if manifest
        else None
    )
    if best is None:
        raise CheckpointError(
            f"{location} names no best checkpoint; train with train.validation.keep_best: true, or"
            " export the newest one.",
            code="checkpoint.missing",
        )
    if fault := native_manifest.fault_at(location.subfolder(best)):
        raise CheckpointError(
            f"the best checkpoint cannot be read ({fault}); export the newest one."
        )
    return location.subfolder(best)


def step_names(location: Place) -> list[str]:
    """Folders of the checkpoints of a run's newest line, whole or not, oldest first."""
    lines = Lines(location.files(), lambda name: read_text(location, name))
    return [name for _, name in lines.steps(lines.parts(lines.newest))]


def _whole_model(source: NativeSource) -> NativeSource:
    if source.manifest.adapter is not None:
        raise CheckpointError(
            f"{source.location} holds a LoRA adapter, not a model; write it as peft's with "
            f"`smtrain convert {source.location} TARGET --to peft`, or a model with "
            f"`smtrain convert BASE TARGET --to hf --merge-adapter {source.location}`."
        )
    return source


def format_of(location: Place) -> str | None:
    """The format that our manifest.json names; None without one."""
    if native_manifest.NAME not in location.files():
        return None
    if error := strange(location, native_manifest.NAME):
        raise error
    try:
        content = parse_json(read_text(location, native_manifest.NAME))
    # Other tools have a manifest.json too: one that cannot be read is taken for theirs.
    except (CheckpointError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None


def _is_done(location: Place) -> bool:
    """Whether the place is a tag that NxD has marked as done."""
    return "done" in location.files() and bool(shard_files(location.files()))


def _newest_tag(location: Place) -> str | None:
    """The tag of the highest step that NxD marked as done (file times mean nothing after a
    copy).
    """
    files = location.files()
    tags = [
        file.removesuffix("/done")
        for file in files
        if file.count("/") == 1 and file.endswith("/done")
    ]
    done_tags = [
        tag
        for tag in tags
        if shard_files(f.removeprefix(f"{tag}/") for f in files if f.startswith(f"{tag}/"))
    ]
    # By their numbers: as text, step_9 comes after step_10.
    return max(
        done_tags, key=lambda tag: ([int(n) for n in re.findall(r"\d+", tag)], tag), default=None
    )


def open_megatron(
    location: Place, config: dict[str, Any] | None, masters: bool = False
) -> MegatronSource | TorchDistSource | NNMSource | None:
    """Open a folder of iterations (the newest), an iteration, or neuronx-nemo-megatron's files;
    None without any.

    config.json comes from `config`, the folder or its parent. Raises CheckpointError if it is
    missing, and for forms that are not supported.
    """
    folder = "" if rank_files(location.files()) or backend(location) else iteration(location)
    if folder is None:
        nnm_files = nnm_names.rank_files(location.files())
        if not nnm_files:
            return None
        return NNMSource(
            location,
            config if config is not None else _megatron_config(location, location),
            masters,
        )
    at = location.subfolder(folder) if folder else location
    ranks, form = rank_files(at.files()), backend(at)
    if not ranks and form is None:
        names = sorted({file.split("/")[0] for file in at.files()})
        if ".metadata" in names:
            raise CheckpointError(
                f"{at} has no metadata.json, which Megatron writes last; take a finished iteration."
            )
        raise CheckpointError(
            f"{at} holds {', '.join(names[:5]) or 'nothing'}, but no Megatron checkpoint."
        )
    if form not in (None, "torch_dist") and not ranks:
        raise CheckpointError(
            f"{at} is in Megatron's old form {form!r}; save it as torch_dist or torch with Megatron"
            " itself (--ckpt-convert-format)."
        )
    config = config if config is not None else _megatron_config(location, at)
    return (
        MegatronSource(location, folder, config)
        if ranks
        else TorchDistSource(location, folder, config)
    )


def _megatron_config(location: Place, at: Place) -> dict[str, Any]:
    for folder in (location, at):
        if "config.json" in folder.files():
            return _verified_config(folder)
    root, _, name = str(location).rstrip("/").rpartition("/")
    # Only above an iteration's folder: any other parent's config.json may be of another model.
    if root and FOLDER.fullmatch(name) and "config.json" in (parent := place(root)).files():
        return _verified_config(parent)
    raise CheckpointError(
        f"{location} has no config.json, as Megatron writes none; copy the model's into it, or name"
        " its folder with --config (config=).",
        code="checkpoint.missing",
    )


def _verified_config(location: Place) -> dict[str, Any]:
    """Read config.json if it is as our manifest lists it, since it tells the first row of the
    vocabulary's padding.
    """
    entry = read_manifest(location).get("files", {}).get("config.json", {})
    if not matches_manifest(location, "config.json", entry):
        raise CheckpointError(
            f"{location}/config.json differs from the one written with the weights, and it gives"
            " the end of the vocabulary; convert the model again, or name the folder of the right"
            " one with --config (config=).",
            code="checkpoint.damaged",
        )
    return text_part(read_config(location))
