"""Save and load: what the ranks do together so that a checkpoint is whole or is not there.

No folder is renamed and no disk is shared: each rank writes its own files, tells their sizes and hashes, and rank 0
writes the manifest once all have told. Files are written by a thread from copies, while training goes on; what the
ranks do together, the training's own thread does.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smtrain.checkpoint import manifest as manifests
from smtrain.checkpoint.manifest import Manifest
from smtrain.checkpoint.native import KINDS, StateReader, model_file, optimizer_file, write_safetensors
from smtrain.checkpoint.verifying import sha256_of
from smtrain.engine.native.comm import ProcessMesh, local_rank
from smtrain.errors import CheckpointError, SmtrainError
from smtrain.model.families import ModelShape
from smtrain.model.lora import another_adapter, described

if TYPE_CHECKING:
    from smtrain.engine.native.engine import NativeEngine


class _Writing(threading.Thread):
    """One rank's files of a checkpoint on their way to the disk. A daemon: who is killed does not wait for it."""

    def __init__(self, path: Path, root: str, tensors: dict[str, dict[str, torch.Tensor]], read_back: bool) -> None:
        super().__init__(name=f"save {path.name}", daemon=True)
        self._path, self._root, self._tensors, self._read_back = path, root, tensors, read_back
        self.files: dict[str, dict[str, Any]] = {}
        self.fault: str | None = None

    def run(self) -> None:
        try:
            while self._tensors:
                name, tensors = self._tensors.popitem()
                self.files[f"{self._root}{name}"] = write_safetensors(self._path / self._root / name, tensors)
            for name, about in self.files.items() if self._read_back else ():
                if sha256_of(self._path / name, from_disk=True) != about["sha256"]:
                    self.fault = f"{name} is not on the disk as it was written; check the disk ({self._path})"
        except OSError as error:
            self.fault = f"{error.strerror or error}; check the disk ({self._path}), or raise compute.volume_gb"
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"


class Saver:
    """The saves of one engine, one at a time."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._begun: tuple[_Writing, Path, Manifest] | None = None

    def begin(self, folder: Path, step: int, state: dict[str, Any], copy: bool = True, read_back: bool = False) -> None:
        """See `Engine.begin_save`; without `copy`, nothing may be changed before `end`.

        A step that is whole already is saved again beside itself, and replaced by its manifest.
        """
        self.end()
        engine, mesh = self._engine, self._engine.mesh
        json.dumps(state)  # what JSON cannot hold fails here, on every rank alike
        path = manifests.step_folder(folder, step)
        finite = bool(torch.isfinite(engine.optimizer.master).all())
        mesh.agree(
            None if finite else "its weights are not all finite numbers", f"checkpoint {path.name} was not begun"
        )
        root = _root_for(mesh, path)
        tensors = {
            file: {name: tensor.detach().to("cpu", copy=copy) for name, tensor in held.items()}
            for file, held in _own_files(engine).items()
        }
        writing = _Writing(path, root, tensors, read_back)
        self._begun = writing, path, _manifest(engine, step, state, root)
        writing.start()

    def end(self, wait: bool = True) -> int | None:
        """See `Engine.end_save`."""
        if self._begun is None:
            return None
        mesh, (writing, path, manifest) = self._engine.mesh, self._begun
        if not wait and any(mesh.gather(writing.is_alive())):
            return None
        writing.join()
        self._begun, fault = None, None
        mesh.agree(writing.fault, f"checkpoint {path.name} was not written")
        everyone = mesh.gather(writing.files)
        try:
            if mesh.rank == 0:
                self._engine.allowed()
                manifest.files.update({name: about for part in everyone for name, about in sorted(part.items())})
                manifests.write_manifest(path, manifest)
        except OSError as error:
            fault = f"{error.strerror or error}; check the disk ({path})"
        except SmtrainError as error:
            fault = str(error)
        mesh.agree(fault, f"checkpoint {path.name} was not completed")
        if local_rank() == 0:
            _drop_replaced(path, {name for part in everyone for name in part})
        return manifest.step

    def abandon(self) -> None:
        """See `Engine.abandon_save`."""
        if self._begun is None:
            return
        writing, path, manifest = self._begun
        self._begun = None
        writing.join()
        self._engine.mesh.gather(None)  # nobody writes any more
        if local_rank() == 0:
            manifests.remove(path / manifest.root)  # an earlier save of the same step stays


def load(engine: NativeEngine, checkpoint: Path) -> dict[str, Any]:
    """See `Engine.load`."""
    mesh, fault, reader = engine.mesh, None, None
    try:
        reader = StateReader(checkpoint)
        if ModelShape.from_config(reader.manifest.config) != engine.shape:
            raise CheckpointError(
                f"{checkpoint} holds another model than config.json describes: name the one it was trained from, or "
                "start over in an empty folder"
            )
        if told := another_adapter(reader.manifest.lora, engine.lora):
            raise CheckpointError(f"{checkpoint} {told}")
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


def _own_files(engine: NativeEngine) -> dict[str, dict[str, torch.Tensor]]:
    mesh, optimizer = engine.mesh, engine.optimizer
    state: dict[str, torch.Tensor] = {kind: getattr(optimizer, kind) for kind in KINDS}
    if engine.stage.trained.flat.dtype == torch.float32:
        del state["master"]  # the model files are it
    out = {optimizer_file(mesh.dp_rank, mesh.tp_rank, mesh.pp_rank): state}
    if mesh.dp_rank == 0:
        out[model_file(mesh.tp_rank, mesh.pp_rank)] = dict(engine.stage.trained.parameters)
    return out


def _manifest(engine: NativeEngine, step: int, state: dict[str, Any], root: str) -> Manifest:
    """All but the files."""
    mesh, layout, lora = engine.mesh, engine.stage.trained.layout, engine.lora
    tables = [layout.flat_table(p) for p in range(mesh.pp)]
    return Manifest(
        step=step,
        optimizer_steps=engine.optimizer.steps,
        topology={"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp},
        precision=engine.options.precision if lora is None else "fp32",
        config=engine.config,
        flat=[[list(entry) for entry in t.entries] for t in tables],
        shard=[-(-t.size // mesh.dp) for t in tables],
        files={},
        state=state,
        shapes={s.name: list(s.shape) for s in layout.shape.specs},
        root=root,
        adapter=None if lora is None else described(lora),
    )


def _root_for(mesh: ProcessMesh, path: Path) -> str:
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
    mesh, optimizer, layout = engine.mesh, engine.optimizer, engine.stage.trained.layout
    same = reader.manifest.topology == {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp}
    for kind in KINDS:
        target = getattr(optimizer, kind)
        part = reader.own_part(kind, mesh.dp_rank, mesh.tp_rank, mesh.pp_rank) if same else None
        if part is not None:
            target.copy_(part)
            continue
        target.zero_()  # the padding too: it may hold what a damaged checkpoint left
        for name, at, size in optimizer.table.entries:
            low, high = max(at, optimizer.start), min(at + size, optimizer.start + optimizer.shard)
            if low < high:
                whole = reader.read(kind, name, layout, mesh.tp_rank).reshape(-1)
                target[low - optimizer.start : high - optimizer.start].copy_(whole[low - at : high - at])
