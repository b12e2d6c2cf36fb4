"""The AWS operations that the control plane has, and the operation, and error format, of a request.

SageMaker's are ours, passed on to moto, or refused by name; tests/plane/test_operations.py lists
them all. Those that moto only pretends to run (processing jobs, clusters, notebooks, executions of
pipelines...) are refused.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from botocore.exceptions import UnknownServiceError

from smtrain.core.botocore_models import service_model
from smtrain.plane.server import limits, validation
from smtrain.plane.server.refusals import PLANE_NAME

SERVED_OPERATIONS = frozenset(
    (
        "AddTags",
        "CreateTrainingJob",
        "DeleteTags",
        "DeleteTrainingJob",
        "DescribeTrainingJob",
        "ListTags",
        "ListTrainingJobs",
        "Search",
        "StopTrainingJob",
        "UpdateTrainingJob",
    )
)
# Used by `smtrain deploy`, `register`, `tune` and `pipeline`: moto keeps their records.
PASSED_ON = frozenset(
    (
        "CreateEndpoint",
        "CreateEndpointConfig",
        "CreateHyperParameterTuningJob",
        "CreateModel",
        "CreateModelPackage",
        "CreateModelPackageGroup",
        "CreatePipeline",
        "DeleteEndpoint",
        "DeleteEndpointConfig",
        "DeleteHyperParameterTuningJob",
        "DeleteModel",
        "DeletePipeline",
        "DescribeEndpoint",
        "DescribeEndpointConfig",
        "DescribeHyperParameterTuningJob",
        "DescribeModel",
        "DescribeModelPackage",
        "DescribeModelPackageGroup",
        "DescribePipeline",
        "ListEndpointConfigs",
        "ListEndpoints",
        "ListHyperParameterTuningJobs",
        "ListModelPackageGroups",
        "ListModelPackages",
        "ListModels",
        "ListPipelines",
        "UpdateEndpointWeightsAndCapacities",
        "UpdateModelPackage",
        "UpdatePipeline",
    )
)
# Operations of S3 that moto confuses: PUT ?metrics for CreateBucket, GET ?metrics for
# ListObjects.
_NOT_IN_S3 = re.compile(
    r".*(Abac|Analytics|IntelligentTiering|MetadataConfig|Metadata\w*Table|Metrics|RequestPayment|Annotation)\w*"
    r"|.*ObjectTorrent|CreateSession|RenameObject|RestoreObject|SelectObjectContent|UpdateObjectEncryption"
)
# Operations of S3 at other hosts on AWS; here other operations have their paths.
_OTHER_HOST_OPERATIONS = ("ListDirectoryBuckets", "WriteGetObjectResponse")
# The model with the paths of a service's operations, by the name that requests are signed with.
_MODELS = {"sagemaker": "sagemaker-runtime"}


def is_refused(service: str, operation: str) -> bool:
    """Whether an operation is refused by name, before moto sees it."""
    if service == "sagemaker":  # also sagemaker-runtime's, for which moto invents answers
        return operation not in SERVED_OPERATIONS | PASSED_ON
    return service == "s3" and _NOT_IN_S3.fullmatch(operation) is not None


def refusal(service: str, operation: str) -> tuple[int, str, str]:
    """Status, code and message for an operation that the control plane does not have."""
    message = (
        f"{service}:{operation} cannot be called: {PLANE_NAME} does not have it; `smtrain help local`"
        " lists its operations"
    )
    return 501, "NotImplemented", message


class Operations:
    """WSGI middleware in front of moto: refuse missing operations, and requests that SageMaker's
    model forbids.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if beyond := _limit_fault(environ):
            operation, error = beyond
            return answer(environ, operation, error, start_response)
        if not (
            environ.get("HTTP_X_AMZ_TARGET")
            or environ.get("QUERY_STRING")
            or _is_sagemaker(environ)
        ):
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        service, operation = service_and_operation(environ)
        if is_refused(service, operation):
            return answer(
                environ, f"{service}:{operation}", refusal(service, operation), start_response
            )
        if service == "sagemaker" and operation in PASSED_ON:
            fault = validation.fault_of(service, operation, json.loads(body_of(environ) or b"{}"))
            if fault:
                return answer(
                    environ,
                    f"{service}:{operation}",
                    (400, "ValidationException", fault),
                    start_response,
                )
        if (service, operation) == ("s3", "PutBucketPolicy") and not _is_policy(body_of(environ)):
            # moto would store it, and fail in every later call for an object of the bucket.
            error = (
                400,
                "MalformedPolicy",
                "the body of PutBucketPolicy is not a JSON object with a Statement",
            )
            return answer(environ, "s3:PutBucketPolicy", error, start_response)
        return self.app(environ, start_response)  # type: ignore[no-any-return]


