"""Copies of folders in Alibaba Cloud's Object Storage Service, for conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smtrain.client.backends.pai.backend import PaiBackend
from smtrain.client.backends.pai.registry import REGISTRY
from smtrain.client.jobs.copies import StoreCopy
from smtrain.client.jobs.results import md5_of
from smtrain.core.errors import CheckpointError
from smtrain.core.protocol.uris import OSS, split_uri
from smtrain.core.text import Say

_MANIFEST = "manifest.json"


def fetch_copy(uri: str, say: Say) -> Path:
    """A copy of what is below an oss:// URI; files that are here already are not fetched again."""
    copy = StoreCopy(PaiBackend(REGISTRY.section_of()), uri)
    say(f"fetching {copy.uri} into {copy.folder}")
    return copy.fetch()


def upload_folder(folder: Path, uri: str, overwrite: bool, say: Say) -> None:
    """Write the files of a folder below an oss:// URI, the manifest last."""
    cloud, prefix = PaiBackend(REGISTRY.section_of()).cloud, f"{uri.rstrip('/')}/"
    bucket, key = split_uri(prefix)
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    remote_files = {item["Key"][len(key) :]: item for item in cloud.listing(prefix)}
    stale_names = [
        name
        for name, item in remote_files.items()
        if name not in files or not _is_same(files[name], item)
    ]
    if stale_names and not overwrite:
        raise CheckpointError(
            f"{uri} has other files, such as {stale_names[0]}; name another prefix, or use"
            " --overwrite"
        )
    for name in stale_names:
        cloud.remove(f"{OSS}{bucket}/{key}{name}")
    last = [name for name in files if name.rpartition("/")[2] == _MANIFEST]
    for names_to_send in ([name for name in files if name not in last], last):
        cloud.put(prefix, [(name, files[name]) for name in names_to_send], say)


def _is_same(path: Path, item: dict[str, Any]) -> bool:
    """Whether an object has a file's content, as far as OSS says: one that was sent in parts has no
    MD5.
    """
    etag = str(item.get("ETag", "")).strip('"')
    return bool(item["Size"] == path.stat().st_size) and (len(etag) != 32 or etag == md5_of(path))
