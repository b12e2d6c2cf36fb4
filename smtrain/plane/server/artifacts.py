"""A job's files: walks through a host's folder, and uploads of models, outputs and checkpoints.

A link is uploaded as the file that it leads to, if its target is below the host's /opt/ml. Its
target is a path of the host; followed as a path of this machine it would be another file, or none.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from boto3.s3.transfer import TransferConfig

from smtrain.core.files import open_regular_file
from smtrain.core.protocol.uris import split_uri

TRANSFER = TransferConfig(max_concurrency=4)
"""Server and transfers share this machine: more parts at once are no faster, and each is held in
memory.
"""
MODEL, OUTPUT = ("model", "model.tar.gz"), ("data", "output.tar.gz")
"""Folder of the files in S3, and the name of the archive that replaces it."""


def uri_of(request: dict[str, Any], names: tuple[str, str] = MODEL) -> str:
    """The URI of an artefact of a job: a prefix of files, or an archive."""
    output = request["OutputDataConfig"]
    base = f"{output['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}/output"
    folder, archive = names
    return f"{base}/{folder}/" if output.get("CompressionType") == "NONE" else f"{base}/{archive}"


def merge_hosts(hosts: list[dict[str, Path]]) -> dict[str, Path]:
    """Merge the files of all hosts by relative name; the first host that has a name wins."""
    files = {name: path for host_files in reversed(hosts) for name, path in host_files.items()}
    return dict(sorted(files.items()))


def upload(client: Any, path: Path, bucket: str, key: str) -> None:
    """Upload a file of a job.

    Raises OSError if it cannot be read, ENOSPC if this disk has no room.
    """
    with open_regular_file(path, links=False) as body:
        _insist_on_room(path, [path])
        client.upload_fileobj(body, bucket, key, Config=TRANSFER)


def upload_all(client: Any, uri: str, files: dict[str, Path], work: Path) -> None:
    """Upload files by their names, or as one archive, which is made in the folder `work`."""
    bucket, key = split_uri(uri)
    if uri.endswith("/"):
        for name, path in files.items():
            upload(client, path, bucket, key + name)
        return
    archive = work / uri.rpartition("/")[2]
    _insist_on_room(work, files.values())
    # Level 1: weights hardly compress, and a laptop waits for this.
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for name, path in files.items():
            with open_regular_file(path, links=False) as body:
                tar.addfile(tar.gettarinfo(arcname=name, fileobj=body), body)
    client.upload_file(str(archive), bucket, key, Config=TRANSFER)
    archive.unlink()


def _insist_on_room(folder: Path, files: Any) -> None:
    """Raise OSError if files need more than the disk of `folder` has free, as sparse ones may."""
    size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(folder.parent).free
    if size > free:
        raise OSError(errno.ENOSPC, f"{size:,} bytes are to be kept, and {free:,} are free")


ML = PurePosixPath("/opt/ml")
MAX_LINKS = 40  # links in one path, as in the kernel
MOST_LINKED = 1_000
"""Folders that one walk enters through links: links to links soon make more than can be counted."""
KEY_BYTES = 1024
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html"""


def resolve_links(ml: Path, path: Path) -> Path | None:
    """Follow the links of a path below a host's /opt/ml (`ml` here); None if they leave it or form
    a loop.
    """
    remaining_parts, current, links = list(path.relative_to(ml).parts), ml, 0
    while remaining_parts:
        part = remaining_parts.pop(0)
        if part == "..":
            if current == ml:
                return None
            current = current.parent
            continue
        candidate = current / part
        if not candidate.is_symlink():
            current = candidate
            continue
        links += 1
        target = PurePosixPath(os.readlink(candidate))
        if links > MAX_LINKS:
            return None
        if target.is_absolute():
            root = next(
                (root for root in (ML, PurePosixPath(ml)) if target.is_relative_to(root)), None
            )
            if root is None:
                return None
            current, target = ml, target.relative_to(root)
        remaining_parts = [*target.parts, *remaining_parts]
    return current


@dataclass
class Tree:
    """The result of a walk through a folder of a host."""

    files: dict[str, Path] = field(default_factory=dict)
    """Regular files by relative name."""
    left_out: dict[str, str] = field(default_factory=dict)
    """The reason for each name missing from them."""
    folders: dict[Path, int] = field(default_factory=dict)
    """Each folder entered, with its mtime (ns) at that moment."""

    def stood_still(self) -> bool:
        """Whether nothing was created or deleted in a folder since the walk entered it."""
        try:
            return all(path.stat().st_mtime_ns == was for path, was in self.folders.items())
        except OSError:
            return False

    def leave_out(self, name: str, error: OSError) -> None:
        """Move a file that cannot be read to `left_out`."""
        del self.files[name]
        self.left_out[name] = _unreadable(error)

    def sentences(self, folder: str) -> list[str]:
        """Log lines about the files left out of a folder, one for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(printable_name(name))
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
    """List a folder of a host as the host sees it.

    `prefix` is the prefix of its files' S3 keys; None if they get no keys.
    """
    tree = Tree()
    root = resolve_links(ml, folder)  # a job may have put a link in the folder's place
    if root is None:
        tree.left_out["."] = NOWHERE
        return tree
    stack: list[tuple[Path, str, tuple[Path, ...]]] = [(root, "", (root,))]
    link_count = 0
    while stack:
        real, label, ancestors = stack.pop()
        try:
            tree.folders[real] = real.stat().st_mtime_ns
            names = sorted(os.listdir(real))
        except (FileNotFoundError, NotADirectoryError):
            continue  # it was just deleted
        except OSError as error:
            tree.left_out[label or "."] = _unreadable(error)
            continue
        inner = []
        for name in names:
            path, name = real / name, label + name
            try:
                if link := path.is_symlink():
                    target = resolve_links(ml, path)
                    if target is None or not target.exists() or target in ancestors:
                        tree.left_out[name] = NOWHERE
                        continue
                    path = target
                kind = path.stat().st_mode
                if stat.S_ISDIR(kind):
                    link_count += link
                    if link_count > MOST_LINKED:
                        tree.left_out[name] = TOO_MANY
                    else:
                        inner.append((path, f"{name}/", (*ancestors, path)))
                elif reason := _unfit(path, kind, None if prefix is None else prefix + name):
                    tree.left_out[name] = reason
                else:
                    tree.files[name] = path
            except FileNotFoundError:
                continue
            except OSError as error:
                tree.left_out[name] = _unreadable(error)
        stack += reversed(inner)
    return tree


def _unfit(path: Path, kind: int, key: str | None) -> str | None:
    """The reason why a file cannot go to S3 under this key; None if it can."""
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


def printable_name(name: str) -> str:
    """A name as it can stand in a log line."""
    return name if name.isprintable() else ascii(name)[1:-1]
