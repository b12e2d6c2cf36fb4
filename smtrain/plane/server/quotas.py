"""Service Quotas for SageMaker: the quotas by their real names, their API, and their check for new
jobs.

The codes are invented (a hash of the name): real ones differ, so clients must look quotas up by
name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable
from typing import Any

from moto.core.exceptions import JsonRESTError
from moto.servicequotas.responses import ServiceQuotasResponse

from smtrain.core.botocore_models import service_model
from smtrain.core.facts.sagemaker import PER_JOB, RUN_TIME, SPOT, TRAINING, WARM_POOL
from smtrain.plane.client import ACCOUNT, REGION
from smtrain.plane.server import validation
from smtrain.plane.server.jobs import JobRecord, hosts_of

# Generous: only a quota that was set is ever reached.
DEFAULT_INSTANCES, DEFAULT_SECONDS = 1000.0, 2_419_200.0


class LimitExceededError(JsonRESTError):
    """SageMaker's ResourceLimitExceeded."""

    code = 400

    def __init__(self, quota: str, limit: float, used: int, delta: int) -> None:
        super().__init__(
            "ResourceLimitExceeded",
            f"The account-level service limit '{quota}' is {limit:.0f} Instances, with current"
            f" utilization of {used} Instances and a request delta of {delta} Instances. Please"
            " use AWS Service Quotas to request an increase for this quota. If AWS Service Quotas"
            " is not available, contact AWS support to request an increase for this quota.",
        )


class Quotas:
    """The quotas of the account."""

    def __init__(self) -> None:
        kinds = sorted(
            getattr(service_model("sagemaker").shape_for("TrainingInstanceType"), "enum", [])
        )
        names = [name.format(type=kind) for kind in kinds for name in (TRAINING, SPOT, WARM_POOL)]
        self.values = dict.fromkeys([*names, PER_JOB], DEFAULT_INSTANCES) | {
            RUN_TIME: DEFAULT_SECONDS
        }
        self._defaults = dict(self.values)
        self.of_region: dict[tuple[str, str], float] = {}
        """Values that were set for one region, by region and name."""
        self.requested: list[dict[str, Any]] = []

    def control(self, options: dict[str, Any]) -> dict[str, Any]:
        """Set quotas by name, {"values": {name: number}}, with "region" in one region only; {"clear":
        true} brings the defaults back.
        """
        if options.get("clear"):
            self.values, self.requested, self.of_region = dict(self._defaults), [], {}
        values = options.get("values") or {}
        if unknown_names := values.keys() - self.values.keys():
            raise ValueError(f"no such quota: {', '.join(sorted(unknown_names))}")
        if region := options.get("region"):
            self.of_region.update({(region, name): float(value) for name, value in values.items()})
        else:
            self.values.update({name: float(value) for name, value in values.items()})
        return {}

    def value(self, name: str, region: str) -> float:
        """A quota in a region."""
        return self.of_region.get((region, name), self.values.get(name, DEFAULT_INSTANCES))

    def check(
        self, request: dict[str, Any], jobs: Iterable[JobRecord], region: str = REGION
    ) -> None:
        """Raise `LimitExceededError` if a request would exceed a quota, next to the jobs of its
        region.
        """
        jobs = list(jobs)
        hosts = hosts_of(request)
        if len(hosts) > (limit := self.value(PER_JOB, region)):
            raise LimitExceededError(PER_JOB, limit, 0, len(hosts))
        spot = bool(request.get("EnableManagedSpotTraining"))
        uses = [SPOT if spot else TRAINING]
        if request["ResourceConfig"].get("KeepAlivePeriodInSeconds"):
            uses.append(WARM_POOL)
        for kind in {kind for _, kind, _ in hosts}:
            instance_count = sum(kind == host_kind for _, host_kind, _ in hosts)
            for use in uses:
                name = use.format(type=kind)
                limit = self.value(name, region)
                used = sum(_used(job, kind, use) for job in jobs)
                if used + instance_count > limit:
                    raise LimitExceededError(name, limit, used, instance_count)

    def describe_quota(self, name: str, region: str = REGION) -> dict[str, Any]:
        seconds = name == RUN_TIME
        return {
            "ServiceCode": "sagemaker",
            "ServiceName": "Amazon SageMaker",
            "QuotaArn": f"arn:aws:servicequotas:{region}:{ACCOUNT}:sagemaker/{code_of(name)}",
            "QuotaCode": code_of(name),
            "QuotaName": name,
            "Value": self.value(name, region),
            "Unit": "Seconds" if seconds else "None",
            "Adjustable": True,
            "GlobalQuota": False,
            "QuotaAppliedAtLevel": "ACCOUNT",
        }


