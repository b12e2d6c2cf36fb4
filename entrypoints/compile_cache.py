"""The cache of compiled graphs: a prefix in S3, or a folder that all nodes of a Slurm cluster see.

Next to the entry scripts, because the package's worker half imports no AWS client. As a script it
copies the graphs of engine native on one host: `compile_cache.py fetch FOLDER` before training,
`compile_cache.py store FOLDER BEFORE` afterwards: files that were last changed before a time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smtrain.core.config.schema import GRAPHS_COMPLETE
from smtrain.core.errors import SmtrainError
from smtrain.core.files import write_atomically
from smtrain.core.protocol.entrypoints import GRAPHS
from smtrain.core.protocol.uris import split_uri

UNFINISHED_SUFFIXES = (".lock", ".tmp", ".part")


class CompileCache(ABC):
    """One place for graphs. Every method raises `SmtrainError` if it cannot be used."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @abstractmethod
    def fetch(self, folder: Path) -> None:
        """Copy all graphs into a folder, so that only new ones are compiled."""

    def store(self, folder: Path, files: list[Path]) -> None:
        """Copy files of a folder; the file that marks a graph as whole comes after the rest of
        it.
        """
        with self.refusals():
            for path in sorted(
                files, key=lambda p: (p.parent, p.suffix in (".neff", ".done"), p.name)
            ):
                self.put(path.relative_to(folder).as_posix(), path)

    def complete(self, result: dict[str, Any]) -> None:
        """Mark the cache as complete."""
        with self.refusals():
            self.put(GRAPHS_COMPLETE, (json.dumps(result, indent=1) + "\n").encode())

    @abstractmethod
    def names(self) -> set[str]:
        """The files of the cache."""

    @abstractmethod
    def put(self, name: str, content: Path | bytes) -> None:
        """Write a file of the cache, whole or not at all."""

    @abstractmethod
    def refusal(self, error: Exception) -> str | None:
        """Explain why the cache cannot be used, and what to do; None if the error has another
        cause.
        """

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn errors of the storage into `SmtrainError`."""
        try:
            yield
        except Exception as error:
            if (reason := self.refusal(error)) is None:
                raise
            raise SmtrainError(f"the compile cache {self.uri} cannot be used {reason}") from None


class GraphsInFolder(CompileCache):
    """A shared folder."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._shared = Path(uri)

    def fetch(self, folder: Path) -> None:
        if self._shared.is_dir():
            with self.refusals():
                # Hidden files are those that another job is writing.
                shutil.copytree(
                    self._shared,
                    folder,
                    ignore=shutil.ignore_patterns(GRAPHS_COMPLETE, ".*"),
                    dirs_exist_ok=True,
                )

    def names(self) -> set[str]:
        with self.refusals():
            return {
                path.relative_to(self._shared).as_posix()
                for path in self._shared.rglob("*")
                if path.is_file()
            }

    def put(self, name: str, content: Path | bytes) -> None:
        path = self._shared / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, content if isinstance(content, bytes) else content.read_bytes(), sync=False
        )

    def refusal(self, error: Exception) -> str | None:
        return f"({error})" if isinstance(error, OSError) else None


class GraphsInS3(CompileCache):
    """A prefix in S3, with the job's own role."""

    def __init__(self, uri: str) -> None:
        import boto3

        super().__init__(uri)
        self._bucket, prefix = split_uri(uri)
        self._prefix = f"{prefix.rstrip('/')}/"
        self._client = boto3.client("s3")

    def fetch(self, folder: Path) -> None:
        with self.refusals():
            for name in self.names():
                path = folder / name
                # A key with `..` must not write outside the folder; a warm pool has most files
                # already.
                is_inside = path.resolve().is_relative_to(folder.resolve())
                if path.name != GRAPHS_COMPLETE and is_inside and not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._client.download_file(self._bucket, self._prefix + name, str(path))

    def names(self) -> set[str]:
        with self.refusals():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            keys = (item["Key"] for page in pages for item in page.get("Contents", []))
            return {key[len(self._prefix) :] for key in keys if not key.endswith("/")}

    def put(self, name: str, content: Path | bytes) -> None:
        key = self._prefix + name
        if isinstance(content, bytes):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=content)
        else:
            self._client.upload_file(str(content), self._bucket, key)

    def refusal(self, error: Exception) -> str | None:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        if not isinstance(error, (Boto3Error, BotoCoreError, ClientError)):
            return None
        return (
            f"({error}); let the role list, read and write it (`smtrain iam policy CONFIG --role`)"
        )


def cache_at(uri: str) -> CompileCache:
    """The cache at an s3:// URI, or in a shared folder."""
    return (
        GraphsInS3(uri) if uri.startswith("s3://") else GraphsInFolder(uri.removeprefix("file://"))
    )


def new_files(folder: Path, cached_names: set[str], latest_mtime: float) -> list[Path]:
    """Files of a folder that the cache does not have, and that were last changed before a time."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(
        path
        for path in files
        if path.relative_to(folder).as_posix() not in cached_names
        and not path.name.startswith(".")
        and path.suffix not in UNFINISHED_SUFFIXES
        and path.stat().st_mtime <= latest_mtime
    )


def main() -> None:
    """Copy the graphs of this host; a cache that cannot be used costs only time, so the job goes
    without it.
    """
    action, folder = sys.argv[1], Path(sys.argv[2])
    began = time.monotonic()
    try:
        cache = cache_at(os.environ[GRAPHS])
        if action == "fetch":
            had = {*folder.rglob("*")}
            cache.fetch(folder)
            file_count = sum(path.is_file() for path in {*folder.rglob("*")} - had)
        else:
            files = new_files(folder, cache.names(), float(sys.argv[3]))
            cache.store(folder, files)
            file_count = len(files)
    except (SmtrainError, ImportError, OSError) as error:
        print(f"graphs: {action} failed, so graphs may be compiled again ({error})", flush=True)
        return
    way = "from" if action == "fetch" else "new ones to"
    print(
        f"graphs: {file_count} files {way} {cache.uri} in {time.monotonic() - began:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
