"""Save and load checkpoints in our own format; a save is whole or not there.

No folder is renamed and no disk is shared: each rank writes its own files and reports their sizes
and hashes, then rank 0 writes the manifest. A thread writes the files from copies while training
continues; all collective calls are made by the training's own thread.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from smtrain.core.errors import CheckpointError, SmtrainError
from smtrain.core.model.lora import Lora, another_adapter
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.checkpoints import sizes_in
from smtrain.worker.checkpoint import manifest as manifests
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.files import write_safetensors
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.native.stream import LostBytesError
from smtrain.worker.engine.host_copies import Copying, Files, HostCopies


class Ranks(Protocol):
    """All processes of the job."""

    rank: int

    def gather(self, value: Any) -> list[Any]: ...

    def agree(self, fault: str | None, failure: str) -> None: ...


class SavedContents(Protocol):
    """The part of one rank. Every method is collective."""

    def finite(self) -> bool:
        """Whether this rank's weights are finite numbers."""
        ...

    def files(self) -> Files:
        """The tensors of each file that this rank writes."""
        ...

    @property
    def are_copies(self) -> bool:
        """Whether the tensors of `files` are on the host and training does not change them."""
        ...

    def manifest(self, step: int, state: dict[str, Any], root: str) -> Manifest:
        """The manifest without its files."""
        ...

    def write(
        self, path: Path, manifest: Manifest, files: Files, read_back: bool
    ) -> dict[str, dict[str, Any]]:
        """Write the complete tensors of `files` into a checkpoint's folder, in a thread.

        Returns the manifest's entry of each file that this rank wrote. Raises OSError as the disk
        does, and `LostBytesError` with the file's name if it has other bytes.
        """
        ...


class _Writing(threading.Thread):
    """Writes one rank's files of a checkpoint.

    A daemon, so that a process that must end does not wait for it.
    """

    def __init__(
        self,
        path: Path,
        contents: SavedContents,
        manifest: Manifest,
        complete_files: Callable[[], Files],
        read_back: bool,
    ) -> None:
        """`complete_files` waits until the tensors have their values."""
        super().__init__(name=f"save {path.name}", daemon=True)
        self._path, self._contents, self._manifest = path, contents, manifest
        self._complete_files, self._read_back = complete_files, read_back
        self.files: dict[str, dict[str, Any]] = {}
        self.fault: str | None = None

    def run(self) -> None:
        try:
            self.files = self._contents.write(
                self._path, self._manifest, self._complete_files(), self._read_back
            )
        except LostBytesError as error:
            self.fault = (
                f"{error} is not on the disk as it was written; check the disk ({self._path})"
            )
        except OSError as error:
            self.fault = (
                f"{error.strerror or error}; check the disk ({self._path}), or raise"
                " compute.volume_gb"
            )
        # An exception of a thread is lost; `Saver.end` reports the fault on every rank.
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"


def write_native(
    path: Path, manifest: Manifest, files: Files, read_back: bool
) -> dict[str, dict[str, Any]]:
    """Write safetensors files of the native format; see `SavedContents.write`."""
    entries = {}
    for file, tensors in files.items():
        name = f"{manifest.root}{file}"
        try:
            entries[name] = write_safetensors(path / name, tensors, read_back)
        except LostBytesError:
            raise LostBytesError(name) from None
    return entries


