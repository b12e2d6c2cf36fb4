"""Which of Megatron's checkpoints a place holds, and where its config.json is."""

from __future__ import annotations

import hashlib
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.conversion_manifest import read_manifest
from smtrain.worker.checkpoint.huggingface.folder import read_config
from smtrain.worker.checkpoint.megatron.legacy import FOLDER, MegatronSource, iteration, rank_files
from smtrain.worker.checkpoint.megatron.torch_dist import TorchDistSource, backend
from smtrain.worker.checkpoint.nemo_megatron import names as nnm_names
from smtrain.worker.checkpoint.nemo_megatron.reader import NNMSource
from smtrain.worker.checkpoint.storage import Place, place


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
        told = config if named and config is not None else _config(where, where) if named else {}
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
    told = config if config is not None else _config(where, at)
    return MegatronSource(where, folder, told) if ranks else TorchDistSource(where, folder, told)


def _config(where: Place, at: Place) -> dict[str, Any]:
    for beside in (where, at):
        if "config.json" in beside.files():
            return _vouched(beside)
    root, _, name = str(where).rstrip("/").rpartition("/")
    if root and FOLDER.fullmatch(name) and "config.json" in (above := place(root)).files():
        return _vouched(above)
    raise CheckpointError(
        f"{where} has no config.json, as Megatron writes none; copy the model's into it, or name its folder with "
        "--config (config=)."
    )


def _vouched(beside: Place) -> dict[str, Any]:
    """config.json, which says where the vocabulary ends and its padding begins: so it must be the one that was written,
    where a manifest of ours tells."""
    about = read_manifest(beside).get("files", {}).get("config.json", {})
    held = beside.read("config.json", 0, beside.files()["config.json"])
    if "sha256" in about and hashlib.sha256(held).hexdigest() != about["sha256"]:
        raise CheckpointError(
            f"{beside}/config.json is not what was written with the weights, of whose vocabulary it tells the end; "
            "convert the model again, or name the folder of the right one with --config (config=)."
        )
    return read_config(beside)
