"""The operations of AWS's services: which ones the control plane has, and the name of the one that a request asks for.

SageMaker's are ours, passed on to moto, or refused by name. tests/plane/test_operations.py lists them all. Those that
only pretend in moto (processing jobs, clusters, notebooks, executions of pipelines...) are refused: nothing would run.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable
from functools import cache
from typing import Any
from urllib.parse import parse_qs

from botocore.exceptions import UnknownServiceError

from smtrain.core.botocore_models import described
from smtrain.plane.server import validation
from smtrain.plane.server.refusals import HERE
from smtrain.plane.testing.faults import answer, operation_of

OURS = frozenset(
    (
        "AddTags", "CreateTrainingJob", "DeleteTags", "DeleteTrainingJob", "DescribeTrainingJob", "ListTags",
        "ListTrainingJobs", "Search", "StopTrainingJob", "UpdateTrainingJob",
    )
)  # fmt: skip
# Those of `smtrain deploy`, `register`, `tune` and `pipeline`: moto keeps their records.
PASSED_ON = frozenset(
    (
        "CreateEndpoint", "CreateEndpointConfig", "CreateHyperParameterTuningJob", "CreateModel", "CreateModelPackage",
        "CreateModelPackageGroup", "CreatePipeline", "DeleteEndpoint", "DeleteEndpointConfig",
        "DeleteHyperParameterTuningJob", "DeleteModel", "DeletePipeline", "DescribeEndpoint", "DescribeEndpointConfig",
        "DescribeHyperParameterTuningJob", "DescribeModel", "DescribeModelPackage", "DescribeModelPackageGroup",
        "DescribePipeline", "ListEndpointConfigs", "ListEndpoints", "ListHyperParameterTuningJobs",
        "ListModelPackageGroups", "ListModelPackages", "ListModels", "ListPipelines",
        "UpdateEndpointWeightsAndCapacities", "UpdateModelPackage", "UpdatePipeline",
    )
)  # fmt: skip
# Operations of S3 that moto takes for others: PUT ?metrics for CreateBucket, GET ?metrics for ListObjects.
_NOT_IN_S3 = re.compile(
    r".*(Abac|Analytics|IntelligentTiering|MetadataConfig|Metadata\w*Table|Metrics|RequestPayment|Annotation)\w*"
    r"|.*ObjectTorrent|CreateSession|RenameObject|RestoreObject|SelectObjectContent|UpdateObjectEncryption"
)
# Operations of S3 at hosts of their own; here their paths are those of others.
_ELSEWHERE = ("ListDirectoryBuckets", "WriteGetObjectResponse")
# The service whose operations are at paths, by the name that its requests are signed with.
_MODELS = {"sagemaker": "sagemaker-runtime"}


def refused(service: str, operation: str) -> bool:
    """Whether an operation is refused by name before moto sees it."""
    if service == "sagemaker":  # also sagemaker-runtime's, for which moto makes up answers
        return operation not in OURS | PASSED_ON
    return service == "s3" and _NOT_IN_S3.fullmatch(operation) is not None


def refusal(service: str, operation: str) -> tuple[int, str, str]:
    """Status, code and message of the answer to an operation that is not here."""
    said = f"{service}:{operation} cannot be called: {HERE} does not have it; docs/local.md lists what it has"
    return 501, "NotImplemented", said


class Operations:
    """WSGI middleware in front of moto: refuse what is not here, and what SageMaker's model forbids."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not (environ.get("HTTP_X_AMZ_TARGET") or environ.get("QUERY_STRING") or _is_sagemaker(environ)):
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        service, operation = named(environ)
        if refused(service, operation):
            return answer(environ, f"{service}:{operation}", refusal(service, operation), start_response)
        if service == "sagemaker" and operation in PASSED_ON:
            fault = validation.fault_of(service, operation, json.loads(_body(environ) or b"{}"))
            if fault:
                return answer(environ, f"{service}:{operation}", (400, "ValidationException", fault), start_response)
        if (service, operation) == ("s3", "PutBucketPolicy") and not _is_policy(_body(environ)):
            # moto would store it, and fail in every later call for an object of the bucket.
            told = (400, "MalformedPolicy", "the body of PutBucketPolicy is not a JSON object with a Statement")
            return answer(environ, "s3:PutBucketPolicy", told, start_response)
        return self.app(environ, start_response)  # type: ignore[no-any-return]


def _is_policy(body: bytes) -> bool:
    try:
        policy = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(policy, dict) and isinstance(policy.get("Statement"), (list, dict))


def _is_sagemaker(environ: dict[str, Any]) -> bool:
    return "/sagemaker/aws4_request" in environ.get("HTTP_AUTHORIZATION", "")


def named(environ: dict[str, Any]) -> tuple[str, str]:
    """Service and operation of a request. An operation that no model knows is its method and path."""
    service, _, operation = operation_of(environ).partition(":")
    if "HTTP_X_AMZ_TARGET" in environ or (operation != "Unknown" and service != "s3"):
        return service, operation
    path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD", "GET")
    query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    model = _MODELS.get(service, service)
    fitting = [
        (len(keys), len(headers), name)
        for verb, pattern, keys, headers, name in _routes(model)
        if verb == method and pattern.fullmatch(path) and keys <= query.keys() and headers <= environ.keys()
    ]
    # The operation that names most of the query: PutObject fits every PUT.
    return service, max(fitting)[2] if fitting else f"{method} {path}"


@cache
def _routes(service: str) -> list[tuple[str, re.Pattern[str], frozenset[str], frozenset[str], str]]:
    """Method, path, query and headers of each operation of a service that has paths."""
    try:
        model = described(service)
    except UnknownServiceError:
        return []
    found = []
    for name in model.operation_names:
        if name in _ELSEWHERE:
            continue
        operation = model.operation_model(name)
        path, _, query = operation.http["requestUri"].partition("?")
        if service == "s3" and name != "ListBuckets" and not path.startswith("/{Bucket}"):
            path = "/{Bucket}" + path.rstrip("/")  # botocore takes it out of its model at the first call
        keys = set(parse_qs(query, keep_blank_values=True))
        headers = set()
        shape = operation.input_shape
        for member in shape.required_members if shape else ():
            placed = shape.members[member].serialization
            if placed.get("location") == "querystring":
                keys.add(placed["name"])
            elif placed.get("location") == "header":
                headers.add("HTTP_" + placed["name"].upper().replace("-", "_"))
        parts = (r"/.+" if part.endswith("+}") else r"/[^/]+" if part[:1] == "{" else f"/{re.escape(part)}"
                 for part in path.strip("/").split("/") if part)  # fmt: skip
        pattern = re.compile("".join(parts) + "/?", re.DOTALL)
        found.append((operation.http["method"], pattern, frozenset(keys), frozenset(headers), name))
    return found


def _body(environ: dict[str, Any]) -> bytes:
    """The body of a request, put back for the next reader."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body
