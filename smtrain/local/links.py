"""The files of a host's folder as the host sees them: a link is what it leads to, if that lies below its /opt/ml.

A link's target is a path of the host. Followed as a path of this machine it would be another file, or none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ML = PurePosixPath("/opt/ml")
MOST = 40  # links on the way of one path, as in the kernel


def resolved(ml: Path, path: Path) -> Path | None:
    """Where a path below a host's /opt/ml (`ml` here) leads; None out of it, or in a circle."""
    left, reached, links = list(path.relative_to(ml).parts), ml, 0
    while left:
        part = left.pop(0)
        if part == "..":
            if reached == ml:
                return None
            reached = reached.parent
            continue
        here = reached / part
        if not here.is_symlink():
            reached = here
            continue
        links += 1
        target = PurePosixPath(os.readlink(here))
        if links > MOST:
            return None
        if target.is_absolute():
            root = next((root for root in (ML, PurePosixPath(ml)) if target.is_relative_to(root)), None)
            if root is None:
                return None
            reached, target = ml, target.relative_to(root)
        left = [*target.parts, *left]
    return reached


@dataclass
class Tree:
    """What one walk through a folder of a host found."""

    files: dict[str, Path] = field(default_factory=dict)
    """Regular files by relative name."""
    nowhere: list[str] = field(default_factory=list)
    """Names of links that lead to no file."""
    folders: dict[Path, int] = field(default_factory=dict)
    """Each folder on the way, with its mtime in ns when it was entered."""

    def stood_still(self) -> bool:
        """Whether nothing was made or deleted in any folder since the walk entered it."""
        try:
            return all(path.stat().st_mtime_ns == was for path, was in self.folders.items())
        except FileNotFoundError:
            return False


def walk(ml: Path, folder: Path) -> Tree:
    """What a folder of a host holds, as the host sees it."""
    tree = Tree()

    def look(real: Path, prefix: str, above: tuple[Path, ...]) -> None:
        try:
            tree.folders[real] = real.stat().st_mtime_ns
            names = sorted(os.listdir(real))
        except OSError:
            return  # it has just gone
        for name in names:
            path, label = real / name, prefix + name
            if path.is_symlink():
                target = resolved(ml, path)
                if target is None or not target.exists() or target in above:
                    tree.nowhere.append(label)
                    continue
                path = target
            if path.is_dir():
                look(path, f"{label}/", (*above, path))
            elif path.is_file():
                tree.files[label] = path

    look(folder, "", (folder,))
    return tree


def sentence(folder: str, names: list[str]) -> str:
    """What a host's log says of links that were left out."""
    some = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"smtrain: links that lead to no file below /opt/ml are not uploaded from {folder}: {some}"
