"""A cache of compiled graphs, between a folder and S3, with the job's own role.

It lies beside the entry scripts, because the package's container half imports no AWS client.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smtrain.config.schema import GRAPHS_COMPLETE
from smtrain.contract.uris import split_uri
from smtrain.errors import SmtrainError


class GraphsInS3:
    """One prefix. Every method raises `SmtrainError` where the role may not do it."""

    def __init__(self, uri: str) -> None:
        import boto3

        self.uri = uri
        self._bucket, prefix = split_uri(uri)
        self._prefix = f"{prefix.rstrip('/')}/"
        self._client = boto3.client("s3")

    def fetch(self, folder: Path) -> None:
        """Copy all graphs into a folder, so that only what is new is compiled."""
        with _Refusals(self.uri):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for item in (item for page in pages for item in page.get("Contents", [])):
                path = folder / item["Key"][len(self._prefix) :]
                if path.name != GRAPHS_COMPLETE and path.resolve().is_relative_to(folder.resolve()):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._client.download_file(self._bucket, item["Key"], str(path))

    def store(self, folder: Path, files: list[Path]) -> None:
        """Copy files of a folder; what says that a graph is whole comes after the rest of it."""
        with _Refusals(self.uri):
            for path in sorted(files, key=lambda p: (p.parent, p.suffix in (".neff", ".done"), p.name)):
                self._client.upload_file(str(path), self._bucket, self._prefix + path.relative_to(folder).as_posix())

    def complete(self, told: dict[str, Any]) -> None:
        """Say that all graphs are there."""
        with _Refusals(self.uri):
            body = (json.dumps(told, indent=1) + "\n").encode()
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + GRAPHS_COMPLETE, Body=body)


class _Refusals:
    """A refusal by S3 becomes a sentence."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        if isinstance(error, (Boto3Error, BotoCoreError, ClientError)):
            raise SmtrainError(
                f"the compile cache {self._uri} cannot be used ({error}); let the role list, read and write it "
                "(`smtrain iam policy CONFIG --role`)"
            ) from None