def _limit_fault(environ: dict[str, Any]) -> tuple[str, limits.Error] | None:
    """The operation and the error of a request beyond a limit of AWS."""
    service = service_of(environ)
    if service == "s3":
        limits.cap_page(environ)
        deletes = environ["REQUEST_METHOD"] == "POST" and "delete" in environ.get(
            "QUERY_STRING", ""
        )
        error = limits.s3_fault(environ, body_of(environ) if deletes else b"")
        return (operation_of(environ), error) if error else None
    if service == "iam":
        operation = operation_of(environ)
        error = limits.iam_fault(operation.partition(":")[2], body_of(environ))
        return (operation, error) if error else None
    return None


def _is_policy(body: bytes) -> bool:
    try:
        policy = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(policy, dict) and isinstance(policy.get("Statement"), (list, dict))


def _is_sagemaker(environ: dict[str, Any]) -> bool:
    return "/sagemaker/aws4_request" in environ.get("HTTP_AUTHORIZATION", "")


def service_and_operation(environ: dict[str, Any]) -> tuple[str, str]:
    """Service and operation of a request; of an unknown operation, its method and path."""
    service, _, operation = operation_of(environ).partition(":")
    if "HTTP_X_AMZ_TARGET" in environ or (operation != "Unknown" and service != "s3"):
        return service, operation
    path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "GET")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    model = _MODELS.get(service, service)
    fitting = [
        (len(keys), len(headers), name)
        for verb, pattern, keys, headers, name in _routes(model)
        if verb == method
        and pattern.fullmatch(path)
        and keys <= query.keys()
        and headers <= environ.keys()
    ]
    # The one that names the largest part of the query: PutObject fits every PUT.
    return service, max(fitting)[2] if fitting else f"{method} {path}"


@cache
def _routes(service: str) -> list[tuple[str, re.Pattern[str], frozenset[str], frozenset[str], str]]:
    """Method, path, query and headers of each operation of a service with paths."""
    try:
        model = service_model(service)
    except UnknownServiceError:
        return []
    routes = []
    for name in model.operation_names:
        if name in _OTHER_HOST_OPERATIONS:
            continue
        operation = model.operation_model(name)
        path, _, query = operation.http["requestUri"].partition("?")
        if service == "s3" and name != "ListBuckets" and not path.startswith("/{Bucket}"):
            path = "/{Bucket}" + path.rstrip(
                "/"
            )  # botocore removes it from its model at the first call
        keys = set(parse_qs(query, keep_blank_values=True))
        headers = set()
        shape = operation.input_shape
        for member in shape.required_members if shape else ():
            serialization = shape.members[member].serialization
            if serialization.get("location") == "querystring":
                keys.add(serialization["name"])
            elif serialization.get("location") == "header":
                headers.add("HTTP_" + serialization["name"].upper().replace("-", "_"))
        parts = (
            (
                r"/.+"
                if part.endswith("+}")
                else r"/[^/]+"
                if part[:1] == "{"
                else f"/{re.escape(part)}"
            )
            for part in path.strip("/").split("/")
            if part
        )
        pattern = re.compile("".join(parts) + "/?", re.DOTALL)
        routes.append(
            (operation.http["method"], pattern, frozenset(keys), frozenset(headers), name)
        )
    return routes


