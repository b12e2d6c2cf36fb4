"""Save and load with neuronx-distributed's own functions, made safe for hosts that share no disk.

The library takes the newest tag by the time of its `done`, which is chance after a copy from S3, so
we name every tag. It counts the checkpoints to keep on rank 0's disk and waits for ranks that see
other disks, so we prune ourselves (worker/checkpoint/native/pruning.py). It loads the optimizer
before the model, and then ZeRO-1 would write random weights over the loaded ones, so we make two
calls, the model's first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from neuronx_distributed import finalize_checkpoint, load_checkpoint, save_checkpoint

from smtrain.core.errors import CheckpointError, SmtrainError
from smtrain.core.protocol.checkpoints import sizes_in
from smtrain.worker.checkpoint import manifest as manifests
from smtrain.worker.checkpoint.verifying import deal, host_of, sums_of
from smtrain.worker.engine.nxd import completeness
from smtrain.worker.engine.saving import local_rank

if TYPE_CHECKING:
    from smtrain.worker.engine.nxd.engine import NxdEngine


@dataclass
class SaveOptions:
    """Options for writing checkpoints; `pending` is the one that does not count yet."""

    form: Literal["pt", "xser"] = "pt"
    """One file a rank, or one a tensor, shared out among the data-parallel ranks."""
    asynchronous: bool = False
    """Write while training continues; the checkpoint counts when the next one begins, or at the
    end.
    """
    pending: tuple[Path, dict[str, Any]] | None = None


def save(engine: NxdEngine, folder: Path, step: int, state: dict[str, Any]) -> None:
    """See `Engine.begin_save`. Leaves a step that is already whole."""
    json.dumps(state)  # if it is not JSON, fail here, on every rank
    finish(engine)
    everyone, path = engine.everyone, manifests.step_folder(folder, step)
    everyone.agree(
        None if engine.adamw.all_finite() else "its weights are not all finite numbers",
        f"checkpoint {path.name} was not begun",
    )
    # Rank 0 decides for all, because only its host has the record.
    if everyone.gather(completeness.fault(path) is None)[0]:
        return
    fault = None
    try:
        if local_rank() == 0:
            _drop_broken(
                folder
            )  # the library would wait for all hosts to delete what one of them sees
            for part in ("model", "optim"):  # the library makes these on rank 0's disk only
                (path / part).mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(engine.config, indent=1) + "\n", "utf-8")
    except OSError as error:
        fault = f"{error.strerror or error}; check the disk ({path})"
    everyone.agree(fault, f"checkpoint {path.name} was not begun")
    record = {
        "format": completeness.FORMAT,
        "version": completeness.VERSION,
        "step": step,
        "optimizer_steps": engine.optimizer_steps,
        "made_by": _made_by(engine),
        "state": state,
    }
    try:
        save_checkpoint(
            str(folder),
            tag=path.name,
            model=engine.model,
            optimizer=engine.optimizer,
            user_content=record,
            use_xser=engine.saving.form == "xser",
            num_kept_ckpts=None,
            async_save=engine.saving.asynchronous,
        )
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path.name} was not written: {error.strerror or error}; check the disk"
            f" ({path}), or raise compute.volume_gb"
        ) from None
    engine.saving.pending = path, record


def finish(engine: NxdEngine) -> int | None:
    """Wait for an unfinished checkpoint, and make it count; returns its step."""
    if engine.saving.pending is None:
        return None
    if engine.saving.asynchronous:
        finalize_checkpoint()
    step: int = engine.saving.pending[1]["step"]
    _complete(engine)
    return step


def abandon(engine: NxdEngine) -> None:
    """See `Engine.abandon_save`."""
    if engine.saving.pending is None:
        return
    if engine.saving.asynchronous:
        finalize_checkpoint()
    (path, _), engine.saving.pending = engine.saving.pending, None
    engine.everyone.gather(None)  # wait until no rank writes any more
    if local_rank() == 0:
        completeness.remove(path)


def load(engine: NxdEngine, checkpoint: Path) -> dict[str, Any]:
    """See `Engine.load`; NxD's optimizer files fit one mesh only, so the checkpoint must be of this
    one.
    """
    record = completeness.read(checkpoint)
    fault = completeness.fault(checkpoint)
    if fault is None and isinstance(record, dict):
        writer, reader = record["made_by"], _made_by(engine)
        if differences := [
            f"{key} {writer.get(key)} (here {reader[key]})"
            for key in reader
            if writer.get(key) != reader[key]
        ]:
            fault = (
                f"it was written with {', '.join(differences)}, and NxD's optimizer state fits only"
                " what wrote it; restore that, or start another run from the weights (`smtrain"
                " convert`)"
            )
    engine.everyone.agree(fault, f"{checkpoint} cannot be loaded")
    assert isinstance(record, dict)
    folder, tag = str(checkpoint.parent), checkpoint.name
    load_checkpoint(folder, tag=tag, model=engine.model)
    load_checkpoint(folder, tag=tag, optimizer=engine.optimizer)
    engine.adamw.finite = None  # the weights are no longer those of a step
    engine.optimizer_steps = record["optimizer_steps"]
    state: dict[str, Any] = record["state"]
    return state


def _made_by(engine: NxdEngine) -> dict[str, Any]:
    """The options that the files of the optimizer depend on."""
    options = engine.options
    return {
        "tp": options.tp,
        "pp": options.pp,
        "dp": options.dp,
        "virtual_stages": options.virtual_stages,
        "pipeline_cuts": list(options.pipeline_cuts),
        "zero1": options.zero1,
        "precision": options.precision,
    }


def _complete(engine: NxdEngine) -> None:
    """Write the record of a checkpoint once every rank has written its part."""
    assert engine.saving.pending is not None
    path, record = engine.saving.pending
    engine.saving.pending = None
    everyone, fault = engine.everyone, None
    sizes: dict[str, int] = {}
    sums: dict[str, dict[str, Any]] = {}
    own_sizes = sizes_in(path)
    for files in everyone.gather(own_sizes if local_rank() == 0 else {}):
        sizes.update(files)
    # A host's ranks share the hashing of its files.
    host_ranks = host_of(everyone.gather(local_rank()), everyone.rank)
    own_files = deal([own_sizes] * len(host_ranks), own_sizes)[everyone.rank - host_ranks.start]
    try:
        hashes = {name: sums_of(path / name, "sha256", "crc32") for name in own_files}
    except OSError as error:
        hashes, fault = {}, f"{error.strerror or error}; check the disk ({path})"
    everyone.agree(fault, f"checkpoint {path.name} cannot be read back")
    for part in everyone.gather(hashes):
        sums.update(part)
    try:
        if everyone.rank == 0:
            engine.require_owner()
            file_hashes = {
                kind: {name: sums[name][kind] for name in sorted(sums)}
                for kind in ("sha256", "crc32")
            }
            completeness.write(path, {**record, "files": sizes, **file_hashes})
    except OSError as error:
        fault = f"{error.strerror or error}; check the disk ({path})"
    except SmtrainError as error:
        fault = str(error)
    everyone.agree(fault, f"checkpoint {path.name} was not completed")


def _drop_broken(folder: Path) -> None:
    """Delete folders of saves that were cut off: those without the library's own mark.

    Only rank 0's host has marks, so other hosts keep their files.
    """
    for _, path in manifests.checkpoints(folder):
        if (path / "checkpoint").exists() and not (path / "done").exists():
            completeness.remove(path)
