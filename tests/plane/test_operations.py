"""Every operation of the services' models: ours, moto's on purpose, or refused by name; none ends
in a page.
"""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import ClientError
from moto.core.utils import camelcase_to_underscores, method_names_from_class
from moto.sagemaker.responses import SageMakerResponse

from smtrain.plane.server.operations import (
    PASSED_ON,
    SERVED_OPERATIONS,
    Operations,
    is_refused,
    service_and_operation,
)
from testing.moto_names import REPLACED_NAMES
from tests.plane.calls import answer, operations

from .conftest import ROOT, Client

SAGEMAKER = operations("sagemaker")
ONCE = Config(retries={"total_max_attempts": 1})


def environ(service: str, operation: str, body: bytes = b"{}") -> dict[str, Any]:
    """A signed request of a JSON service, as a WSGI server passes it."""
    return {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/",
        "QUERY_STRING": "",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.input": io.BytesIO(body),
        "HTTP_X_AMZ_TARGET": f"Service.{operation}",
        "HTTP_AUTHORIZATION": (
            f"AWS4-HMAC-SHA256 Credential=A/20261125/us-east-1/{service}/aws4_request, x"
        ),
    }


def test_each_operation_of_the_table_is_in_the_model_and_has_a_handler() -> None:
    assert SERVED_OPERATIONS.isdisjoint(PASSED_ON)
    assert set(SAGEMAKER) >= SERVED_OPERATIONS | PASSED_ON
    methods = method_names_from_class(SageMakerResponse)
    added = {key.rpartition(".")[2] for key in REPLACED_NAMES if "SageMakerResponse" in key}
    assert {camelcase_to_underscores(operation) for operation in PASSED_ON} <= set(methods)
    assert {camelcase_to_underscores(operation) for operation in SERVED_OPERATIONS} <= added


def test_every_other_operation_of_sagemaker_is_refused_by_name() -> None:
    seen = []

    def below(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        seen.append(service_and_operation(environ)[1])
        return [b"{}"]

    others = [
        operation for operation in SAGEMAKER if operation not in SERVED_OPERATIONS | PASSED_ON
    ]
    assert len(others) > 300
    for operation in others:
        sent: list[str] = []
        body = b"".join(
            Operations(below)(
                environ("sagemaker", operation), lambda status, _, sent=sent: sent.append(status)
            )
        )
        assert sent == ["501 Fault"], operation
        reply = json.loads(body)
        assert reply["__type"] == "NotImplemented"
        assert (
            f"sagemaker:{operation} cannot be called: smtrain's local control plane does not"
            " have it" in reply["message"]
        )
    assert seen == []


@pytest.mark.parametrize(
    "operation", ["CreateProcessingJob", "StartPipelineExecution", "ListClusters"]
)
def test_a_client_reads_the_refusal(client: Client, operation: str) -> None:
    status, code, message = answer(client.sagemaker, operation)
    assert (status, code) == (501, "NotImplemented")
    assert f"sagemaker:{operation} cannot be called" in message


def test_what_is_passed_on_is_answered(client: Client) -> None:
    sagemaker: Any = client.endpoint.session().client("sagemaker", config=ONCE)
    answers = {
        operation: answer(sagemaker, operation)
        for operation in sorted(SERVED_OPERATIONS | PASSED_ON)
    }
    assert {o: t for o, t in answers.items() if t[0] not in (200, 400)} == {}
    assert {o: t for o, t in answers.items() if t[0] == 400 and not (t[1] and t[2])} == {}


def test_what_the_model_forbids_is_refused_before_moto_sees_it(client: Client) -> None:
    unchecked: Any = client.endpoint.session().client(
        "sagemaker", config=Config(parameter_validation=False)
    )
    for operation in sorted(PASSED_ON):
        if not described_input(unchecked, operation):
            continue
        with pytest.raises(ClientError) as caught:
            getattr(unchecked, xform_name(operation))()
        assert caught.value.response["Error"]["Code"] == "ValidationException", operation


def described_input(client: Any, operation: str) -> list[str]:
    """The members that an operation requires."""
    return list(client.meta.service_model.operation_model(operation).input_shape.required_members)


def test_endpoints_that_serve_no_model_make_no_answers_up(client: Client) -> None:
    runtime: Any = client.endpoint.session().client("sagemaker-runtime", config=ONCE)
    assert answer(runtime, "InvokeEndpoint")[:2] == (501, "NotImplemented")
    assert "sagemaker:InvokeEndpoint cannot" in answer(runtime, "InvokeEndpoint")[2]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "service",
    [
        "sts",
        "scheduler",
        "s3",
        "logs",
        "iam",
        "ecr",
        "cloudwatch",
        "service-quotas",
        "ssm",
        "secretsmanager",
        "events",
    ],
)
def test_every_operation_of_a_service_ends_in_an_answer_of_it(client: Client, service: str) -> None:
    """If moto does not have it or fails in it, the message names the operation."""
    session: Any = client.endpoint.session()
    caller = session.client(service, config=ONCE)
    for operation in operations(service):
        if operation in (
            "GetLogObject",
            "StartLiveTail",
            "WriteGetObjectResponse",
        ):  # at separate hosts
            continue
        status, code, message = answer(caller, operation)
        assert "<" not in message, (operation, message)
        assert not code.isdigit() or status in (404, 412) or not status, (operation, code)
        if status >= 500:
            assert code in (
                "NotImplemented",
                "InternalFailure",
                "InternalError",
                "ServiceFailure",
            ), (operation, code)
            assert operation in message or service == "s3", (operation, message)


