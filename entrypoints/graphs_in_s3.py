"""A cache of compiled graphs, between a folder and S3, with the job's own role.

It lies beside the entry scripts, because the package's container half imports no AWS client.
"""

from __future__ import annotations

from pathlib import Path

from compile_cache import CompileCache

from smtrain.core.config.schema import GRAPHS_COMPLETE
from smtrain.core.protocol.uris import split_uri


class GraphsInS3(CompileCache):
    """One prefix."""

    def __init__(self, uri: str) -> None:
        import boto3

        super().__init__(uri)
        self._bucket, prefix = split_uri(uri)
        self._prefix = f"{prefix.rstrip('/')}/"
        self._client = boto3.client("s3")

    def fetch(self, folder: Path) -> None:
        with self.refusals():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for item in (item for page in pages for item in page.get("Contents", [])):
                path = folder / item["Key"][len(self._prefix) :]
                if path.name != GRAPHS_COMPLETE and path.resolve().is_relative_to(folder.resolve()):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._client.download_file(self._bucket, item["Key"], str(path))

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
        return f"({error}); let the role list, read and write it (`smtrain iam policy CONFIG --role`)"