def body_of(environ: dict[str, Any]) -> bytes:
    """The body of a request, put back for the next reader."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def service_of(environ: dict[str, Any]) -> str:
    """The service that a request or link is signed for; S3 for links with its old signature, else
    empty.
    """
    credential = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2].partition(",")[0]
    query = parse_qs(environ.get("QUERY_STRING", ""))
    scope = (credential or query.get("X-Amz-Credential", [""])[0]).split("/")
    if len(scope) > 3:
        return str(scope[3])
    return "s3" if "Signature" in query and not environ.get("HTTP_AUTHORIZATION") else ""


def operation_of(environ: dict[str, Any]) -> str:
    """`service:Operation` of an AWS request, whatever its protocol."""
    service = service_of(environ) or "s3"
    path = environ.get("PATH_INFO", "")
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return f"{service}:{target.rpartition('.')[2]}"
    if "/operation/" in path:  # Smithy's RPC protocol
        return f"{service}:{path.rpartition('/')[2]}"
    if service == "s3":
        return f"s3:{_s3_operation(environ, path)}"
    form, query = body_of(environ).decode(errors="replace"), environ.get("QUERY_STRING", "")
    action = parse_qs(form).get("Action") or parse_qs(query).get("Action", ["Unknown"])
    return f"{service}:{action[0]}"


def _s3_operation(environ: dict[str, Any], path: str) -> str:
    method, query = (
        environ["REQUEST_METHOD"],
        parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True),
    )
    if not path.strip("/").partition("/")[2]:
        if method == "POST":
            return "DeleteObjects"
        return {"GET": "ListObjectsV2", "HEAD": "HeadBucket", "PUT": "CreateBucket"}.get(
            method, "DeleteBucket"
        )
    if "uploadId" in query:
        kinds = {
            "PUT": "UploadPart",
            "POST": "CompleteMultipartUpload",
            "DELETE": "AbortMultipartUpload",
        }
        return kinds.get(method, "ListParts")
    if method == "POST":
        return "CreateMultipartUpload"
    if method == "PUT" and "HTTP_X_AMZ_COPY_SOURCE" in environ:
        return "CopyObject"
    return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject"}.get(
        method, "DeleteObject"
    )


def answer(
    environ: dict[str, Any], operation: str, error: tuple[int, str, str], start_response: Any
) -> Iterable[bytes]:
    """An error, (status, code, message), in the protocol of the request for `service:Operation`."""
    status, code, message = error
    service = operation.partition(":")[0]
    inner = f"<Code>{code}</Code><Message>{escape(_NOT_IN_XML.sub('?', message))}</Message>"
    if environ.get("HTTP_SMITHY_PROTOCOL") == "rpc-v2-cbor":
        kind, body = (
            "application/cbor",
            b"\xa2" + b"".join(map(_cbor, ("__type", code, "message", message))),
        )
    elif "HTTP_X_AMZ_TARGET" in environ:
        kind, body = (
            "application/x-amz-json-1.1",
            json.dumps({"__type": code, "message": message}).encode(),
        )
    elif service == "s3":
        kind, body = "application/xml", f"<Error>{inner}<RequestId>0</RequestId></Error>".encode()
    elif service == "ec2":
        kind, body = (
            "text/xml",
            f"<Response><Errors><Error>{inner}</Error></Errors></Response>".encode(),
        )
    elif _asks_with_a_form(environ):
        kind, body = (
            "text/xml",
            f"<ErrorResponse><Error>{inner}</Error><RequestId>0</RequestId></ErrorResponse>".encode(),
        )
    else:
        kind, body = "application/json", json.dumps({"message": message}).encode()
    if environ["REQUEST_METHOD"] == "HEAD":
        body = b""
    headers = [
        ("Content-Type", kind),
        ("Content-Length", str(len(body))),
        ("x-amzn-errortype", code),
    ]
    if "HTTP_SMITHY_PROTOCOL" in environ:
        headers.append(("smithy-protocol", environ["HTTP_SMITHY_PROTOCOL"]))
    start_response(f"{status} Fault", headers)
    return [body]


# Characters that XML 1.0 cannot contain.
_NOT_IN_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def _asks_with_a_form(environ: dict[str, Any]) -> bool:
    """Whether the request uses the query protocol (IAM, STS)."""
    return environ.get("CONTENT_TYPE", "").startswith(
        "application/x-www-form-urlencoded"
    ) or "Action=" in environ.get("QUERY_STRING", "")


def _cbor(text: str) -> bytes:
    data = text.encode(errors="replace")
    return b"\x7a" + len(data).to_bytes(4, "big") + data
