"""Folders on AWS file systems, as a config names them: fsx://fs-ID/FOLDER (FSx for Lustre) and efs://fs-ID/FOLDER."""

from __future__ import annotations

import re

TYPES = {"fsx": "FSxLustre", "efs": "EFS"}
_URI = re.compile(r"(fsx|efs)://(fs-[0-9a-f]{8,18})(/[^\s]*)")


def is_mounted(uri: str | None) -> bool:
    """Whether this names a folder on a file system, well spelled or not."""
    return bool(uri) and str(uri).partition("://")[0] in TYPES


def data_source(uri: str) -> dict[str, str] | None:
    """The `FileSystemDataSource` of a channel, read-only; None for what is not spelled like one."""
    found = _URI.fullmatch(uri)
    if found is None:
        return None
    return {
        "FileSystemId": found[2],
        "FileSystemType": TYPES[found[1]],
        "FileSystemAccessMode": "ro",
        "DirectoryPath": found[3].rstrip("/") or "/",
    }
