"""Small helpers for files and S3 transfers of the control plane."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from boto3.s3.transfer import TransferConfig

from smtrain.plane.written import set_aside

# Server and transfers share this machine: more parts at once are no faster and each is held in memory several times.
TRANSFER = TransferConfig(max_concurrency=4)


def within(folder: Path, relative: str) -> Path:
    """`folder/relative`, refusing (ValueError) names that would lead out of the folder."""
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in relative:
        raise ValueError(f"the name {relative!r} points outside {folder}")
    return folder.joinpath(*parts)


def remove(path: Path) -> None:
    """Remove a file or a folder with all it holds, however deep and of any modes; say it if something is left."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    if not os.path.lexists(path):
        return
    # Python's own fails for trees deeper than its stack, longer than a path may be, or without permissions.
    for command in (["chmod", "-R", "u+rwX"], ["chattr", "-R", "-f", "-i", "-a"], ["rm", "-rf", "--"]):
        with contextlib.suppress(OSError):
            subprocess.run([*command, str(path)], capture_output=True, check=False)
    if os.path.lexists(path):
        print(f"warning: {path} could not be removed; it stays on the disk", flush=True)


def make_folder(path: Path) -> Path:
    """A folder that is there from now on; what else lies in its place is set aside."""
    if os.path.lexists(path) and not path.is_dir():
        set_aside(path, "is not a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path
