"""What a job leaves: /opt/ml/model and /opt/ml/output/data of all hosts, merged, to the request's S3OutputPath.

A link is uploaded as the file that it leads to.
"""

from __future__ import annotations

import errno
import shutil
import tarfile
from pathlib import Path
from typing import Any

from smtrain.core.protocol.uris import split_uri
from smtrain.plane.server.files import TRANSFER
from smtrain.plane.written import opened

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
