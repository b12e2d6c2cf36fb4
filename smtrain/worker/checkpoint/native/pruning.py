"""Which checkpoints may go, and how all hosts let go of them: both engines' pruning.

A checkpoint goes when enough newer ones are whole *where they are kept*: on the hosts' disks in a shell, in S3 in a
job, whose disks are gone when it ends. What became whole on the disks a moment ago is on its way only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from smtrain.core.protocol.lineage import Lineage, lines_in

Sizes = Mapping[str, int]
Arrived = Callable[[Path], bool]
"""Whether a checkpoint that is whole on the disks is whole where it is kept."""


class Disk(Protocol):
    """One engine's checkpoints on one disk."""

    def sizes(self, checkpoint: Path) -> dict[str, int]:
        """Bytes of the files that it holds of one, by relative path."""
        ...

    def fault(self, checkpoint: Path, present: Sizes | None = None) -> str | None:
        """Why one is not whole, where all disks together hold `present`."""
        ...

    def remove(self, checkpoint: Path) -> None:
        """Delete it; what is cut off leaves nothing that looks whole."""
        ...


def surplus(
    line: Lineage, keep: int, whole: Callable[[Path], bool], arrived: Arrived | None, spared: Collection[str] = ()
) -> list[Path]:
    """What may go so that the newest `keep` (at least one) that are whole and have arrived stay, and all newer ones.

    What is older than those goes, whole or broken, of the line and of what its jobs wrote beyond the steps that it
    goes on from; another line's stays, and so do those that `spared` names. While fewer have arrived nothing goes.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
    settled = 0
    for step, path in reversed(line.checkpoints()):
        if not whole(path) or not (arrived is None or arrived(path)):
            continue
        settled += 1
        if settled == keep:
            left = lines_in(line.root).left(line.parts)
            return [line.root / name for other, name in left if other < step and name not in spared]
    return []


def prune(
    line: Lineage, keep: int, arrived: Arrived | None, disk: Disk, distrusted: Collection[str] = (),
    spared: Collection[str] = (), *,
    gather: Callable[[Any], list[Any]], rank: int, local_rank: int,
) -> None:  # fmt: skip
    """See `Engine.prune`. Rank 0 decides by what all disks hold together, since each may hold its host's files only."""
    mine = {line.name(path): disk.sizes(path) for _, path in line.checkpoints()} if local_rank == 0 else {}
    together: dict[str, dict[str, int]] = {}
    for held in gather(mine):
        for name, files in held.items():
            together.setdefault(name, {}).update(files)

    def whole(path: Path) -> bool:
        return line.name(path) not in distrusted and disk.fault(path, together.get(line.name(path), {})) is None

    gone = [line.name(path) for path in surplus(line, keep, whole, arrived, spared)] if rank == 0 else []
    for name in gone:
        disk.remove(line.root / name)
    # Rank 0 tells what went only now, so that no host drops a file that a manifest still lists.
    told = gather(gone)[0]
    for name in told if local_rank == 0 else []:
        disk.remove(line.root / name)
