"""The manifest of a native checkpoint, written last, which lists every file with size and hash.

    step_00000010/model/tp000_pp000.safetensors          weights in the training dtype, one file per (tp, pp)
    step_00000010/model/tp000_pp000_ep000.safetensors    with ep above 1: the experts of an expert-parallel rank
    step_00000010/optim/dp000_tp000_pp000.safetensors    optimizer state, one file per rank
    step_00000010/pytorch_model_fsdp_0, optimizer_0      in place of them with checkpoint.format: dcp
    step_00000010/manifest.json                          written by rank 0 once all files of all hosts are written

`core.protocol.checkpoints` has the rule of a complete checkpoint; `verifying.py` checks the bytes.
While a job runs, each host's disk holds only what its own ranks wrote (and only rank 0's the
manifest); after a restart SageMaker copies all files to all hosts. Pure Python, no torch.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smtrain.core.digests import DIGEST, digest_of, with_digest
from smtrain.core.errors import CheckpointError, first_line
from smtrain.core.files import parse_json, read_whole, sync_folder, write_atomically
from smtrain.core.model.footprint import PRECISIONS, Precision, is_loss_scale
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, Lora, from_described, is_described
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.checkpoints import (
    RECORDS,
    STEP,
    Sizes,
    renaming_fault,
    size_faults,
    sizes_in,
)

if TYPE_CHECKING:
    from smtrain.worker.checkpoint.storage import Place

FORMAT = "smtrain-native"
VERSION = 1
NAME = RECORDS["native"]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description, complete once every file is written."""

    step: int
    optimizer_steps: int
    topology: dict[str, int]
    """tp, pp, dp, and ep if it is not 1; dp counts all ranks that hold the same parameters."""
    precision: Precision
    config: dict[str, Any]
    """The model's config.json."""
    flat: list[list[list[Any]]]
    """Per stage: [name, start, numel] of every parameter in the flat optimizer buffer."""
    shard: list[int]
    """Per stage: the length of one data-parallel rank's part of that buffer."""
    files: dict[str, dict[str, Any]]
    """Relative path -> {"size": bytes, "sha256": hex, "crc32": number}."""
    state: dict[str, Any]
    """The training loop's own state."""
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Whole shape of every parameter, under its Hugging Face file name."""
    root: str = ""
    """The folder inside the checkpoint with model/ and optim/; not empty if a whole step was saved
    again.
    """
    adapter: dict[str, Any] | None = None
    """LoRA settings (core/model/lora.py); if set, the files hold the adapters' factors, not the
    model.
    """
    cut: dict[str, Any] | None = None
    """The cut of the files (`kv_order`, `pipeline_cuts`) if it is not the native engine's cut for
    `topology`.
    """
    loss_scale: dict[str, float] | None = None
    """In fp16, for the next step: `scale`, `good_steps` in a row, and steps `skipped` so far."""
    storage: Literal["dcp"] | None = None
    """`dcp` if the files are folders of torch.distributed.checkpoint, with all weights in fp32."""

    @property
    def layout(self) -> Layout:
        """The part of each parameter that each file holds.

        Raises `ConfigError` if the model cannot be cut so.
        """
        cut = self.cut or {}
        order, cuts = cut.get("kv_order", "grouped"), cut.get("pipeline_cuts")
        return Layout(self.shape, self.topology["tp"], self.topology["pp"], order, cuts, ep=self.ep)

    @property
    def ep(self) -> int:
        """Expert-parallel ranks; with more than one, experts have separate files and parts."""
        return self.topology.get("ep", 1)

    @property
    def lora(self) -> Lora | None:
        """`adapter`, parsed."""
        return None if self.adapter is None else from_described(self.adapter)

    @property
    def quantized_in(self) -> Precision | None:
        """The precision in which the base was quantised for the training; None if it was not.

        Factors are fp32 in files, whatever the training's precision.
        """
        if self.adapter is None or not self.adapter.get("quantize"):
            return None
        precision: Precision = self.adapter.get("quantized_in", self.precision)
        return precision

    @property
    def base(self) -> str | None:
        """The digest of the weights that the run began from, if the training loop recorded one."""
        model = self.state.get("model")
        digest = model.get("weights") if isinstance(model, dict) else None
        return digest if isinstance(digest, str) else None

    @property
    def shape(self) -> ModelShape:
        """The shape of the model or adapters in the files.

        Raises `CheckpointError` for unknown models.
        """
        shape, lora = ModelShape.from_config(self.config), self.lora
        return shape if lora is None else AdapterShape.of(shape, lora)

    def to_json(self) -> str:
        """Serialise with a digest of everything else, so that a manifest edited by hand is
        noticed.
        """
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        # A version that does not know a key refuses it (`cls(**data)` in `parse`), so keys that are
        # not used are left out.
        for key in ("adapter", "cut", "loss_scale", "storage"):
            if content[key] is None:
                del content[key]
        return json.dumps(with_digest(content), indent=1) + "\n"

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read a checkpoint's manifest; raises `CheckpointError` if this version cannot."""
        path = checkpoint / NAME
        try:
            text = read_whole(path)
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint} has no {NAME}: the checkpoint was never completed, take another",
                code="checkpoint.missing",
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)}): take another checkpoint",
                code="checkpoint.damaged",
            ) from None
        return cls.parse(text, str(checkpoint))

    @classmethod
    def parse(cls, text: str, checkpoint: str) -> Manifest:
        """Parse a manifest; `checkpoint` names it in errors.

        Raises `CheckpointError` if it is invalid.
        """
        path = f"{checkpoint}/{NAME}"
        try:
            data = parse_json(text)
        except ValueError as error:
            raise CheckpointError(
                f"{path} cannot be read ({first_line(error)}): take another checkpoint",
                code="checkpoint.damaged",
            ) from None
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise CheckpointError(
                f"{path} is not the manifest of an smtrain checkpoint: name a step_... folder",
                code="checkpoint.missing",
            )
        recorded_digest = data.pop(DIGEST, None)  # older versions wrote none
        # Before the version is taken out of `data`, as `to_json` digests that too.
        if recorded_digest is not None and recorded_digest != digest_of({"format": FORMAT, **data}):
            raise CheckpointError(
                f"{path} is not what was written (its digest differs): take another checkpoint",
                code="checkpoint.damaged",
            )
        version = data.pop("version", None)
        if version != VERSION:
            raise CheckpointError(
                f"{path} has format version {version}, this smtrain reads {VERSION}: update smtrain"
            )
        try:
            manifest = cls(**data)
        except TypeError as error:
            raise CheckpointError(
                f"{path} is not complete ({first_line(error)}): take another checkpoint",
                code="checkpoint.damaged",
            ) from None
        if damage := manifest._damage():
            raise CheckpointError(
                f"{path} is damaged ({damage}): take another checkpoint", code="checkpoint.damaged"
            )
        return manifest

    def _damage(self) -> str | None:
        """The first field that `to_json` cannot have written, or None."""

        def numbers(values: Any) -> bool:
            # Not isinstance: True would pass as 1.
            return all(type(n) is int and n >= 0 for n in values)

        valid = {
            "step": numbers([self.step, self.optimizer_steps]),
            "topology": (
                isinstance(self.topology, dict)
                and set(self.topology) - {"ep"} == {"tp", "pp", "dp"}
                and numbers(self.topology.values())
                and 0 not in self.topology.values()
                # Expert-parallel ranks are a part of the data-parallel ones
                # (engine/native/comm.py).
                and self.topology["dp"] % self.ep == 0
            ),
            "precision": self.precision in PRECISIONS,
            "config": isinstance(self.config, dict),
            "shard": isinstance(self.shard, list) and numbers(self.shard),
            "files": (
                isinstance(self.files, dict)
                and all(
                    isinstance(f, dict) and {"size", "sha256"} <= set(f)
                    for f in self.files.values()
                )
                and numbers([f.get("crc32", 0) for f in self.files.values()])
            ),
            "state": isinstance(self.state, dict),
            "root": isinstance(self.root, str),
            "adapter": self.adapter is None or is_described(self.adapter),
            "cut": self.cut is None or _is_cut(self.cut),
            "loss_scale": self.loss_scale is None or is_loss_scale(self.loss_scale),
            "storage": self.storage in (None, "dcp"),
        }
        return next((name for name, right in valid.items() if not right), None)