def code_of(name: str) -> str:
    """L- and eight hex digits, like a real code."""
    return "L-" + hashlib.sha256(name.encode()).hexdigest()[:8].upper()


def _used(job: JobRecord, kind: str, use: str) -> int:
    """Instances of a type that a job uses under one quota."""
    count = sum(kind == host_kind for _, host_kind, _ in hosts_of(job.request))
    if use == WARM_POOL:
        keeps_pool = not job.has_ended and job.request["ResourceConfig"].get(
            "KeepAlivePeriodInSeconds"
        )
        return count if keeps_pool or (job.has_ended and job.pool_status() == "Available") else 0
    spot = bool(job.request.get("EnableManagedSpotTraining"))
    return count if not job.has_ended and spot == (use == SPOT) else 0


def install(quotas: Quotas) -> None:
    """Replace moto's handlers, which do not know SageMaker."""

    def not_found_error(noun: str) -> JsonRESTError:
        message = f"The request failed because the specified {noun} does not exist."
        return JsonRESTError("NoSuchResourceException", message)

    def params_of(self: Any) -> dict[str, Any]:
        params: dict[str, Any] = json.loads(self.body)
        if params.get("ServiceCode") != "sagemaker":
            raise not_found_error("service")
        return params

    def quota_of_code(code: str) -> str:
        for name in quotas.values:
            if code_of(name) == code:
                return name
        raise not_found_error("quota")

    def list_service_quotas(self: Any) -> str:
        params = params_of(self)
        names = sorted(quotas.values)
        if code := params.get("QuotaCode"):
            names = [quota_of_code(code)]
        try:
            start = int(base64.b64decode(params["NextToken"])) if params.get("NextToken") else 0
        except ValueError:
            raise JsonRESTError(
                "InvalidPaginationTokenException", "Invalid pagination token provided."
            ) from None
        end = start + int(params.get("MaxResults") or 100)
        page: dict[str, Any] = {
            "Quotas": [quotas.describe_quota(name, self.region) for name in names[start:end]]
        }
        if end < len(names):
            page["NextToken"] = base64.b64encode(str(end).encode()).decode()
        return json.dumps(page)

    def get_service_quota(self: Any) -> str:
        return json.dumps(
            {
                "Quota": quotas.describe_quota(
                    quota_of_code(params_of(self)["QuotaCode"]), self.region
                )
            }
        )

    def request_service_quota_increase(self: Any) -> str:
        params = params_of(self)
        name = quota_of_code(params["QuotaCode"])
        if params["DesiredValue"] <= quotas.value(name, self.region):
            raise JsonRESTError(
                "IllegalArgumentException",
                "You must provide a quota value greater than the current quota value.",
            )
        quota_fields = quotas.describe_quota(name, self.region)
        request = {
            **{
                key: quota_fields[key]
                for key in (
                    "ServiceCode",
                    "ServiceName",
                    "QuotaArn",
                    "QuotaCode",
                    "QuotaName",
                    "Unit",
                )
            },
            "Id": hashlib.sha256(f"{name}{time.time_ns()}".encode()).hexdigest()[:32],
            "DesiredValue": params["DesiredValue"],
            "Status": "PENDING",
            "Created": time.time(),
            "LastUpdated": time.time(),
        }
        quotas.requested.append(request)
        return json.dumps({"RequestedQuota": request})

    def list_requested_service_quota_change_history_by_quota(self: Any) -> str:
        code = params_of(self)["QuotaCode"]
        return json.dumps(
            {
                "RequestedQuotas": [
                    change for change in quotas.requested if change["QuotaCode"] == code
                ]
            }
        )

    for handler in (
        list_service_quotas,
        get_service_quota,
        request_service_quota_increase,
        list_requested_service_quota_change_history_by_quota,
    ):
        operation = "".join(word.capitalize() for word in handler.__name__.split("_"))
        setattr(ServiceQuotasResponse, handler.__name__, _with_validation(operation, handler))
    defaults: Any = _with_validation("ListAWSDefaultServiceQuotas", list_service_quotas)
    ServiceQuotasResponse.list_aws_default_service_quotas = defaults  # type: ignore[method-assign]


def _with_validation(operation: str, handler: Any) -> Any:
    """The handler, behind the service's own validation."""

    def run(self: Any) -> Any:
        if fault := validation.fault_of("service-quotas", operation, json.loads(self.body)):
            raise JsonRESTError("IllegalArgumentException", fault)
        return handler(self)

    return run
