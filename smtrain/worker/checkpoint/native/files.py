"""The files of a native checkpoint: names, readers of each, and a streaming writer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smtrain.core.files import sync_folder
from smtrain.core.model.layout import uneven
from smtrain.worker.checkpoint import dtypes
from smtrain.worker.checkpoint.dtypes import Bits
from smtrain.worker.checkpoint.huggingface import safetensors
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.stream import BLOCK, LostBytesError, StreamedFile
from smtrain.worker.checkpoint.tensor_files import Tensor

if TYPE_CHECKING:
    import torch

EXPERTS = "experts."
"""The beginning of names of optimizer state of experts, if they are divided over other ranks than
the rest.
"""


def model_file(tp: int, pp: int, ep: int | None = None) -> str:
    """The file of a rank's weights; `ep` names that of its experts, if it has them to itself."""
    experts = "" if ep is None else f"_ep{ep:03d}"
    return f"model/tp{tp:03d}_pp{pp:03d}{experts}.safetensors"


def optimizer_file(dp: int, tp: int, pp: int) -> str:
    return f"optim/dp{dp:03d}_tp{tp:03d}_pp{pp:03d}.safetensors"


def topology_of(mesh: tuple[int, int, int], ep: int = 1) -> dict[str, int]:
    """`Manifest.topology` of a (tp, pp, dp) mesh."""
    return dict(zip(("tp", "pp", "dp"), mesh, strict=True)) | ({"ep": ep} if ep > 1 else {})


def cut_of(cuts: Sequence[int]) -> dict[str, Any] | None:
    """`Manifest.cut` of the native engine's files, if the layout's `uneven` is `cuts`."""
    return {"pipeline_cuts": list(cuts)} if cuts else None


def cut_for(
    manifest: Manifest, mesh: tuple[int, int, int], cuts: Sequence[int] = (), ep: int = 1
) -> bool:
    """Whether each rank of a (tp, pp, dp) mesh, with these cuts between stages, has its part in its
    own file.
    """
    if manifest.storage is not None or manifest.topology != topology_of(mesh, ep):
        return False
    return manifest.cut == cut_of(uneven(manifest.shape.layers, mesh[1], cuts) if cuts else ())


def read_by(
    manifest: Manifest, mesh: tuple[int, int, int], rank: int, cuts: Sequence[int] = (), ep: int = 1
) -> set[str]:
    """The files that a rank of a (tp, pp, dp) mesh loads; a run in bf16 or fp16 resumes only from
    its fp32 master weights.
    """
    if not cut_for(manifest, mesh, cuts, ep):
        return set(manifest.files) - files_unused_by_resume(manifest)
    tp, _, dp = mesh
    # tp is innermost and pp outermost, as in the engine's mesh.
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    files = {optimizer_file(d, t, p)}
    if manifest.precision == "fp32":
        files |= {model_file(t, p), *([model_file(t, p, d % ep)] if ep > 1 else [])}
    # A rank without trained experts writes no file of them.
    return {f"{manifest.root}{file}" for file in files} & set(manifest.files)


def files_unused_by_resume(manifest: Manifest) -> set[str]:
    """The files that no resuming run loads."""
    if manifest.precision == "fp32":
        return set()
    # They are rounded from the fp32 master weights, which the optimizer's files hold.
    return {file for file in manifest.files if file.startswith(f"{manifest.root}model/")}


def read_whole(
    manifest: Manifest, mesh: tuple[int, int, int], rank: int, cuts: Sequence[int] = (), ep: int = 1
) -> set[str]:
    """The files of `read_by` that a rank of the native engine reads from the first byte to the
    last.
    """
    if not cut_for(manifest, mesh, cuts, ep):
        return set()
    tp, _, dp = mesh
    optimizer_path = (
        f"{manifest.root}{optimizer_file(rank // tp % dp, rank % tp, rank // (tp * dp))}"
    )
    return {optimizer_path} & read_by(manifest, mesh, rank, cuts, ep)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], read_back: bool = False
) -> dict[str, Any]:
    """`write_stream` of tensors on the CPU, which must not change meanwhile."""
    bits = {name: dtypes.bits_of(tensor) for name, tensor in tensors.items()}
    tensor_specs = {name: Tensor(dtype, values.shape) for name, (dtype, values) in bits.items()}
    return write_stream(path, tensor_specs, lambda name: [bits[name][1]], read_back, in_memory=True)


def write_stream(
    path: Path,
    tensors: Mapping[Any, Tensor],
    pieces: Callable[[Any], Iterable[Bits]],
    read_back: bool = False,
    in_memory: bool = False,
) -> dict[str, Any]:
    """Write a safetensors file atomically; returns its size, sha256 and crc32.

    Tensors are written one after another in the pieces that `pieces` yields, and hashed on the way,
    so that nothing is copied. A piece is hashed before the next one is asked for, unless all are
    `in_memory` anyway. Raises OSError as the disk does, and with `read_back` `LostBytesError` if
    the disk then has other bytes.
    """
    container = safetensors.container(path.name, dict(tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = (
        path.parent / f".{path.name}.part"
    )  # always this name: a killed save of gigabytes is overwritten by the next
    try:
        with StreamedFile(part, read_back) as file:
            file.write(container.fixed_blocks[0][1])
            for name in sorted(container.offsets, key=container.offsets.__getitem__):
                for piece in pieces(name):
                    data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
                    for start in range(0, len(data), BLOCK):
                        file.write(data[start : start + BLOCK])
                    if not in_memory:
                        file.wait()
            entry = file.finish()
        os.replace(part, path)
    except (OSError, LostBytesError):
        part.unlink(missing_ok=True)  # a partial file would keep a full disk full
        raise
    # The file's own bytes are flushed by `finish`; its new name is an entry of the folder.
    sync_folder(path.parent)
    return entry
