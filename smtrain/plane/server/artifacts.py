"""What a job leaves: /opt/ml/model and /opt/ml/output/data of all hosts, merged, to the request's S3OutputPath.

A link is uploaded as the file that it leads to.
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

from smtrain.core.protocol.uris import split_uri
from smtrain.plane.files import opened

TRANSFER = TransferConfig(max_concurrency=4)
"""Server and transfers share this machine: more parts at once are no faster, and each is held in memory."""
MODEL, OUTPUT = ("model", "model.tar.gz"), ("data", "output.tar.gz")
"""Folder of files in S3, and name of the archive in its place."""


def uri_of(request: dict[str, Any], names: tuple[str, str] = MODEL) -> str:
    """The address of an artefact of a job: a prefix of files, or an archive."""
    output = request["OutputDataConfig"]
    base = f"{output['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}/output"
    folder, archive = names
    return f"{base}/{folder}/" if output.get("CompressionType") == "NONE" else f"{base}/{archive}"


def merged(hosts: list[dict[str, Path]]) -> dict[str, Path]:
    """Relative name -> file over all hosts' folders; the first host that has a name wins."""
    files = {name: path for found in reversed(hosts) for name, path in found.items()}
    return dict(sorted(files.items()))


def upload(client: Any, path: Path, bucket: str, key: str) -> None:
    """Bring a file that a job left to S3. Raises OSError if it cannot be read, ENOSPC if this machine has no room."""
    with opened(path, links=False) as body:
        _insist_on_room(path, [path])
        client.upload_fileobj(body, bucket, key, Config=TRANSFER)


def upload_all(client: Any, uri: str, files: dict[str, Path], work: Path) -> None:
    """Bring files to S3 by their names, or as one archive, which is made in the folder `work`."""
    bucket, key = split_uri(uri)
    if uri.endswith("/"):
        for name, path in files.items():
            upload(client, path, bucket, key + name)
        return
    packed = work / uri.rpartition("/")[2]
    _insist_on_room(work, files.values())
    # Level 1: weights hardly compress, and a laptop waits for this.
    with tarfile.open(packed, "w:gz", compresslevel=1) as tar:
        for name, path in files.items():
            with opened(path, links=False) as body:
                tar.addfile(tar.gettarinfo(arcname=name, fileobj=body), body)
    client.upload_file(str(packed), bucket, key, Config=TRANSFER)
    packed.unlink()


def _insist_on_room(here: Path, files: Any) -> None:
    """Raise OSError if files are larger than what is free on the disk of `here`: a sparse one may be."""
    size, free = sum(path.stat().st_size for path in files), shutil.disk_usage(here.parent).free
    if size > free:
        raise OSError(errno.ENOSPC, f"{size:,} bytes are to be kept, and {free:,} are free")


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
