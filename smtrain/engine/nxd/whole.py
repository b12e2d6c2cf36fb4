"""When a checkpoint that NxD wrote is whole. Pure Python: it is asked before the library is loaded.

NxD marks the end of a save with `done`, from one rank: neither a sync to S3 nor a copy back keeps the order of files.
So `smtrain.json` beside it lists every file of every host with its size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "smtrain.json"
FORMAT, VERSION = "smtrain-nxd", 1
Sizes = Mapping[str, int]


def read(checkpoint: Path) -> dict[str, Any] | str:
    """The record of a checkpoint, or why there is none."""
    try:
        found = json.loads((checkpoint / NAME).read_text("utf-8"))
    except FileNotFoundError:
        return f"it has no {NAME}, so it was never completed"
    except (OSError, ValueError) as error:
        return f"{NAME} cannot be read ({error})"
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        return f"{NAME} is not of a version that this smtrain reads"
    return found


def sizes(checkpoint: Path) -> dict[str, int]:
    """The files that this disk holds of a checkpoint."""
    if not checkpoint.is_dir():
        return {}
    return {str(p.relative_to(checkpoint)): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}


def fault(checkpoint: Path, present: Sizes | None = None) -> str | None:
    """Why a checkpoint is not whole, None if it is; `present` is what all disks hold, by default this one."""
    record = read(checkpoint)
    if isinstance(record, str):
        return record
    held = sizes(checkpoint) if present is None else present
    for name, size in record["files"].items():
        if held.get(name) != size:
            return f"{name} is missing" if name not in held else f"{name} has {held[name]} bytes instead of {size}"
    return None


def remove(checkpoint: Path) -> None:
    """The marks first, so that a deletion cut off leaves nothing that looks whole."""
    for mark in (NAME, "done"):
        (checkpoint / mark).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
