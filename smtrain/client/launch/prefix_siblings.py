"""Refuse an s3:// input whose siblings SageMaker would read too: a channel's S3Prefix matches keys,
not folders.

`s3://b/data` also matches `s3://b/data2/x` (S3DataSource: "all objects that match the specified key
name prefix").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.aws_errors import is_unanswered
from smtrain.core.config import JobConfig
from smtrain.core.config.schema import inputs_of
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.uris import split_uri


def sibling_of(list_page: Callable[..., dict[str, Any]], uri: str) -> tuple[str, str] | None:
    """Another URI that begins like this one, which names a folder or an object, and the remedy.

    None for a folder with its slash, and for the beginning of several keys (`s3://b/part-`), which
    is meant so. `list_page` sends a ListObjectsV2.
    """
    bucket, key = split_uri(uri)
    if not key or key.endswith("/"):
        return None
    page = list_page(Bucket=bucket, Prefix=key, Delimiter="/")
    names = {item["Key"] for item in page.get("Contents", [])} | {
        item["Prefix"] for item in page.get("CommonPrefixes", [])
    }
    config_key = f"{key}/" if f"{key}/" in names else key
    sibling_keys = sorted(names - {config_key})
    if config_key not in names or not sibling_keys:
        return None
    remedy = f"write {uri}/" if config_key != key else "put it under a prefix without other data"
    return f"s3://{bucket}/{sibling_keys[0]}", remedy


def refuse_siblings(config: JobConfig, request: dict[str, Any], target: SageMakerBackend) -> None:
    """Raise ConfigError if a channel of the request reads more than the config names; silent if S3
    does not tell.
    """
    keys = {path: key for key, path in inputs_of(config)}
    sources = (channel["DataSource"].get("S3DataSource") for channel in request["InputDataConfig"])
    for uri in (source["S3Uri"] for source in sources if source):
        try:
            finding = None if uri.endswith("/") else sibling_of(target.s3.list_objects_v2, uri)
        except Exception as error:
            if not is_unanswered(error):
                raise
            continue  # the job's role may list what this user may not
        if finding:
            sibling, remedy = finding
            raise ConfigError(
                [
                    f"{keys.get(uri, 'input')}: SageMaker reads all keys that begin like {uri},"
                    f" also {sibling}; {remedy}"
                ],
                code="config.combination",
            )