class Saver:
    """The saves of one engine, one at a time; `require_owner` is `Engine.require_owner`."""

    def __init__(
        self,
        ranks: Ranks,
        contents: SavedContents,
        require_owner: Callable[[], None],
        device: str = "cpu",
    ) -> None:
        """`device` is the kind of device that has the tensors."""
        self._ranks, self._contents, self._allowed = ranks, contents, require_owner
        self._copies = HostCopies(device)
        self._is_prepared = False
        self._copying: Copying | None = None
        self._unfinished_save: tuple[_Writing, Path, Manifest] | None = None

    def prepare(self) -> None:
        """Reserve in the background what saves need; training calls it before each step."""
        if not self._is_prepared and not self._contents.are_copies:
            self._copies.reserve(self._contents.files())
        self._is_prepared = True

    def begin(
        self,
        folder: Path,
        step: int,
        state: dict[str, Any],
        copy: bool = True,
        read_back: bool = False,
    ) -> None:
        """See `Engine.begin_save`; call `finish_before_change` before a tensor changes.

        Without `copy`, the tensors may not change before `end`.

        A step already whole is saved again in a subfolder; its new manifest then replaces
        the old files.
        """
        self.end()
        self._is_prepared = True  # `prepare` would change what the thread of the save reads
        json.dumps(state)  # if it is not JSON, fail here, on every rank
        path = manifests.step_folder(folder, step)
        self._ranks.agree(
            None if self._contents.finite() else "its weights are not all finite numbers",
            f"checkpoint {path.name} was not begun",
        )
        root = self._root_for(path)
        files = self._contents.files()
        if copy and not self._contents.are_copies:
            self._copying = self._copies.begin(files)
            complete_files = self._copying.wait
        else:
            complete_files = partial(_on_host, files)
        manifest = self._contents.manifest(step, state, root)
        writing = _Writing(path, self._contents, manifest, complete_files, read_back)
        self._unfinished_save = writing, path, manifest
        writing.start()

    def finish_before_change(self) -> None:
        """Finish the copies that `begin` began; training calls it before it changes a tensor."""
        if self._copying is not None:
            self._copying.finish_before_change()
            self._copying = None

    def end(self, wait: bool = True) -> int | None:
        """See `Engine.end_save`."""
        if self._unfinished_save is None:
            return None
        ranks, (writing, path, manifest) = self._ranks, self._unfinished_save
        # One answer for all ranks, because the collectives below need every one.
        if not wait and any(ranks.gather(writing.is_alive())):
            return None
        writing.join()
        self._unfinished_save, fault = None, None
        ranks.agree(writing.fault, f"checkpoint {path.name} was not written")
        everyone = ranks.gather(writing.files)
        try:
            if ranks.rank == 0:
                # Just before the manifest, which makes the save count (`Engine.require_owner`).
                self._allowed()
                manifest.files.update(
                    {name: entry for part in everyone for name, entry in sorted(part.items())}
                )
                manifests.write_manifest(path, manifest)
        except OSError as error:
            fault = f"{error.strerror or error}; check the disk ({path})"
        except SmtrainError as error:
            fault = str(error)
        ranks.agree(fault, f"checkpoint {path.name} was not completed")
        # One rank of each host, as hosts may not share a disk.
        if local_rank() == 0:
            _drop_replaced(path, {name for part in everyone for name in part})
        return manifest.step

    def abandon(self) -> None:
        """See `Engine.abandon_save`."""
        if self._unfinished_save is None:
            return
        writing, path, manifest = self._unfinished_save
        self._unfinished_save = None
        writing.join()
        self._ranks.gather(None)  # wait until no rank writes any more
        if local_rank() == 0:
            manifests.remove(path / manifest.root)  # an earlier save of the same step stays

    def _root_for(self, path: Path) -> str:
        """The subfolder to write to: files of an existing manifest must stay until the new one
        replaces it.
        """
        root = ""
        if self._ranks.rank == 0 and (path / manifests.NAME).exists():
            names = {p.name for p in path.iterdir()}
            root = next(f"again{n}/" for n in range(1, 1 << 20) if f"again{n}" not in names)
        return str(self._ranks.gather(root)[0])


def fill_from(
    checkpoint: Path,
    ranks: Ranks,
    shape: ModelShape,
    lora: Lora | None,
    fill: Callable[[StateReader], None],
) -> Manifest:
    """Let `fill` read this rank's part of a checkpoint; returns its manifest. Collective.

    Raises `CheckpointError` on every rank if the checkpoint is of another model than `shape` or
    another adapter than `lora`, if `fill` raises it on any rank, or if the ranks were given
    different steps.
    """
    fault, reader = None, None
    try:
        reader = StateReader(checkpoint)
        if ModelShape.from_config(reader.manifest.config) != shape:
            raise CheckpointError(
                f"{checkpoint} holds another model than config.json describes: name the one it was"
                " trained from, or start over in an empty folder",
                code="checkpoint.other_model",
            )
        if reason := another_adapter(reader.manifest.lora, lora):
            raise CheckpointError(f"{checkpoint} {reason}")
        fill(reader)
    except CheckpointError as error:
        fault = str(error)
    ranks.agree(fault, "the checkpoint cannot be loaded")
    assert reader is not None
    steps = sorted(set(ranks.gather(reader.manifest.step)))
    if len(steps) > 1:
        raise CheckpointError(
            f"ranks were given checkpoints of different steps {steps}: name one for all"
        )
    return reader.manifest


def raise_any(faults: Sequence[str | None], failure: str) -> None:
    """Raise `CheckpointError` if any rank has a fault: every rank calls it, so that no rank waits
    for one that left.
    """
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise CheckpointError(f"{failure} on rank {rank}: {fault}")


def _on_host(files: Files) -> Files:
    return {
        file: {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        for file, tensors in files.items()
    }


def local_rank() -> int:
    """The number of this process on its host, from torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _drop_replaced(path: Path, keep: set[str]) -> None:
    """Delete files of an earlier save of the same step, and those that a crash left."""
    for name in sizes_in(path):
        if name not in keep and name != manifests.NAME:
            (path / name).unlink(missing_ok=True)
