"""Weights from whatever a folder holds: its kind and topology are read from it, not asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

from smtrain.checkpoint import manifest as native_manifest
from smtrain.checkpoint.hf import HFSource, is_hf_folder, read_config
from smtrain.checkpoint.native import NativeSource
from smtrain.checkpoint.nxd import NxDSource
from smtrain.checkpoint.nxd_names import shard_files
from smtrain.checkpoint.sources import WeightSource
from smtrain.errors import CheckpointError


def open_weights(path: Path) -> WeightSource:
    """A Hugging Face folder, NxD shards (or a folder of whole tags), or native checkpoints (the newest whole one).

    Raises CheckpointError that says what was found where it is none of them.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a folder of weights.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder it is in.")
    if _format(path) == native_manifest.FORMAT:
        return NativeSource(path)
    if native_manifest.checkpoints(path):
        newest = native_manifest.newest_whole(path)
        if newest is None:
            raise CheckpointError(f"{path} holds checkpoints of which none is whole; train until one is complete.")
        return NativeSource(newest)
    if shard_files(path):
        return NxDSource(path)
    if is_hf_folder(path):
        return HFSource(path)
    if tag := _newest_tag(path):
        return NxDSource(tag, read_config(path) if (path / "config.json").is_file() else None)
    held = sorted(p.name for p in path.iterdir())
    shown = ", ".join(held[:5]) + (" and more" if len(held) > 5 else "") if held else "nothing"
    raise CheckpointError(
        f"{path} holds {shown}, and no weights known here; give a Hugging Face folder with model.safetensors, "
        "a folder of NxD shards, or a checkpoint folder of smtrain."
    )


def _format(path: Path) -> str | None:
    try:
        content = json.loads((path / native_manifest.NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content.get("format") if isinstance(content, dict) else None


def _newest_tag(path: Path) -> Path | None:
    """NxD's own saves: of the tags marked as done, the highest step (times of files mean nothing after a copy)."""
    done = [p for p in path.iterdir() if (p / "done").is_file() and shard_files(p)]
    return max(done, key=lambda p: ([int(n) for n in re.findall(r"\d+", p.name)], p.name), default=None)
