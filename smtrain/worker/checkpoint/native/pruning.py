"""Pruning of old checkpoints on all hosts, for both engines.

A checkpoint is deleted when enough newer ones are whole at the place that keeps them: on the hosts'
disks in a shell, in S3 in a job, whose disks are gone when it ends. One that just became whole on
the disks is still on its way there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smtrain.core.protocol.checkpoints import Sizes, sizes_in
from smtrain.core.protocol.lineage import Lineage, lines_in

ArrivalCheck = Callable[[Path], bool]
"""Tells whether a checkpoint, whole on the disks, is whole at the place that keeps it."""


class Disk(Protocol):
    """One engine's checkpoints on one disk."""

    def fault(self, checkpoint: Path, present: Sizes | None = None) -> str | None:
        """Explain why a checkpoint is not whole if all disks together hold `present`; None if it
        is.
        """
        ...

    def remove(self, checkpoint: Path) -> None:
        """Delete a checkpoint; if interrupted, what is left does not look whole."""
        ...


@dataclass(frozen=True)
class RankGroup:
    """This process among those of the run."""

    gather: Callable[[Any], list[Any]]
    """Collects a value of every rank, by rank."""
    rank: int
    local_rank: int


def surplus(
    line: Lineage,
    keep: int,
    is_whole: Callable[[Path], bool],
    has_arrived: ArrivalCheck | None,
    protected_names: Collection[str] = (),
) -> list[Path]:
    """Checkpoints to delete so that the newest `keep` that are whole and have arrived stay, and all
    newer ones.

    Older ones are deleted whether whole or broken: those of the line, and those that its jobs wrote
    beyond the steps that it resumed from. Other lines' and `protected_names` stay. While fewer than
    `keep` have arrived, none is deleted.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
    safe_count = 0
    for step, path in reversed(line.checkpoints()):
        if not is_whole(path) or not (has_arrived is None or has_arrived(path)):
            continue
        safe_count += 1
        # Counted from the newest: only now `keep` good ones are safe, so everything older may go.
        if safe_count == keep:
            written_steps = lines_in(line.root).all_steps(line.parts)
            return [
                line.root / name
                for other_step, name in written_steps
                if other_step < step and name not in protected_names
            ]
    return []


def prune(
    line: Lineage,
    keep: int,
    has_arrived: ArrivalCheck | None,
    disk: Disk,
    ranks: RankGroup,
    distrusted_names: Collection[str] = (),
    protected_names: Collection[str] = (),
) -> None:
    """See `Engine.prune`.

    Rank 0 decides by what all disks hold together, since each may hold only its host's files.
    """
    local_sizes = (
        {line.name(path): sizes_in(path) for _, path in line.checkpoints()}
        # One rank lists the disk of its host, which all ranks of it share.
        if ranks.local_rank == 0
        else {}
    )
    # A checkpoint can be whole over all disks and incomplete on each one.
    sizes_by_name: dict[str, dict[str, int]] = {}
    for checkpoints in ranks.gather(local_sizes):
        for name, files in checkpoints.items():
            sizes_by_name.setdefault(name, {}).update(files)

    def is_whole(path: Path) -> bool:
        return (
            # Sizes do not tell damage that a checksum has found, or has yet to look for.
            line.name(path) not in distrusted_names
            and disk.fault(path, sizes_by_name.get(line.name(path), {})) is None
        )

    removed_names = (
        [line.name(path) for path in surplus(line, keep, is_whole, has_arrived, protected_names)]
        if ranks.rank == 0
        else []
    )
    for name in removed_names:
        disk.remove(line.root / name)
    # Rank 0 announces the deletions only now, so that no host drops a file that a manifest still
    # lists.
    removed_names = ranks.gather(removed_names)[0]  # collective: every rank must call it
    for name in removed_names if ranks.local_rank == 0 else []:
        disk.remove(line.root / name)
