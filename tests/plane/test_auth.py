"""Only the owner of the home's secret can start a process: every attack ends in 403 and changes
nothing.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.auth
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from smtrain.plane.client import CONTROL_PATH, Endpoint

from .conftest import Client

TARGET = "SageMaker.CreateTrainingJob"


def call(
    endpoint: Endpoint,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
) -> tuple[int, bytes]:
    """One request as it is given, over a plain connection."""
    where = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def signed(
    endpoint: Endpoint, body: bytes, *, access_key: str = "", secret: str = ""
) -> dict[str, str]:
    """Headers of a CreateTrainingJob call with this body."""
    headers = {"X-Amz-Target": TARGET, "Content-Type": "application/x-amz-json-1.1"}
    request = AWSRequest("POST", f"{endpoint.url}/", headers, body)
    keys = Credentials(access_key or endpoint.access_key, secret or endpoint.secret_key)
    SigV4Auth(keys, "sagemaker", endpoint.region).add_auth(request)
    return dict(request.headers.items())


@pytest.fixture
def job(client: Client) -> dict[str, Any]:
    return client.request("true", TrainingJobName=f"attack-{time.time_ns()}")


def test_what_is_signed_is_answered(client: Client, job: dict[str, Any]) -> None:
    body = json.dumps(job).encode()
    assert call(client.endpoint, "POST", "/", signed(client.endpoint, body), body)[0] == 200
    client.wait(job["TrainingJobName"])


ATTACKS = {
    "no credentials": ({}, {}),
    "made up keys": ({"access_key": "AKIAIOSFODNN7EXAMPLE", "secret": "x"}, {}),
    "the key of a link without the secret": ({"secret": "x"}, {}),
    "a foreign host": ({}, {"Host": "evil.example"}),
    "a host that looks like ours": ({}, {"Host": "127.0.0.1.evil.example"}),
    "a web page": ({}, {"Origin": "http://evil.example"}),
    "a web page of this machine": ({}, {"Origin": "http://127.0.0.1"}),
    "a file opened in a browser": ({}, {"Origin": "null"}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_starts_a_job(client: Client, job: dict[str, Any], attack: str) -> None:
    keys, changed = ATTACKS[attack]
    body = json.dumps(job).encode()
    headers = {} if attack == "no credentials" else signed(client.endpoint, body, **keys)
    sent = {"X-Amz-Target": TARGET, "Content-Type": "text/plain", **headers, **changed}
    assert call(client.endpoint, "POST", "/", sent, body)[0] == 403
    with pytest.raises(ClientError, match="Requested resource not found"):
        client.describe(job["TrainingJobName"])


def test_a_signature_is_for_what_was_signed(client: Client, job: dict[str, Any]) -> None:
    """Another body, operation, path or host under the same signature is refused."""
    endpoint = client.endpoint
    body = json.dumps(job).encode()
    headers = signed(endpoint, body)
    other = body.replace(b"true", b"evil")
    assert other != body
    assert call(endpoint, "POST", "/", headers, other)[0] == 403
    assert (
        call(endpoint, "POST", "/", {**headers, "X-Amz-Target": "SageMaker.StopTrainingJob"}, body)[
            0
        ]
        == 403
    )
    assert call(endpoint, "POST", "/?x=1", headers, body)[0] == 403
    assert call(endpoint, "PUT", "/", headers, body)[0] == 403
    assert (
        call(
            endpoint, "POST", "/", {**headers, "Authorization": headers["Authorization"][:-1]}, body
        )[0]
        == 403
    )
    unsigned = headers["Authorization"].replace("host;", "")
    assert call(endpoint, "POST", "/", {**headers, "Authorization": unsigned}, body)[0] == 403
    with pytest.raises(ClientError, match="Requested resource not found"):
        client.describe(job["TrainingJobName"])


@pytest.mark.parametrize(
    "path",
    [
        "/moto-api/reset",
        "/%6doto-api/reset",
        "/%6Doto%2Dapi/reset",
        "//moto-api/reset",
        "/./moto-api/reset",
        "/x/../moto-api/reset",
        f"{CONTROL_PATH}faults",
        f"/.{CONTROL_PATH}faults",
        "/%73mtrain/control/faults",
        "/smtrain/ready/../control/faults",
        "/smtrain/ready%2F..%2Fcontrol/faults",
        "/smtrain/ready?x",
        "/SMTRAIN/ready/",
    ],
)
def test_no_spelling_of_a_path_is_a_way_in(client: Client, path: str) -> None:
    for headers in ({}, {"Authorization": f"SMTRAIN Credential={client.endpoint.access_key}/"}):
        status, reply = call(client.endpoint, "POST", path, headers, b'{"clear": true}')
        assert status == 403 or json.loads(reply) == {"pid": client.endpoint.pid}
    assert client.s3.head_bucket(Bucket=client.bucket)


def test_motos_own_api_is_closed_to_the_owner_too(client: Client) -> None:
    request = AWSRequest("POST", f"{client.endpoint.url}/moto-api/reset")
    keys = Credentials(client.endpoint.access_key, client.endpoint.secret_key)
    SigV4Auth(keys, "s3", client.endpoint.region).add_auth(request)
    assert call(client.endpoint, "POST", "/moto-api/reset", dict(request.headers.items()))[0] == 403
    assert client.s3.head_bucket(Bucket=client.bucket)


def test_other_machines_do_not_reach_it(client: Client) -> None:
    """It listens only on loopback."""
    port = urlsplit(client.endpoint.url).port
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            own = probe.getsockname()[0]
        except OSError:
            pytest.skip("this machine has no address but loopback")
    with pytest.raises(OSError):
        socket.create_connection((own, port), timeout=10)


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_a_link_is_for_one_object_and_its_time(client: Client, version: str) -> None:
    """A link reads its object; its parameters are good for nothing else."""
    endpoint = client.endpoint
    key = f"a folder/{version} ü+&.txt"
    client.put(key, b"body")
    client.put("other", b"secret")
    s3 = endpoint.session().client("s3", config=Config(signature_version=version))

    def path(**options: Any) -> str:
        url = s3.generate_presigned_url(
            "get_object", Params={"Bucket": client.bucket, "Key": key}, **options
        )
        return str(url.removeprefix(endpoint.url))

    link = path()
    assert endpoint.secret_key not in link
    assert call(endpoint, "GET", link) == (200, b"body")
    query = link.partition("?")[2]
    assert call(endpoint, "GET", f"/{client.bucket}/other?{query}")[0] == 403
    assert call(endpoint, "PUT", link, body=b"changed")[0] == 403
    assert call(endpoint, "GET", f"/{client.bucket}?list-type=2&{query}")[0] == 403
    assert call(endpoint, "POST", f"/?{query}", {"X-Amz-Target": TARGET}, b"{}")[0] == 403
    assert call(endpoint, "GET", path(ExpiresIn=-10))[0] == 403
    assert client.get(key) == b"body"


def test_a_link_to_put_an_object_puts_that_object(client: Client) -> None:
    s3 = client.endpoint.session().client("s3", config=Config(signature_version="s3v4"))
    url = s3.generate_presigned_url(
        "put_object", Params={"Bucket": client.bucket, "Key": "put by link"}
    )
    assert (
        call(client.endpoint, "PUT", url.removeprefix(client.endpoint.url), body=b"by link")[0]
        == 200
    )
    assert client.get("put by link") == b"by link"


@pytest.mark.parametrize("method", ["put_object", "get_object"])
def test_a_link_obeys_no_header_that_it_does_not_sign(client: Client, method: str) -> None:
    """S3 refuses unsigned x-amz-* headers: x-amz-copy-source would read any object."""
    client.put("secret", b"SECRET")
    client.put("by link", b"own")
    s3 = client.endpoint.session().client("s3", config=Config(signature_version="s3v4"))
    url = s3.generate_presigned_url(method, Params={"Bucket": client.bucket, "Key": "by link"})
    link, verb = url.removeprefix(client.endpoint.url), method[:3].upper()
    for name, value in (
        ("x-amz-copy-source", f"/{client.bucket}/secret"),
        ("X-AMZ-ACL", "public-read"),
        ("x-amz-tagging", "a=b"),
        ("x-amz-meta-a", "b"),
    ):
        assert call(client.endpoint, verb, link, {name: value}, b"")[0] == 403
    assert client.get("by link") == b"own"
    signed = s3.generate_presigned_url(
        "put_object", Params={"Bucket": client.bucket, "Key": "by link", "Metadata": {"a": "b"}}
    )
    link = signed.removeprefix(client.endpoint.url)
    assert call(client.endpoint, "PUT", link, {"x-amz-meta-a": "b"}, b"new")[0] == 200


@pytest.mark.parametrize(
    ("minutes", "status"), [(-30, 403), (-14, 200), (14, 200), (16, 403), (60 * 24 * 30, 403)]
)
def test_a_signed_request_is_valid_for_a_quarter_of_an_hour(
    client: Client, job: dict[str, Any], minutes: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = datetime.now(timezone.utc) - timedelta(minutes=minutes)
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda remove_tzinfo=True: at.replace(tzinfo=None)
    )
    body = json.dumps({}).encode()
    request = AWSRequest(
        "POST",
        f"{client.endpoint.url}/",
        {
            "X-Amz-Target": "SageMaker.ListTrainingJobs",
            "Content-Type": "application/x-amz-json-1.1",
        },
        body,
    )
    SigV4Auth(
        Credentials(client.endpoint.access_key, client.endpoint.secret_key),
        "sagemaker",
        "us-east-1",
    ).add_auth(request)
    assert call(client.endpoint, "POST", "/", dict(request.headers.items()), body)[0] == status


def test_every_client_of_aws_is_let_in(client: Client) -> None:
    """boto3's signatures of encoded names, queries, streamed bodies and multipart uploads are
    accepted.
    """
    s3, bucket = client.s3, client.bucket
    for key in ("plain", "a b+c/ü&=?#%41~.txt", "x//y", "./dots/../z"):
        s3.put_object(Bucket=bucket, Key=f"signed/{key}", Body=b"12345678")
        assert (
            s3.get_object(Bucket=bucket, Key=f"signed/{key}", Range="bytes=2-3")["Body"].read()
            == b"34"
        )
    assert (
        s3.list_objects_v2(Bucket=bucket, Prefix="signed/a b+c/ü&", Delimiter="/")["KeyCount"] == 1
    )
    upload = s3.create_multipart_upload(Bucket=bucket, Key="signed/parts")["UploadId"]
    part = s3.upload_part(
        Bucket=bucket, Key="signed/parts", UploadId=upload, PartNumber=1, Body=b"p"
    )["ETag"]
    done = {"Parts": [{"PartNumber": 1, "ETag": part}]}
    s3.complete_multipart_upload(
        Bucket=bucket, Key="signed/parts", UploadId=upload, MultipartUpload=done
    )
    metrics = client.cloudwatch.list_metrics(Namespace="/aws/sagemaker/TrainingJobs")
    assert metrics["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert (
        client.endpoint.session().client("sts").get_caller_identity()["Account"]
        == client.endpoint.account
    )
    stranger = boto3.client(
        "s3",
        endpoint_url=client.endpoint.url,
        region_name="us-east-1",
        aws_access_key_id=client.endpoint.access_key,
        aws_secret_access_key="x",
    )
    with pytest.raises(ClientError) as caught:
        stranger.list_buckets()
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
