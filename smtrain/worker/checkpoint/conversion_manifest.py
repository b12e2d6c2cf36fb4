"""The manifest of what a conversion wrote, as readers use it."""

from __future__ import annotations

from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.conversion_plan import FORMAT, MANIFEST, VERSION
from smtrain.worker.checkpoint.staging import JOURNAL, refuse_unfinished
from smtrain.worker.checkpoint.storage import Place, read_json, strange


def read_manifest(where: Place) -> dict[str, Any]:
    """What a conversion of ours says of its output; empty where another tool wrote it.

    Raises CheckpointError where a file is missing or has another size, and where a conversion was killed half-way.
    """
    folder = where.path()
    if folder is not None:
        refuse_unfinished(folder, MANIFEST)
    if MANIFEST not in where.files():
        if JOURNAL in where.files():
            raise CheckpointError(f"{where} is left over from a conversion that was interrupted; run that again.")
        return {}
    manifest = read_json(where, MANIFEST, ", or convert the model again")
    if "format" not in manifest:  # another program's
        return {}
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{where}/{MANIFEST} is not the manifest of converted weights; convert the model again.")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{where}/{MANIFEST} has version {manifest.get('version')}, this smtrain reads {VERSION}; convert again."
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(about, dict) and "size" in about for about in files.values()):
        raise CheckpointError(f"{where}/{MANIFEST} lists no files; convert the model again.")
    present = where.files()
    for file, about in files.items():
        if "crc32" in about and present.get(file) != about["size"]:  # the small files may be edited
            if file not in present:
                raise CheckpointError(
                    f"{where}/{file} is missing; copy this file into it, or convert the model again.",
                    code="checkpoint.damaged",
                )
            raise strange(where, file) or CheckpointError(
                f"{where}/{file} has {present[file]} bytes instead of {about['size']}; copy this file again, or "
                "convert the model again."
            )
    return manifest


def checksums(manifest: dict[str, Any], file: str) -> dict[str, int]:
    """crc32 of each tensor of a file, where the manifest has them."""
    about = manifest.get("files", {}).get(file, {}).get("crc32", {})
    try:
        return {name: int(crc, 16) for name, crc in about.items()}
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(f"the manifest has no valid crc32 of {file}; convert the model again.") from None
