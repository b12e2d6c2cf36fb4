"""Shortages of machines, quotas, and the API of Service Quotas, as boto3 sees them."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from smtrain.core.errors import LocalError
from testing.plane import Plane

from .conftest import Client, refused

NO_CAPACITY = (
    "CapacityError: Unable to provision requested ML compute capacity. Please retry using a"
    " different ML instance type."
)


def on(kind: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"InstanceType": kind, "InstanceCount": count, "VolumeSizeInGB": 1, **more}


def statuses(job: dict[str, Any]) -> list[str]:
    return [step["Status"] for step in job["SecondaryStatusTransitions"]]


def refusal(client: Client, **changes: Any) -> str:
    code, message = refused(lambda: client.start("true", **changes))
    assert code == "ResourceLimitExceeded"
    return message


def test_without_capacity_a_job_waits_and_fails_in_sagemakers_words(
    plane: Plane, client: Client
) -> None:
    plane.no_capacity("ml.trn1.32xlarge", attempts=1)
    job = client.run("true", ResourceConfig=on("ml.trn1.32xlarge"))
    assert (job["TrainingJobStatus"], job["FailureReason"]) == ("Failed", NO_CAPACITY)
    assert statuses(job) == ["Starting", "Pending", "Failed"]
    assert (
        client.run("true", ResourceConfig=on("ml.trn1.32xlarge"))["TrainingJobStatus"]
        == "Completed"
    )
    assert (
        client.run("true", ResourceConfig=on("ml.trn1.2xlarge"))["TrainingJobStatus"] == "Completed"
    )


def test_capacity_may_come_while_a_job_is_pending_and_a_pending_job_can_be_stopped(
    plane: Plane, client: Client
) -> None:
    plane.no_capacity("ml.trn1.32xlarge", seconds=0.3, pending=60)
    job = client.run("true", ResourceConfig=on("ml.trn1.32xlarge"))
    assert job["TrainingJobStatus"] == "Completed"
    assert statuses(job)[:3] == ["Starting", "Pending", "Downloading"]
    plane.no_capacity("ml.trn1.32xlarge", pending=60)
    name = client.start("true", ResourceConfig=on("ml.trn1.32xlarge"))
    client.wait(name, lambda job: job["SecondaryStatus"] == "Pending")
    client.sagemaker.stop_training_job(TrainingJobName=name)
    assert client.wait(name)["TrainingJobStatus"] == "Stopped"


def test_instance_preferences_get_the_first_type_that_there_is(
    plane: Plane, client: Client
) -> None:
    plane.no_capacity("ml.trn1.32xlarge")
    choices = [on("ml.trn1.32xlarge", 2), on("ml.trn1n.32xlarge", 2), on("ml.trn2.48xlarge", 1)]
    preferences = [{k: v for k, v in choice.items() if k != "VolumeSizeInGB"} for choice in choices]
    job = client.completed(
        "true", ResourceConfig={"VolumeSizeInGB": 1, "InstancePreferences": preferences}
    )
    resources = job["ResourceConfig"]
    assert (resources["SelectedInstanceType"], resources["SelectedInstanceCount"]) == (
        "ml.trn1n.32xlarge",
        2,
    )
    assert resources["InstancePreferences"] == preferences


@pytest.mark.parametrize(
    ("counts", "more", "message"),
    [
        ((2, None), {}, "on every preference, or once"),
        ((2, 2), {"InstanceCount": 2}, "on every preference, or once"),
        ((None, None), {}, "on every preference, or once"),
    ],
)
def test_counts_of_preferences_follow_awss_rules(
    client: Client, counts: tuple[int | None, int | None], more: dict[str, Any], message: str
) -> None:
    kinds = ("ml.g5.12xlarge", "ml.g6.12xlarge")
    preferences = [
        {"InstanceType": kind, **({"InstanceCount": count} if count else {})}
        for kind, count in zip(kinds, counts, strict=True)
    ]
    resources = {"VolumeSizeInGB": 1, "InstancePreferences": preferences, **more}
    code, told = refused(lambda: client.start("true", ResourceConfig=resources))
    assert code == "ValidationException"
    assert message in told


def test_a_preference_may_appear_once_and_takes_the_count_of_the_job(client: Client) -> None:
    twice = [{"InstanceType": "ml.g5.12xlarge"}] * 2
    resources = {"VolumeSizeInGB": 1, "InstanceCount": 2, "InstancePreferences": twice}
    _, told = refused(lambda: client.start("true", ResourceConfig=resources))
    assert "can appear only once" in told
    job = client.completed("true", ResourceConfig={**resources, "InstancePreferences": twice[:1]})
    assert job["ResourceConfig"]["SelectedInstanceCount"] == 2


def test_quotas_are_kept_by_use_and_count_what_runs(plane: Plane, client: Client) -> None:
    kind = "ml.trn1.32xlarge"
    plane.quota(f"{kind} for training job usage", 2)
    message = refusal(client, ResourceConfig=on(kind, 3))
    assert (
        f"'{kind} for training job usage' is 2 Instances, with current utilization of 0 Instances"
        in message
    )
    assert "a request delta of 3 Instances" in message
    name = client.start("sleep 60", ResourceConfig=on(kind, 2))
    assert "current utilization of 2 Instances" in refusal(client, ResourceConfig=on(kind))
    spot = {
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9},
    }
    client.completed("true", ResourceConfig=on(kind), **spot)
    client.sagemaker.stop_training_job(TrainingJobName=name)
    client.wait(name)
    client.completed("true", ResourceConfig=on(kind, 2))
    plane.quota(f"{kind} for spot training job usage", 0)
    assert "for spot training job usage' is 0" in refusal(client, ResourceConfig=on(kind), **spot)
    plane.quota(f"{kind} for training warm pool usage", 0)
    warm = on(kind, KeepAlivePeriodInSeconds=60)
    assert "for training warm pool usage' is 0" in refusal(client, ResourceConfig=warm)
    plane.quota("Maximum number of instances per training job", 1)
    assert "'Maximum number of instances per training job' is 1" in refusal(
        client, ResourceConfig=on(kind, 2)
    )
    with pytest.raises(LocalError, match="no such quota"):
        plane.quota("something else", 1)


def test_service_quotas_lists_them_by_name_and_takes_requests(plane: Plane) -> None:
    quotas = plane.endpoint.session().client("service-quotas")
    plane.quota("ml.trn1.32xlarge for training job usage", 8)
    pages = list(quotas.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker"))
    assert len(pages) > 1
    by_name = {quota["QuotaName"]: quota for page in pages for quota in page["Quotas"]}
    uses = ("training job", "spot training job", "training warm pool")
    assert {f"ml.trn1.32xlarge for {use} usage" for use in uses} <= by_name.keys()
    assert by_name["ml.trn1.32xlarge for training job usage"]["Value"] == 8
    assert "Maximum number of instances per training job" in by_name
    code = by_name["ml.trn1.32xlarge for training job usage"]["QuotaCode"]
    assert quotas.get_service_quota(ServiceCode="sagemaker", QuotaCode=code)["Quota"]["Value"] == 8
    increase = quotas.request_service_quota_increase(
        ServiceCode="sagemaker", QuotaCode=code, DesiredValue=16
    )
    assert increase["RequestedQuota"]["Status"] == "PENDING"
    with pytest.raises(ClientError, match="greater than the current"):
        quotas.request_service_quota_increase(
            ServiceCode="sagemaker", QuotaCode=code, DesiredValue=8
        )
    history = quotas.list_requested_service_quota_change_history_by_quota(
        ServiceCode="sagemaker", QuotaCode=code
    )
    assert [request["DesiredValue"] for request in history["RequestedQuotas"]] == [16]
    with pytest.raises(ClientError, match="NoSuchResource"):
        quotas.get_service_quota(ServiceCode="sagemaker", QuotaCode="L-00000000")
