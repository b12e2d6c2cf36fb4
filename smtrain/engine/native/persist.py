"""Save, load and prune: what the ranks do together so that a checkpoint is whole or is not there.

No folder is renamed and no disk is shared: each rank writes its own files, tells their sizes and hashes, and rank 0
writes the manifest once all have told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smtrain.checkpoint import manifest as manifests
from smtrain.checkpoint.manifest import Manifest
from smtrain.checkpoint.native import KINDS, StateReader, model_file, optimizer_file, write_safetensors
from smtrain.engine.native.comm import Mesh, local_rank
from smtrain.errors import CheckpointError
from smtrain.model.families import ModelShape

if TYPE_CHECKING:
    from smtrain.engine.native.engine import NativeEngine


def save(engine: NativeEngine, folder: Path, step: int, state: dict[str, Any]) -> None:
    """See `Engine.save`. A step that is whole already is saved again beside itself, and replaced by its manifest."""
    mesh = engine.mesh
    json.dumps(state)  # what JSON cannot hold fails here, on every rank alike
    path = manifests.step_folder(folder, step)
    root = _root_for(mesh, path)
    files: dict[str, dict[str, Any]] = {}
    fault = None
    try:
        for name, tensors in _own_files(engine).items():
            files[f"{root}{name}"] = write_safetensors(path / root / name, tensors)
    except OSError as error:
        fault = f"{error.strerror or error}; see to the disk ({path}), or raise compute.volume_gb"
    mesh.agree(fault, f"checkpoint {path.name} was not written")
    everyone = mesh.gather(files)
    try:
        if mesh.rank == 0:
            manifests.write_manifest(path, _manifest(engine, step, state, root, everyone))
    except OSError as error:
        fault = f"{error.strerror or error}; see to the disk ({path})"
    mesh.agree(fault, f"checkpoint {path.name} was not completed")
    if local_rank() == 0:
        _drop_replaced(path, {name for part in everyone for name in part})


def load(engine: NativeEngine, checkpoint: Path) -> dict[str, Any]:
    """See `Engine.load`."""
    mesh, fault, reader = engine.mesh, None, None
    try:
        reader = StateReader(checkpoint)
        if ModelShape.from_config(reader.manifest.config) != engine.shape:
            raise CheckpointError(
                f"{checkpoint} holds another model than config.json describes: name the one it was trained from, or "
                "begin anew in an empty folder"
            )
        _fill(engine, reader)
    except CheckpointError as error:
        fault = str(error)
    mesh.agree(fault, "the checkpoint cannot be loaded")
    assert reader is not None
    found = mesh.gather(reader.manifest.step)
    if len(set(found)) > 1:
        raise CheckpointError(f"ranks were given checkpoints of different steps {sorted(set(found))}: name one for all")
    engine.optimizer.restore(reader.manifest.optimizer_steps)
    return reader.manifest.state


def prune(mesh: Mesh, folder: Path, keep: int) -> None:
    """See `Engine.prune`. Rank 0 decides by what all disks hold together, since each may hold its host's files only."""
    mine = {p.name: manifests.sizes(p) for _, p in manifests.checkpoints(folder)} if local_rank() == 0 else {}
    together: dict[str, dict[str, int]] = {}
    for held in mesh.gather(mine):
        for name, files in held.items():
            together.setdefault(name, {}).update(files)
    gone = [p.name for p in manifests.surplus(folder, keep, together)] if mesh.rank == 0 else []
    for name in gone:
        manifests.remove(folder / name)
    # Rank 0 tells what went only now, so that no host drops a file that a manifest still lists.
    told = mesh.gather(gone)[0]
    for name in told if local_rank() == 0 else []:
        manifests.remove(folder / name)


def _own_files(engine: NativeEngine) -> dict[str, dict[str, torch.Tensor]]:
    mesh, optimizer = engine.mesh, engine.optimizer
    state: dict[str, torch.Tensor] = {kind: getattr(optimizer, kind) for kind in KINDS}
    if engine.options.precision == "fp32":
        del state["master"]  # the model files are it
    out = {optimizer_file(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank): state}
    if mesh.dp_rank == 0:
        out[model_file(mesh.tp_rank, mesh.pp_rank)] = dict(engine.stage.own())
    return out


def _manifest(
    engine: NativeEngine, step: int, state: dict[str, Any], root: str, everyone: list[dict[str, Any]]
) -> Manifest:
    mesh, layout = engine.mesh, engine.layout
    tables = [layout.flat_table(p) for p in range(mesh.pp)]
    return Manifest(
        step=step,
        optimizer_steps=engine.optimizer.steps,
        topology={"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp},
        precision=engine.options.precision,
        config=engine.config,
        flat=[[list(entry) for entry in t.entries] for t in tables],
        shard=[-(-t.size // mesh.dp) for t in tables],
        files={name: about for part in everyone for name, about in sorted(part.items())},
        state=state,
        shapes={s.name: list(s.shape) for s in layout.shape.specs},
        root=root,
    )


def _root_for(mesh: Mesh, path: Path) -> str:
    """Where in the folder to write: a manifest there means files that must stay until the new manifest is there."""
    root = ""
    if mesh.rank == 0 and (path / manifests.NAME).exists():
        taken = {p.name for p in path.iterdir()}
        root = next(f"again{n}/" for n in range(1, 1 << 20) if f"again{n}" not in taken)
    return str(mesh.gather(root)[0])


def _drop_replaced(path: Path, keep: set[str]) -> None:
    """Delete files of an earlier save of the same step, and what a crash left of one."""
    for name in manifests.sizes(path):
        if name not in keep and name != manifests.NAME:
            (path / name).unlink(missing_ok=True)


def _fill(engine: NativeEngine, reader: StateReader) -> None:
    """Fill this rank's part of master weights and moments."""
    mesh, optimizer, layout = engine.mesh, engine.optimizer, engine.layout
    same = reader.manifest.topology == {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp}
    for kind in KINDS:
        target = getattr(optimizer, kind)
        part = reader.own_part(kind, mesh.dp_rank, mesh.tp_rank, mesh.pp_rank) if same else None
        if part is not None:
            target.copy_(part)
            continue
        for name, at, size in optimizer.table.entries:
            low, high = max(at, optimizer.start), min(at + size, optimizer.start + optimizer.shard)
            if low < high:
                whole = reader.read(kind, name, layout, mesh.tp_rank).reshape(-1)
                target[low - optimizer.start : high - optimizer.start].copy_(whole[low - at : high - at])
