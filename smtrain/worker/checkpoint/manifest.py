"""When a checkpoint exists: its manifest, which is written last and lists every file with size and hash.

    step_00000010/model/tp000_pp000.safetensors          weights in the training dtype, one file per (tp, pp)
    step_00000010/optim/dp000_tp000_pp000.safetensors    optimizer state, one file per rank
    step_00000010/manifest.json                          written by rank 0 once all files of all hosts are written

A checkpoint is whole when its manifest is there, belongs to the folder's step, and every file in it has its size;
that the bytes are those written is what `verifying.py` finds out. While a job runs, each host's disk
holds only what its own ranks wrote (and the manifest only rank 0's); after a restart SageMaker brings all files to all
hosts. Pure Python, no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import CheckpointError, first_line
from smtrain.core.files import sync_folder
from smtrain.core.model.families import ModelShape
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora, from_described, is_described
from smtrain.core.model.numerics import PRECISIONS, Precision, is_loss_scale
from smtrain.core.protocol.lineage import lines_in

if TYPE_CHECKING:
    from smtrain.worker.checkpoint.storage import Place

log = logging.getLogger(__name__)

FORMAT = "smtrain-native"
VERSION = 1
NAME = "manifest.json"
DIGEST = "digest"
_STEP = re.compile(r"step_(\d{8,})")

Sizes = Mapping[str, int]
"""Relative path -> bytes of the files that exist of one checkpoint."""


@dataclass(frozen=True)
class Manifest:
    """What rank 0 knows once every file is written."""

    step: int
    optimizer_steps: int
    topology: dict[str, int]
    """tp, pp, dp."""
    precision: Precision
    config: dict[str, Any]
    """The model's config.json."""
    flat: list[list[list[Any]]]
    """Per stage: [name, start, numel] of every parameter in the flat optimizer buffer."""
    shard: list[int]
    """Per stage: the length of one data-parallel rank's part of that buffer."""
    files: dict[str, dict[str, Any]]
    """Relative path -> {"size": bytes, "sha256": hex, "crc32": number}; older ones have no crc32."""
    state: dict[str, Any]
    """The training loop's own."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Whole shape of every parameter, under its Hugging Face file name."""
    root: str = ""
    """The folder inside the checkpoint that holds model/ and optim/; not empty where a whole step was saved again."""
    adapter: dict[str, Any] | None = None
    """What LoRA trains, if it does (core/model/lora.py): the files then hold the adapters' factors, not the model."""
    cut: dict[str, Any] | None = None
    """How the files are cut where that is not as the native engine cuts for `topology`: `kv_order`, `pipeline_cuts`."""
    loss_scale: dict[str, float] | None = None
    """Of a run in fp16, the next step's: `scale`, how many `good_steps` it has had, and steps `skipped` so far."""

    @property
    def layout(self) -> Layout:
        """Which part of which parameter each file holds. Raises `ConfigError` where the model cannot be cut so."""
        told = self.cut or {}
        order, cuts = told.get("kv_order", "grouped"), told.get("pipeline_cuts")
        return Layout(self.shape, self.topology["tp"], self.topology["pp"], order, cuts)

    @property
    def lora(self) -> Lora | None:
        """`adapter`, read."""
        return None if self.adapter is None else from_described(self.adapter)

    @property
    def base(self) -> str | None:
        """The digest of the weights that the run began from, if they were any and the training loop said so."""
        model = self.state.get("model")
        digest = model.get("weights") if isinstance(model, dict) else None
        return digest if isinstance(digest, str) else None

    @property
    def shape(self) -> ModelShape:
        """Of what the files hold: the model, or its adapters. Raises `CheckpointError` for a model unknown."""
        shape, lora = ModelShape.from_config(self.config), self.lora
        return shape if lora is None else AdapterShape.of(shape, lora)

    def to_json(self) -> str:
        """With a digest of everything else in it, so that a manifest edited by hand is noticed."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for key in ("adapter", "cut", "loss_scale"):
            if content[key] is None:
                del content[key]  # as before there were any
        return json.dumps({**content, DIGEST: digest_of(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Raises `CheckpointError` if there is none, or it is not one that this version reads."""
        path = checkpoint / NAME
        try:
            text = path.read_text()
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint} has no {NAME}: the checkpoint was never completed, take another"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)}): take another checkpoint", code="checkpoint.damaged"
            ) from None
        return cls.parse(text, str(checkpoint))

    @classmethod
    def parse(cls, text: str, checkpoint: str) -> Manifest:
        """The manifest that `text` is; `checkpoint` says in errors whose. Raises `CheckpointError` if it is none."""
        path = f"{checkpoint}/{NAME}"
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)}): take another checkpoint", code="checkpoint.damaged"
            ) from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of an smtrain checkpoint: name a step_... folder")
        written = data.pop(DIGEST, None)  # older versions wrote none
        if written is not None and written != digest_of({"format": FORMAT, **data}):
            raise CheckpointError(
                f"{path} is not what was written (its digest differs): take another checkpoint",
                code="checkpoint.damaged",
            )
        version = data.pop("version", None)
        if version != VERSION:
            raise CheckpointError(f"{path} has format version {version}, this smtrain reads {VERSION}: update smtrain")
        try:
            found = cls(**data)
        except TypeError as error:
            raise CheckpointError(
                f"{path} is not complete ({first_line(error)}): take another checkpoint", code="checkpoint.damaged"
            ) from None
        if damage := found._damage():
            raise CheckpointError(f"{path} is damaged ({damage}): take another checkpoint", code="checkpoint.damaged")
        return found

    def _damage(self) -> str | None:
        """Which field is not what `to_json` writes."""

        def numbers(values: Any) -> bool:
            return all(type(n) is int and n >= 0 for n in values)

        rightly = {
            "step": numbers([self.step, self.optimizer_steps]),
            "topology": isinstance(self.topology, dict)
            and set(self.topology) == {"tp", "pp", "dp"}
            and numbers(self.topology.values())
            and 0 not in self.topology.values(),
            "precision": self.precision in PRECISIONS,
            "config": isinstance(self.config, dict),
            "shard": isinstance(self.shard, list) and numbers(self.shard),
            "files": isinstance(self.files, dict)
            and all(isinstance(f, dict) and {"size", "sha256"} <= set(f) for f in self.files.values())
            and numbers([f.get("crc32", 0) for f in self.files.values()]),
            "state": isinstance(self.state, dict),
            "root": isinstance(self.root, str),
            "adapter": self.adapter is None or is_described(self.adapter),
            "cut": self.cut is None or _is_cut(self.cut),
            "loss_scale": self.loss_scale is None or is_loss_scale(self.loss_scale),
        }
        return next((name for name, right in rightly.items() if not right), None)


