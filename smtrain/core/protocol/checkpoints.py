"""The rule of a complete checkpoint, for client and worker: its record, written last, lists every
file with its size.

A checkpoint is complete if its record is there and belongs to the step of its folder, and if every
listed file has its size on the disks of all hosts together, or in S3. The worker also compares the
bytes (`worker/checkpoint`). Pure data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

RECORDS = {"native": "manifest.json", "nxd": "smtrain.json"}
"""The name of the record that each engine writes."""
STEP = re.compile(r"step_(\d{8,})")
"""The name of a checkpoint's folder."""
Sizes = Mapping[str, int]
"""Bytes of a checkpoint's files by relative path."""


def sizes_in(checkpoint: Path) -> dict[str, int]:
    """Sizes of the files of a checkpoint on this disk; empty if there is no such folder."""
    return {
        p.relative_to(checkpoint).as_posix(): p.stat().st_size
        for p in checkpoint.rglob("*")
        if p.is_file()
    }


def size_faults(recorded_sizes: Sizes, present: Sizes) -> dict[str, str]:
    """Files that are missing or have another size than recorded, each with its fault as the end of
    a sentence.
    """
    return {
        name: f"has {present[name]} bytes instead of {size}" if name in present else "is missing"
        for name, size in recorded_sizes.items()
        if present.get(name) != size
    }


def renaming_fault(folder: str, step: int) -> str | None:
    """The fault of a checkpoint of `step` in a folder named for another step, or None."""
    step_match = STEP.fullmatch(folder)
    return (
        f"it was written as step {step}: the folder was renamed"
        if step_match and int(step_match[1]) != step
        else None
    )
