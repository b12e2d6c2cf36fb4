"""Compare exported weights with their checksums before libraries load them that do not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from smtrain.core.errors import CheckpointError
from smtrain.core.machine import cores_here
from smtrain.worker.checkpoint.conversion_manifest import checksums, matches_manifest, read_manifest
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.storage import LocalPlace, Place
from smtrain.worker.checkpoint.tensor_ranges import Slab


def refuse_damaged(folder: Path) -> None:
    """Raise `CheckpointError` if weights that smtrain has exported into a folder have other bytes
    now.

    Reads all of them once. Weights of other programs have no checksums, and pass.
    """
    location = LocalPlace(folder)
    try:
        slabs = list(_with_checksums(location))
        with ThreadPoolExecutor(cores_here()) as pool:
            # The loop is needed: an error in a thread is raised only when its result is taken.
            for _ in pool.map(lambda named_slab: named_slab[1].check(named_slab[0]), slabs):
                pass
    except CheckpointError as error:
        raise CheckpointError(
            f"{str(error).rstrip('.')}; if another program has written these weights since, delete"
            f" {folder / MANIFEST}",
            code=error.code,
        ) from None


def _with_checksums(location: Place) -> Iterator[tuple[str, Slab]]:
    """(name, tensor) of all that the manifest lists.

    Raises `CheckpointError` for other tensors in its files.
    """
    manifest = read_manifest(location)
    for file in manifest.get("files", {}):
        # config.json and the companions may be edited; edited_files lists those.
        if not file.endswith(".safetensors"):
            continue
        crcs, slabs = checksums(manifest, file), safetensors.slabs(location, file)
        # A tensor that the manifest lacks has no checksum, but a loader would read it.
        if crcs.keys() != slabs.keys():
            raise CheckpointError(
                f"{location}/{file} holds other tensors than {MANIFEST} lists; copy both again, or"
                " export the model again",
                code="checkpoint.damaged",
            )
        yield from ((name, slab.with_crc32(crcs[name])) for name, slab in slabs.items())


def edited_files(folder: Path) -> list[str]:
    """Small files, such as config.json, that are not as smtrain has exported them: edited, or
    damaged.
    """
    location = LocalPlace(folder)
    try:
        files = read_manifest(location).get("files", {})
    except CheckpointError:  # the weights are refused with the reason
        return []
    return [
        file
        for file, entry in files.items()
        if file in location.files() and not matches_manifest(location, file, entry)
    ]