def test_what_moto_takes_for_another_operation_of_s3_is_refused(client: Client) -> None:
    """It would list the objects, or make the bucket again."""
    for operation in (
        "PutBucketMetricsConfiguration",
        "ListBucketAnalyticsConfigurations",
        "GetObjectTorrent",
    ):
        assert is_refused("s3", operation)
        status, code, message = answer(client.s3, operation)
        assert (status, code) == (501, "NotImplemented")
        assert f"s3:{operation} cannot" in message
    assert not any(
        is_refused("s3", name)
        for name in ("GetObject", "ListObjectsV2", "CreateBucket", "UploadPart")
    )


def test_a_bucket_policy_that_is_none_does_not_close_the_bucket(client: Client) -> None:
    with pytest.raises(ClientError) as caught:
        client.s3.put_bucket_policy(Bucket=client.bucket, Policy="not a policy")
    assert caught.value.response["Error"]["Code"] == "MalformedPolicy"
    client.put("after/policy")


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"[]", b"\xff"])
@pytest.mark.parametrize(
    "target", ["SageMaker.CreateTrainingJob", "SageMaker.CreateModel", "Logs_20140328.GetLogEvents"]
)
def test_a_body_that_is_no_json_object_is_refused(client: Client, target: str, body: bytes) -> None:
    from .test_auth import call

    status, reply = call(client.endpoint, "POST", "/", signed_for(client, target, body), body)
    assert status == 400, reply
    assert json.loads(reply)["__type"].rpartition("#")[2] in (
        "SerializationException",
        "ValidationException",
    )


def signed_for(client: Client, target: str, body: bytes) -> dict[str, str]:
    from botocore.auth import SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    headers = {"X-Amz-Target": target, "Content-Type": "application/x-amz-json-1.1"}
    request = AWSRequest("POST", f"{client.endpoint.url}/", headers, body)
    keys = Credentials(client.endpoint.access_key, client.endpoint.secret_key)
    SigV4Auth(
        keys, "sagemaker" if target.startswith("Sage") else "logs", client.endpoint.region
    ).add_auth(request)
    return dict(request.headers.items())


def test_the_page_names_what_the_plane_itself_answers() -> None:
    page = (ROOT / "docs/local.md").read_text("utf-8")
    assert [
        operation for operation in sorted(SERVED_OPERATIONS) if f"`{operation}`" not in page
    ] == []