def _is_cut(told: Any) -> bool:
    if not isinstance(told, dict):
        return False
    cuts = told.get("pipeline_cuts")
    known = told.keys() <= {"kv_order", "pipeline_cuts"} and told.get("kv_order", "grouped") in ("grouped", "tiled")
    return known and (cuts is None or (isinstance(cuts, list) and all(type(n) is int and n >= 0 for n in cuts)))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint folder that one job wrote, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    found = ((_STEP.fullmatch(p.name), p) for p in folder.iterdir() if p.is_dir())
    return sorted((int(m[1]), p) for m, p in found if m)


def sizes(checkpoint: Path) -> dict[str, int]:
    """The files that this disk holds of a checkpoint."""
    return {p.relative_to(checkpoint).as_posix(): p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()}


def fault(checkpoint: Path, present: Sizes | None = None) -> str | None:
    """Why a checkpoint is not whole, None if it is. `present` are its files on all disks, this disk's by default."""
    try:
        found = Manifest.read(checkpoint)
    except CheckpointError as error:
        return str(error)
    if reason := renamed(checkpoint.name, found.step):
        return f"{checkpoint}: {reason}"
    return _lacking(found.files, sizes(checkpoint) if present is None else present, str(checkpoint))


def state(checkpoint: Path) -> dict[str, Any]:
    """The training loop's part. Raises `CheckpointError` where the manifest is none, or of another step."""
    found = Manifest.read(checkpoint)
    if reason := renamed(checkpoint.name, found.step):
        raise CheckpointError(f"{checkpoint}: {reason}")
    return found.state


def renamed(folder: str, step: int) -> str | None:
    """What is wrong where a checkpoint of `step` lies in a folder named for another step."""
    named = _STEP.fullmatch(folder)
    return f"it was written as step {step}: the folder was renamed" if named and int(named[1]) != step else None


def digest_of(content: Mapping[str, Any]) -> str:
    """sha256 of a record's JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fault_at(where: Place) -> str | None:
    """`fault` of a checkpoint wherever it is, in an object store too."""
    if NAME not in where.files():
        return f"{where} has no {NAME}: the checkpoint was never completed, take another"
    try:
        text = bytes(where.read(NAME, 0, where.files()[NAME])).decode(errors="replace")
        found = Manifest.parse(text, str(where))
    except CheckpointError as error:
        return str(error)
    if reason := renamed(str(where).rstrip("/").rpartition("/")[2], found.step):
        return f"{where}: {reason}"
    return _lacking(found.files, where.files(), str(where))


def _lacking(files: Mapping[str, Mapping[str, Any]], present: Sizes, checkpoint: str) -> str | None:
    for name, about in files.items():
        if name not in present:
            return f"{checkpoint}/{name} is missing"
        if present[name] != about["size"]:
            return f"{checkpoint}/{name} has {present[name]} bytes instead of {about['size']}"
    return None


def newest_whole(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run's newest line; those passed over are logged with the reason.

    Call it on rank 0 and share the answer: ranks of one job must load one checkpoint.
    """
    lines = lines_in(folder)
    for _, name in reversed(lines.steps(lines.parts(lines.newest))):
        path = folder / name
        reason = fault(path)
        if reason is None:
            return path
        log.warning("skipping the checkpoint %s: %s", path.name, reason)
    return None


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint from this disk: the manifest first, so that no half of it ever looks whole."""
    with suppress(FileNotFoundError):  # of a shared disk, another host may have deleted it already
        (checkpoint / NAME).unlink(missing_ok=True)
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    """Write beside, flush to disk, rename."""
    beside = checkpoint / f".{NAME}.part"
    with open(beside, "w") as file:
        file.write(manifest.to_json())
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, checkpoint / NAME)
    sync_folder(checkpoint)
