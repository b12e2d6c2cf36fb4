"""Input channels: the objects that a host sees, their names, and their download."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.protocol.uris import objects_at, split_uri
from smtrain.plane.files import safe_join
from smtrain.plane.server.artifacts import TRANSFER


class InputError(Exception):
    """An invalid input of the request; becomes the job's FailureReason."""


def s3_input_error(error: Any, subject: str) -> InputError:
    """The FailureReason for a `ClientError` of S3."""
    problem = error.response["Error"]
    return InputError(f"Data download failed: {problem['Code']}: {problem['Message']}, {subject}")


@dataclass(frozen=True)
class Entry:
    """One object of a channel and its path below the channel's folder."""

    key: str
    path: str
    size: int
    modified_at: float


@dataclass(frozen=True)
class Channel:
    """An S3 channel of the request as one host sees it."""

    name: str
    bucket: str
    entries: tuple[Entry, ...]
    lazy: bool


def describe_inputs(request: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The content of inputdataconfig.json."""
    default = request["AlgorithmSpecification"].get("TrainingInputMode", "File")
    description = {}
    for channel in request.get("InputDataConfig") or []:
        source = channel["DataSource"]["S3DataSource"]
        description[channel["ChannelName"]] = {
            "TrainingInputMode": channel.get("InputMode", default),
            "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
        }
        if "ContentType" in channel:
            description[channel["ChannelName"]]["ContentType"] = channel["ContentType"]
    return description


def resolve(client: Any, request: dict[str, Any], rank: int, hosts: int) -> list[Channel]:
    """List the channels of host `rank`. Raises InputError for an empty bucket or prefix."""
    inputs = describe_inputs(request)
    channels = []
    for channel in request.get("InputDataConfig") or []:
        name = channel["ChannelName"]
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        entries = list_prefix(client, uri)
        if inputs[name]["S3DistributionType"] == "ShardedByS3Key":
            entries = entries[rank::hosts]
        lazy = inputs[name]["TrainingInputMode"] == "FastFile"
        channels.append(Channel(name, split_uri(uri)[0], tuple(entries), lazy))
    return channels


def list_prefix(client: Any, uri: str) -> list[Entry]:
    """The objects of an S3Prefix in key order, named as on an instance.

    All keys that begin like the prefix match, also those of a folder next to the intended one:
    `a/b` matches `a/b2/c`. Keys of the folder (`a/b/...` for `a/b` or `a/b/`) give paths below it.
    Any other key gives the path below the prefix's last slash, as SageMaker keeps the whole name of
    a file that a prefix matches in part (aws/sagemaker-python-sdk, issue 3612).
    """
    bucket, prefix = split_uri(uri)
    try:
        items = list(objects_at(client.list_objects_v2, uri))
    except client.exceptions.ClientError as error:
        raise s3_input_error(error, f"bucket {bucket} of {uri}") from None
    folder, around = (
        prefix if not prefix or prefix.endswith("/") else prefix + "/",
        prefix[: prefix.rfind("/") + 1],
    )
    entries = [
        Entry(
            key,
            key[len(folder if key.startswith(folder) else around) :],
            item["Size"],
            item["LastModified"].timestamp(),
        )
        for item in sorted(items, key=lambda item: item["Key"])
        if not (key := item["Key"]).endswith("/")
    ]
    if not entries:
        raise InputError(
            f"Data download failed: No S3 objects found under S3 URL {uri!r} given in input data"
            " source. Please ensure that the bucket exists in the selected region, that objects"
            " exist under that S3 prefix"
        )
    for entry in entries:
        try:
            safe_join(Path("/"), entry.path)
        except ValueError:
            raise InputError(
                f"Data download failed: the key {entry.key!r} points outside its channel"
            ) from None
    return entries


def download_to(client: Any, bucket: str, key: str, folder: Path, name: str, source: str) -> None:
    """Download an object of `source` to `folder/name`.

    Raises InputError if a file cannot have that name, `ClientError` of S3, and OSError for a full
    disk.
    """
    try:
        target = safe_join(folder, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, key, str(target), Config=TRANSFER)
    except (FileExistsError, IsADirectoryError, NotADirectoryError):
        raise InputError(
            f"Data download failed: {name!r} of {source} is a file and a folder at once"
        ) from None
    except ValueError:
        raise InputError(
            f"Data download failed: the key {key!r} points outside of {source}"
        ) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise InputError(
            f"Data download failed: the name {name!r} of {source} is too long for a file"
        ) from None


def download(client: Any, channel: Channel, folder: Path, is_cancelled: Callable[[], bool]) -> None:
    """Download a channel to `folder`; stop between objects when `is_cancelled`."""
    folder.mkdir(parents=True, exist_ok=True)

    def fetch(entry: Entry) -> None:
        if is_cancelled():
            return
        try:
            download_to(
                client, channel.bucket, entry.key, folder, entry.path, f"channel {channel.name}"
            )
        except client.exceptions.ClientError as error:
            raise s3_input_error(error, f"s3://{channel.bucket}/{entry.key}") from None

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, channel.entries))
