"""Keys and uploads that S3 refuses: keys of more than 1,024 bytes, and uploads that do not
exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from .conftest import Client

LONGEST = "long/" + "é" * 509 + "x"  # 1,024 bytes, and far fewer characters
LONGER = LONGEST + "y"


def code_of(error: ClientError) -> tuple[str, int]:
    response: Any = error.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def test_1024_bytes_are_a_key(client: Client) -> None:
    assert len(LONGEST.encode()) == 1024
    client.put(LONGEST, b"whole")
    assert client.get(LONGEST) == b"whole"
    assert LONGEST in client.keys("long/")


WAYS: dict[str, Callable[[Client, Any], Any]] = {
    "put": lambda client, where: client.s3.put_object(**where, Body=b"x"),
    "put a large body": lambda client, where: client.s3.put_object(**where, Body=bytes(20 << 20)),
    "copy": lambda client, where: client.s3.copy_object(
        **where, CopySource=f"{client.bucket}/long-source/a"
    ),
    "multipart": lambda client, where: client.s3.create_multipart_upload(**where),
}


@pytest.mark.parametrize("way", WAYS)
def test_more_is_refused_and_nothing_is_stored(client: Client, way: str) -> None:
    client.put("long-source/a", b"x")
    with pytest.raises(ClientError) as caught:
        WAYS[way](client, {"Bucket": client.bucket, "Key": LONGER})
    assert code_of(caught.value) == ("KeyTooLongError", 400)
    assert "1024 bytes" in str(caught.value)
    assert LONGER not in client.keys("long/")
    assert not client.s3.list_multipart_uploads(Bucket=client.bucket).get("Uploads")


def test_an_upload_that_is_not_there_is_named_as_s3_names_it(client: Client) -> None:
    parts: Any = {"Parts": [{"PartNumber": 1, "ETag": "a"}]}
    with pytest.raises(ClientError) as caught:
        client.s3.complete_multipart_upload(
            Bucket=client.bucket, Key="a", UploadId="made-up", MultipartUpload=parts
        )
    assert code_of(caught.value) == ("NoSuchUpload", 404)
