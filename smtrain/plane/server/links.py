"""The files of a host's folder as the host sees them: a link is what it leads to, if that lies below its /opt/ml.

A link's target is a path of the host. Followed as a path of this machine it would be another file, or none.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ML = PurePosixPath("/opt/ml")
MOST = 40  # links on the way of one path, as in the kernel
MOST_LINKED = 1_000
"""Folders that are entered through links in one walk: of links to links there are soon more than can be counted."""
KEY_BYTES = 1024
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""


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
    left_out: dict[str, str] = field(default_factory=dict)
    """Why something is not among them, by relative name."""
    folders: dict[Path, int] = field(default_factory=dict)
    """Each folder on the way, with its mtime in ns when it was entered."""

    def stood_still(self) -> bool:
        """Whether nothing was made or deleted in any folder since the walk entered it."""
        try:
            return all(path.stat().st_mtime_ns == was for path, was in self.folders.items())
        except OSError:
            return False

    def leave_out(self, name: str, error: OSError) -> None:
        """Note that a file cannot be read after all."""
        del self.files[name]
        self.left_out[name] = _unreadable(error)

    def sentences(self, folder: str) -> list[str]:
        """Lines for the host's log about files that were left out of a folder, one for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(shown(name))
        return [
            f"smtrain: {reason} are not uploaded from {folder}: {', '.join(sorted(names)[:5])}"
            + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            for reason, names in by_reason.items()
        ]


NOWHERE = "links that lead to no file below /opt/ml"
TOO_MANY = f"folders reached through more than {MOST_LINKED:,} links"
NOT_UTF8 = "files whose names are not UTF-8"
TOO_LONG = f"files whose keys would be longer than S3's {KEY_BYTES:,} bytes"
SPECIAL = "files that are not regular (pipes, sockets, devices)"


def walk(ml: Path, folder: Path, prefix: str | None = "") -> Tree:
    """What a folder of a host holds, as the host sees it.

    `prefix` is what S3's keys of its files begin with; None if they get no keys of their own.
    """
    tree = Tree()
    root = resolved(ml, folder)  # a job may have put a link in the folder's place
    if root is None:
        tree.left_out["."] = NOWHERE
        return tree
    waiting: list[tuple[Path, str, tuple[Path, ...]]] = [(root, "", (root,))]
    linked = 0
    while waiting:
        real, label, above = waiting.pop()
        try:
            tree.folders[real] = real.stat().st_mtime_ns
            names = sorted(os.listdir(real))
        except (FileNotFoundError, NotADirectoryError):
            continue  # it has just gone
        except OSError as error:
            tree.left_out[label or "."] = _unreadable(error)
            continue
        inner = []
        for name in names:
            path, name = real / name, label + name
            try:
                if link := path.is_symlink():
                    target = resolved(ml, path)
                    if target is None or not target.exists() or target in above:
                        tree.left_out[name] = NOWHERE
                        continue
                    path = target
                kind = path.stat().st_mode
                if stat.S_ISDIR(kind):
                    linked += link
                    if linked > MOST_LINKED:
                        tree.left_out[name] = TOO_MANY
                    else:
                        inner.append((path, f"{name}/", (*above, path)))
                elif reason := _unfit(path, kind, None if prefix is None else prefix + name):
                    tree.left_out[name] = reason
                else:
                    tree.files[name] = path
            except FileNotFoundError:
                continue
            except OSError as error:
                tree.left_out[name] = _unreadable(error)
        waiting += reversed(inner)
    return tree


def _unfit(path: Path, kind: int, key: str | None) -> str | None:
    """Why a file cannot go to S3 under this key; None if it can."""
    if not stat.S_ISREG(kind):
        return SPECIAL
    if not os.access(path, os.R_OK):
        return _unreadable(PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    if key is None:
        return None
    try:
        return TOO_LONG if len(key.encode()) > KEY_BYTES else None
    except UnicodeEncodeError:
        return NOT_UTF8


def _unreadable(error: OSError) -> str:
    return f"files that cannot be read ({error.strerror or error})"


def shown(name: str) -> str:
    """A name as a line of a log can have it."""
    return name if name.isprintable() else ascii(name)[1:-1]
