"""List S3 objects by URI."""

from __future__ import annotations

from typing import Any

from smtrain.client.backends.sagemaker.clients import Clients
from smtrain.client.backends.sagemaker.uploads import owner
from smtrain.core.errors import JobError
from smtrain.core.protocol.uris import split_uri


def list_objects(target: Clients, uri: str) -> list[dict[str, Any]]:
    """The objects under a prefix. Raises `JobError` if it may not be listed."""
    from botocore.exceptions import ClientError

    try:
        return listed(target, uri)
    except ClientError as error:
        raise JobError(f"{uri} cannot be listed ({error.response['Error'].get('Code')}); check the URI and the "
                       "permissions s3:ListBucket and s3:GetObject") from None  # fmt: skip


def listed(target: Clients, uri: str) -> list[dict[str, Any]]:
    """The objects under a prefix. Raises botocore's `ClientError` if it may not be listed."""
    bucket, prefix = split_uri(uri)
    asked = {"Bucket": bucket, "Prefix": prefix, **owner(target, bucket)}
    pages = target.s3.get_paginator("list_objects_v2").paginate(**asked)
    return [item for page in pages for item in page.get("Contents", [])]
