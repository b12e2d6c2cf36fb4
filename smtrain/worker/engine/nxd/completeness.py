"""Decide whether a checkpoint that NxD wrote is whole. Needs no library.

NxD marks the end of a save with `done`, from one rank, but a sync to S3 or a copy back does not
keep the order of files. So `smtrain.json` next to it lists every file of every host with its size
and hashes.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from smtrain.core.digests import DIGEST, digest_of, with_digest
from smtrain.core.errors import CheckpointError
from smtrain.core.files import read_object, write_atomically
from smtrain.core.protocol.checkpoints import RECORDS, Sizes, renaming_fault, size_faults, sizes_in

NAME = RECORDS["nxd"]
FORMAT, VERSION = "smtrain-nxd", 1
_RANKS = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)")


def read(checkpoint: Path) -> dict[str, Any] | str:
    """The record of a checkpoint, or the reason that it is missing."""
    try:
        record = read_object(checkpoint / NAME)
    except FileNotFoundError:
        return f"it has no {NAME}, so it was never completed"
    except (OSError, ValueError) as error:
        return f"{NAME} cannot be read ({error})"
    if not isinstance(record, dict) or (record.get("format"), record.get("version")) != (
        FORMAT,
        VERSION,
    ):
        return f"{NAME} is not of a version that this smtrain reads"
    # Popped first: the digest is that of the record without it.
    if record.pop(DIGEST, None) != digest_of(record):
        return f"{NAME} is not what was written (its digest differs)"
    # Not isinstance for the step, because True is an int in Python.
    if not isinstance(record.get("files"), dict) or type(record.get("step")) is not int:
        return f"{NAME} is not complete"
    return record


def write(checkpoint: Path, record: dict[str, Any]) -> None:
    """Write the record atomically. Raises OSError."""
    write_atomically(checkpoint / NAME, json.dumps(with_digest(record), indent=1) + "\n")


def state(checkpoint: Path) -> dict[str, Any]:
    """The training loop's part.

    Raises `CheckpointError` if there is no record, or if it is of another step.
    """
    record = _record(checkpoint)
    if reason := renaming_fault(checkpoint.name, record["step"]):
        raise CheckpointError(f"{checkpoint}: {reason}")
    state = record.get("state")
    return state if isinstance(state, dict) else {}


def files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Size, sha256 and crc32 of every file."""
    record = _record(checkpoint)
    sums = {
        kind: record[kind] for kind in ("sha256", "crc32") if isinstance(record.get(kind), dict)
    }
    return {
        name: {
            "size": size,
            **{kind: hashes[name] for kind, hashes in sums.items() if name in hashes},
        }
        for name, size in record["files"].items()
    }


def read_by(checkpoint: Path, mesh: tuple[int, int, int], rank: int) -> set[str]:
    """The files that a rank of a (tp, pp, dp) mesh loads; files without ranks in their names are
    everyone's.
    """
    tp, _, dp = mesh
    # (dp, tp, pp), the order of the names; tp changes fastest over ranks, then dp.
    own_ranks = (rank // tp % dp, rank % tp, rank // (tp * dp))
    out = set()
    for name in _record(checkpoint)["files"]:
        match = _RANKS.search(name)
        ranks = None if match is None else tuple(map(int, match.groups()))
        if (
            ranks is None
            or ranks == own_ranks
            # A model file has the number of one data-parallel rank and is for all of them.
            or (name.startswith("model/") and ranks[1:] == own_ranks[1:])
        ):
            out.add(name)
    return out


def _record(checkpoint: Path) -> dict[str, Any]:
    record = read(checkpoint)
    if isinstance(record, str):
        raise CheckpointError(
            f"{checkpoint}: {record}; take another checkpoint", code="checkpoint.damaged"
        )
    return record


def fault(checkpoint: Path, present: Sizes | None = None) -> str | None:
    """Explain why a checkpoint is not whole; `present` has the files of all disks, by default of
    this one.
    """
    record = read(checkpoint)
    if isinstance(record, str):
        return record
    if reason := renaming_fault(checkpoint.name, record["step"]):
        return reason
    faults = size_faults(record["files"], sizes_in(checkpoint) if present is None else present)
    return next((f"{name} {fault}" for name, fault in faults.items()), None)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, marks first, so that an interrupted deletion leaves nothing that looks
    whole.
    """
    for mark in (NAME, "done"):
        (checkpoint / mark).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
