"""Parse URIs, recognise other spellings of addresses, and list the objects at an S3 URI."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from smtrain.core.targets import TARGETS

HUBS = ("hf://", "modelscope://")
"""Schemes of models that stage fetch downloads: the Hugging Face hub, or a mirror of it, and
ModelScope.
"""
HUB = re.compile(r"(hf|modelscope)://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
"""A model of a hub: the scheme, its id, and a revision."""

OSS = "oss://"
"""Scheme of Alibaba Cloud's Object Storage Service."""

JUMPSTART = "jumpstart://"
"""Scheme of a model of SageMaker JumpStart."""
JUMPSTART_MODEL = re.compile(r"jumpstart://([A-Za-z0-9][\w.-]*)(?:@([\w.*]+))?")
"""Its model id and version."""
JUMPSTART_BUCKET = "jumpstart-cache-prod-"
"""JumpStart's public bucket of a region begins like this and ends with the region."""

RUN = "run://"
"""Scheme of the model that an earlier run exported, by the run's name."""
RUN_NAME = re.compile(r"run://([a-zA-Z0-9](?:-*[a-zA-Z0-9]){0,62})")

# A path that was made of a URL has one slash after the scheme.
_WEB = r"(?:https?:/{1,2})?(?:www\.)?"
_NAME = r"[\w.-]+"
_NO_ORGANIZATION = "spaces|docs|blog|papers|collections|models|datasets|learn|join|login"
_HUB_PAGE = re.compile(
    rf"{_WEB}(?:huggingface\.co|hf\.co)/(datasets/)?(?!(?:{_NO_ORGANIZATION})(?:/|$))({_NAME}/{_NAME}|{_NAME})"
    rf"(?:/(?:tree|blob|resolve|raw|commit)/({_NAME}))?(?:[/?#].*)?",
    re.I,
)
_MODELSCOPE_PAGE = re.compile(
    rf"{_WEB}modelscope\.(?:cn|ai)/(?:models|datasets)/({_NAME}/{_NAME})(?:[/?#].*)?", re.I
)
_BUCKET_HOST = re.compile(
    r"https?:/{1,2}([a-z0-9.-]+)\.s3(?:[.-][a-z0-9-]+)*\.amazonaws\.com(?:\.cn)?/?([^?#]*).*", re.I
)
_S3_HOST = re.compile(
    r"https?:/{1,2}s3(?:[.-][a-z0-9-]+)*\.amazonaws\.com(?:\.cn)?/([^/?#]+)/?([^?#]*).*", re.I
)
_S3_CONSOLE = re.compile(
    r"https?:/{1,2}\S*console\.aws\.amazon\.com/s3/(?:buckets|object)/([^/?#]+)(?:.*?prefix=([^&#]*))?.*",
    re.I,
)
_S3_ARN = re.compile(r"arn:aws[\w-]*:s3:::([^/]+)/?(.*)")
_SCHEMES = (
    (re.compile(r"s3[an]?:/{0,2}(?=[^/])", re.I), "s3://"),
    (re.compile(r"oss:/{0,2}(?=[^/])", re.I), "oss://"),
    (re.compile(r"(?:hf|huggingface):/{0,2}(?=[^/])", re.I), "hf://"),
    (re.compile(r"modelscope:/{0,2}(?=[^/])", re.I), "modelscope://"),
    (re.compile(r"jumpstart:/{0,2}(?=[^/])", re.I), "jumpstart://"),
    (re.compile(r"demo:/{0,2}(?=[^/])", re.I), "demo://"),
    (re.compile(r"run:/{0,2}(?=[^/])", re.I), "run://"),
    (re.compile(r"file:/{1,3}(?=[^/])", re.I), "/"),
)


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key (or prefix) of an s3:// or oss:// URI: `("bucket", "some/key")` for
    `s3://bucket/some/key`; for a file:// URI an empty bucket and the path.
    """
    if uri.startswith("file://"):
        return "", uri.removeprefix("file://")
    bucket, _, key = uri.removeprefix("s3://").removeprefix("oss://").partition("/")
    return bucket, key


def objects_at(list_page: Callable[..., dict[str, Any]], uri: str) -> Iterator[dict[str, Any]]:
    """The objects whose URIs begin with this one, as S3 describes them; `list_page` sends a
    ListObjectsV2.
    """
    bucket, prefix = split_uri(uri)
    token: dict[str, str] = {}
    while True:
        page = list_page(Bucket=bucket, Prefix=prefix, **token)
        yield from page.get("Contents", [])
        if not page.get("IsTruncated"):
            return
        token = {"ContinuationToken": page["NextContinuationToken"]}


def meant(text: str, *, data: bool = False) -> str | None:
    """The address in our spelling; None if it is already spelled so, or is not an address.

    Recognises pages of the Hugging Face hub and of ModelScope, URLs and ARNs of S3, and schemes
    with other slashes or upper case. data: a data set is meant, whose revision follows `#`.
    """
    if (page := _HUB_PAGE.fullmatch(text)) and (data or not page[1]):
        name = page[2] if "/" in page[2] or data else f"organization/{page[2]}"
        mark = "#" if data else "@"
        return f"hf://{name}" + (f"{mark}{page[3]}" if page[3] not in (None, "main") else "")
    if page := _MODELSCOPE_PAGE.fullmatch(text):
        return f"modelscope://{page[1]}"
    for form in (_S3_HOST, _BUCKET_HOST, _S3_CONSOLE, _S3_ARN):
        if match := form.fullmatch(text):
            return f"s3://{match[1]}/{match[2] or ''}".rstrip("/")
    for scheme, smtrain_scheme in _SCHEMES:
        if (match := scheme.match(text)) and match[0] != smtrain_scheme:
            return smtrain_scheme + text[match.end() :]
    return None


def spelling_fault(
    text: str, accepted_schemes: tuple[str, ...], *, data: bool = False
) -> str | None:
    """Say how smtrain writes an address; None if it is written so, is not an address, or has a
    scheme outside in `accepted_schemes` (paths are always taken).
    """
    smtrain_uri = meant(text, data=data)
    return (
        f"{text} is written {smtrain_uri} here; give that"
        if smtrain_uri and smtrain_uri.startswith(("/", *accepted_schemes))
        else None
    )


def not_here(text: str) -> str | None:
    """Say how to download a model of a hub, for commands that read folders; None for other
    paths.
    """
    uri = meant(text) or text
    if not uri.startswith(HUBS):
        return None
    scheme, _, name = uri.partition("://")
    name, _, revision = name.partition("@")
    folder = name.rpartition("/")[2]
    if scheme == "hf":
        copy = (
            f"hf download {name}{f' --revision {revision}' if revision else ''} --local-dir"
            f" {folder}"
        )
    else:
        copy = f"modelscope download --model {name} --local_dir {folder}"
    return (
        f"{text} is a model of a hub, and this command reads a folder; `{copy}` makes one, then"
        f" give {folder}"
    )


TYPES = {"fsx": "FSxLustre", "efs": "EFS"}
_URI = re.compile(r"(fsx|efs)://(fs-[0-9a-f]{8,18})(/[^\s]*)")


def is_mounted(uri: str | None) -> bool:
    """Whether this is a URI of an AWS file system: fsx://fs-ID/FOLDER (FSx for Lustre) or
    efs://fs-ID/FOLDER.
    """
    return bool(uri) and str(uri).partition("://")[0] in TYPES


def data_source(uri: str) -> dict[str, str] | None:
    """The `FileSystemDataSource` of a channel, read-only; None for a URI in another form."""
    match = _URI.fullmatch(uri)
    if match is None:
        return None
    return {
        "FileSystemId": match[2],
        "FileSystemType": TYPES[match[1]],
        "FileSystemAccessMode": "ro",
        "DirectoryPath": match[3].rstrip("/") or "/",
    }


def object_store(target: str) -> str:
    """Scheme of the target's object store: s3://, for PAI-DLC oss://."""
    return TARGETS[target].store


A_URI = {"s3://": "an s3:// URI", "oss://": "an oss:// URI"}
"""The URIs of each object store, for sentences."""


def readable_schemes(target: str, *, with_mounts: bool = False) -> tuple[str, ...]:
    """Schemes of what a target's jobs can read, other than hubs: its object store, AWS's file
    systems if `with_mounts`, and file://, which stands for a path that the jobs see (load.py).
    """
    record = TARGETS[target]
    return (
        record.store,
        *(record.file_systems if with_mounts else ()),
        *(("file://",) if record.paths else ()),
    )
