"""Read the manifest of a converted model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from itertools import product
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.conversion_plan import FORMAT, MANIFEST, VERSION
from smtrain.worker.checkpoint.manifest import FORMAT as CHECKPOINT
from smtrain.worker.checkpoint.staging import JOURNAL, is_unfinished
from smtrain.worker.checkpoint.storage import Place, read_json, strange


def read_manifest(location: Place) -> dict[str, Any]:
    """Read the manifest that our conversion wrote; empty if another tool wrote it.

    Raises CheckpointError if a file is missing or has another size, or if a conversion was killed
    half-way.
    """
    folder = location.path()
    was_interrupted = folder is not None and is_unfinished(folder, MANIFEST)
    # On a disk `.moving` tells it, in an object store the journal.
    if was_interrupted or (MANIFEST not in location.files() and JOURNAL in location.files()):
        raise CheckpointError(
            f"{location} is left over from a conversion that was interrupted; run that again.",
            code="checkpoint.damaged",
        )
    if MANIFEST not in location.files():
        return {}
    manifest = read_json(location, MANIFEST, ", or convert the model again")
    if "format" not in manifest:  # another program's
        return {}
    if manifest["format"] == CHECKPOINT and manifest.get("storage") == "dcp":
        return {}  # a run's checkpoint, whose reader has checked its own manifest
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{location}/{MANIFEST} is not the manifest of converted weights; convert the model"
            " again.",
            code="checkpoint.damaged",
        )
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{location}/{MANIFEST} has version {manifest.get('version')}, this smtrain reads"
            f" {VERSION}; convert again."
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and "size" in entry for entry in files.values()
    ):
        raise CheckpointError(
            f"{location}/{MANIFEST} lists no files; convert the model again.",
            code="checkpoint.damaged",
        )
    present = location.files()
    for file, entry in files.items():
        if "crc32" in entry and present.get(file) != entry["size"]:  # the small files may be edited
            if file not in present:
                raise CheckpointError(
                    f"{location}/{file} is missing; copy this file into it, or convert the model"
                    " again.",
                    code="checkpoint.damaged",
                )
            raise strange(location, file) or CheckpointError(
                f"{location}/{file} has {present[file]} bytes instead of {entry['size']}; copy this"
                " file again, or convert the model again.",
                code="checkpoint.damaged",
            )
    return manifest


def matches_manifest(location: Place, file: str, entry: dict[str, Any]) -> bool:
    """Whether a small file has the sha256 of its manifest entry, if that has one."""
    # On a disk a missing file reads as no bytes, whose sha256 matches no entry.
    content = location.read(file, 0, location.files().get(file, 0))
    return "sha256" not in entry or hashlib.sha256(content).hexdigest() == entry["sha256"]


def mesh_of(
    ranks: Collection[tuple[int, int]], location: object, noun: str = "file"
) -> tuple[int, int]:
    """(tp, pp) of the rank files of a checkpoint. Raises CheckpointError if one is missing."""
    tp, pp = (max(rank[i] for rank in ranks) + 1 for i in (0, 1))
    max_size = len(ranks) + 1  # a file named for rank 99,999,999 must not make this a long loop
    for t, p in product(range(min(tp, max_size)), range(min(pp, max_size))):
        if (t, p) not in ranks:
            raise CheckpointError(
                f"{location} lacks the {noun} of tp rank {t}, pp rank {p}; copy that rank's file"
                " into it.",
                code="checkpoint.damaged",
            )
    return tp, pp


def checksums(manifest: dict[str, Any], file: str) -> dict[str, int]:
    """crc32 of each tensor of a file, as far as the manifest has them."""
    crcs = manifest.get("files", {}).get(file, {}).get("crc32", {})
    try:
        return {name: int(crc, 16) for name, crc in crcs.items()}
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            f"the manifest has no valid crc32 of {file}; convert the model again.",
            code="checkpoint.damaged",
        ) from None