def _is_cut(cut: Any) -> bool:
    if not isinstance(cut, dict):
        return False
    cuts = cut.get("pipeline_cuts")
    has_known_keys = cut.keys() <= {"kv_order", "pipeline_cuts"} and cut.get(
        "kv_order", "grouped"
    ) in (
        "grouped",
        "tiled",
    )
    return has_known_keys and (
        cuts is None or (isinstance(cuts, list) and all(type(n) is int and n >= 0 for n in cuts))
    )


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint folder that one job wrote, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    folders = ((STEP.fullmatch(p.name), p) for p in folder.iterdir() if p.is_dir())
    # By number: from step 100,000,000 on, names have nine digits and no longer sort.
    return sorted((int(m[1]), p) for m, p in folders if m)


def fault(checkpoint: Path, present: Sizes | None = None) -> str | None:
    """Explain why a checkpoint is not whole, None if it is.

    `present`: its files on all disks, default this disk's.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError as error:
        return str(error)
    if reason := renaming_fault(checkpoint.name, manifest.step):
        return f"{checkpoint}: {reason}"
    return _first_size_fault(
        manifest, sizes_in(checkpoint) if present is None else present, str(checkpoint)
    )


def state(checkpoint: Path) -> dict[str, Any]:
    """Read the training loop's state.

    Raises `CheckpointError` for an invalid manifest or one of another step.
    """
    manifest = Manifest.read(checkpoint)
    if reason := renaming_fault(checkpoint.name, manifest.step):
        raise CheckpointError(f"{checkpoint}: {reason}")
    return manifest.state


def fault_at(location: Place) -> str | None:
    """`fault` for a checkpoint in any place, such as an object store."""
    if NAME not in location.files():
        return f"{location} has no {NAME}: the checkpoint was never completed, take another"
    try:
        text = bytes(location.read(NAME, 0, location.files()[NAME])).decode(errors="replace")
        manifest = Manifest.parse(text, str(location))
    except CheckpointError as error:
        return str(error)
    if reason := renaming_fault(str(location).rstrip("/").rpartition("/")[2], manifest.step):
        return f"{location}: {reason}"
    return _first_size_fault(manifest, location.files(), str(location))


def _first_size_fault(manifest: Manifest, present: Sizes, checkpoint: str) -> str | None:
    faults = size_faults({name: entry["size"] for name, entry in manifest.files.items()}, present)
    return next((f"{checkpoint}/{name} {fault}" for name, fault in faults.items()), None)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint from this disk: the manifest first, so that what is left never looks
    whole.
    """
    with suppress(FileNotFoundError):  # on a shared disk, another host may have deleted it
        (checkpoint / NAME).unlink(missing_ok=True)
        sync_folder(checkpoint)
    shutil.rmtree(checkpoint, ignore_errors=True)


def write_manifest(checkpoint: Path, manifest: Manifest) -> None:
    write_atomically(checkpoint / NAME, manifest.to_json())
