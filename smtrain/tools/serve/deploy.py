"""`smtrain deploy` and `undeploy`: an endpoint from an exported prefix, for a while or until it is
deleted.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.client.backends.choose import sagemaker, sagemaker_backend_of_job
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.follow.job_cost import known_prices
from smtrain.client.jobs.listing import train_jobs
from smtrain.client.launch.names import require_name, schedule_name
from smtrain.client.prices import Price
from smtrain.core import botocore_models, text
from smtrain.core.aws_errors import why_refused
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.engines import is_neuron
from smtrain.core.facts.images import serving_image
from smtrain.core.facts.name_suggestions import instance_meant
from smtrain.core.public_api import public
from smtrain.core.suggest import nearest
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.tools.chat.resolve_model import FoundModel, find
from smtrain.tools.serve import requests
from smtrain.tools.serve.devices import tensor_parallel
from smtrain.tools.serve.requests import EndpointSpec

_SHORTEST_S = 900
"""An endpoint takes minutes to start; a shorter time would delete it before it answers."""


@dataclass(frozen=True)
class Deployed:
    """A new endpoint."""

    name: str
    status: str
    dollars_per_hour: float | None
    until: datetime.datetime | None
    """Time at which it deletes itself; None: never."""


@public
def deploy(
    model: str,
    instance_type: str,
    *,
    name: str | None = None,
    seconds: int | None = None,
    instance_count: int = 1,
    role: str | None = None,
    schedule_role: str | None = None,
    image: str | None = None,
    max_length: int | None = None,
    wait: bool = True,
    dry_run: bool = False,
    target: TargetName | None = None,
    say: Say = text.say,
) -> Deployed:
    """Make a SageMaker endpoint from a model in S3, served by vLLM with OpenAI's API; nothing
    is packed or copied.

    First the memory of the devices is checked, and the price shown. An adapter is served with its
    base, unmerged. With `seconds`, a schedule that deletes the endpoint is created before the
    endpoint.

    Args:
        model: A run, a job that exported, or an s3:// prefix.
        instance_type: A type with GPUs, such as ml.g6e.xlarge, or ml.trn2.48xlarge (unchecked).
        name: The endpoint's name, which clients also send as `model`. Default: the run's name.
        seconds: Delete the endpoint after this time, with EventBridge Scheduler. None: it stays
            until `undeploy`.
        instance_count: Number of instances.
        role: The role of the container, its ARN or name. Default: that of the run's jobs.
        schedule_role: The role with which the schedule deletes the endpoint. Default: `role`.
        image: The container image. Default: the newest known vLLM image of the region.
        max_length: Most tokens of prompt and answer together. Default: the model's positions.
        wait: Return when the endpoint answers or has failed.
        dry_run: Say the requests that would be sent, as JSON, and create nothing; the status is
            then `dry run`.
        target: `local` or `aws`. Locally an endpoint is a record that answers nothing; `smtrain
            serve` does.
        say: Called with each line.

    Returns:
        The endpoint.

    Raises:
        ConfigError: An argument is wrong.
        JobError: There is no such model in S3, the devices do not hold it, the name is taken, or
            AWS refuses.

    Examples:
        >>> made = smtrain.deploy("llama", "ml.g6e.xlarge", say=lambda line: None)
        >>> made.status
        'InService'
        >>> smtrain.undeploy("llama", say=lambda line: None)
    """
    if seconds is not None and seconds < _SHORTEST_S:
        raise ConfigError(
            f"for: {spell(seconds)} is less than an endpoint takes to start; give at least 15m",
            code="config.wrong_value",
        )
    for key, number in (("instance_count", instance_count), ("max_length", max_length)):
        if number is not None and number < 1:
            raise ConfigError(f"{key}: got {number}; give 1 or more", code="config.wrong_value")
    refuse_unknown_type(instance_type)
    if not model.isprintable():
        raise JobError(
            f"{model!r} cannot be the name of a run or job; `smtrain list` shows those there are",
            code="job.not_found",
        )
    source = find(model, target)
    if source.store_copy is None:
        raise JobError(
            f"{model} lies on this machine; name its run, or copy it to an s3:// prefix and name"
            " that"
        )
    spec = spec_of(source, name, instance_type, instance_count, role, image, max_length)
    place = sagemaker(source.store_copy.store)
    _refuse_taken(place, spec.name)
    price = price_of(instance_type, place.region_name())
    hourly = price.dollars_per_hour * instance_count if price else None
    deletion_time = (
        datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=seconds)
        if seconds
        else None
    )
    say(_announcement(spec, hourly, price, deletion_time))
    if is_neuron(instance_type):
        say(
            "unchecked: smtrain has made no endpoint on Neuron cores; image, variables and split"
            " were only read"
        )
    calls = _requests(spec)
    if deletion_time is not None:
        schedule_arn = place.role(schedule_role) if schedule_role else spec.role
        calls = {"CreateSchedule": _schedule_request(spec, deletion_time, schedule_arn), **calls}
    if dry_run:
        say(json.dumps(calls, indent=2))
        return Deployed(spec.name, "dry run", hourly, deletion_time)
    if deletion_time is not None:
        _schedule(place, spec.name, calls["CreateSchedule"])
    _create(place, spec, calls)
    status = _follow(place, spec.name, say) if wait else "Creating"
    say(_usage_text(place, spec, status))
    return Deployed(spec.name, status, hourly, deletion_time)


def refuse_unknown_type(instance_type: str) -> None:
    """Raise `ConfigError` for a type that the installed boto3 does not know for endpoints."""
    known_types = (
        botocore_models.service_model("sagemaker").shape_for("ProductionVariantInstanceType").enum
    )
    if instance_type not in known_types:
        suggestion = instance_meant(instance_type) or nearest(instance_type, known_types)
        meant = f"did you mean {suggestion}?" if suggestion else "take one such as ml.g6e.xlarge"
        raise ConfigError(
            f"instance_type: {instance_type!r} is no instance type that boto3 knows; {meant}",
            code="config.wrong_value",
        )


@public
def undeploy(name: str, *, target: TargetName | None = None, say: Say = text.say) -> None:
    """Delete an endpoint, its configuration, its model entries and its schedule; the model's
    files stay.

    Args:
        name: The endpoint's name.
        target: `local` or `aws`. Default: `aws` if there are credentials.
        say: Called with each line.

    Raises:
        ConfigError: It is no endpoint name.
        JobError: There is no such endpoint.

    Examples:
        >>> smtrain.undeploy("no-such-endpoint", target="local")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        smtrain.core.errors.JobError: no-such-endpoint: there is no such endpoint on target local; ...
    """
    from botocore.exceptions import ClientError

    place = sagemaker_backend_of_job("", target)[1]
    description = describe_endpoint(place, name)
    if description is None:
        raise JobError(
            f"{name}: there is no such endpoint on target {place.name}; correct the name, or target"
        )
    client = place.sagemaker
    config = client.describe_endpoint_config(EndpointConfigName=description["EndpointConfigName"])
    client.delete_endpoint(EndpointName=name)
    client.delete_endpoint_config(EndpointConfigName=description["EndpointConfigName"])
    for variant in config["ProductionVariants"]:
        client.delete_model(ModelName=variant["ModelName"])
    try:
        place.client("scheduler").delete_schedule(Name=schedule_name(name))
    except ClientError:
        pass  # it has none
    say(f"deleted endpoint {name}; nothing of it is billed any more")


def describe_endpoint(place: SageMakerBackend, name: str) -> dict[str, Any] | None:
    """DescribeEndpoint's answer; None if there is no such endpoint.

    Raises `ConfigError` for an invalid name.
    """
    from botocore.exceptions import ClientError

    require_name("endpoint", name)
    try:
        description: dict[str, Any] = place.sagemaker.describe_endpoint(EndpointName=name)
    except ClientError as error:
        if "could not find" not in str(error).lower():
            raise
        return None
    return description


def spec_of(
    source: FoundModel,
    name: str | None,
    instance_type: str,
    count: int = 1,
    role: str | None = None,
    image: str | None = None,
    max_length: int | None = None,
) -> EndpointSpec:
    """The endpoint for a model in S3.

    Raises `JobError` if the devices do not hold it, or its base is unknown.
    """
    assert source.store_copy is not None  # callers refuse a model of this machine
    place, uri = sagemaker(source.store_copy.store), source.store_copy.uri
    endpoint_name = name or source.name.rstrip("/").rpartition("/")[2]
    base, role_name, weights, body = uri, role, source.weights, source.model_config
    description: dict[str, Any] = {}
    if not uri.startswith(source.name):  # a run or a job
        description = train_jobs(source.name, place.name)[1][-1].describe()
        role_name = role_name or description["RoleArn"]
    if source.is_adapter:
        channels = {
            c["ChannelName"]: c["DataSource"].get("S3DataSource", {})
            for c in description.get("InputDataConfig", [])
        }
        base = channels.get("model", {}).get("S3Uri", "")
        if not base:
            raise JobError(
                f"{source.name} is an adapter, and its base model is not known; name its run"
            )
        base_model = find(base, place.name)
        weights, body = base_model.weights + source.weights, base_model.model_config
    region = place.region_name()
    return EndpointSpec(
        endpoint_name,
        base,
        image or serving_image(region, instance_type),
        instance_type,
        count,
        tensor_parallel(endpoint_name, weights, body, instance_type),
        place.role(role_name),
        adapter=uri if source.is_adapter else None,
        rank=max(8, int(source.model_config.get("r") or 8)) if source.is_adapter else 0,
        max_length=max_length,
        tags={"smtrain:run": source.name} if description else {},
    )


def _refuse_taken(place: SageMakerBackend, name: str) -> None:
    description = describe_endpoint(place, name)
    if description is not None:
        raise JobError(
            f"endpoint {name} is there already ({description['EndpointStatus']}); `smtrain undeploy"
            f" {name}` deletes it, or choose another name with --name"
        )


def _requests(spec: EndpointSpec) -> dict[str, dict[str, Any]]:
    """The requests that create an endpoint, by operation, in their order."""
    model = requests.create_model(spec)
    config = requests.create_endpoint_config(spec, model["ModelName"])
    return {
        "CreateModel": model,
        "CreateEndpointConfig": config,
        "CreateEndpoint": requests.create_endpoint(spec, config["EndpointConfigName"]),
    }


def _schedule_request(
    spec: EndpointSpec, deletion_time: datetime.datetime, role: str
) -> dict[str, Any]:
    partition = role.split(":")[1] if role.startswith("arn:") else "aws"
    return requests.create_schedule(spec.name, deletion_time, role, partition)


def _schedule(place: SageMakerBackend, name: str, request: dict[str, Any]) -> None:
    """Schedule the deletion, before the endpoint exists: without it the endpoint would be billed
    for ever.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    client = place.client("scheduler")
    try:
        try:
            client.create_schedule(**request)
        except ClientError as error:
            if error.response["Error"].get("Code") != "ConflictException":
                raise
            client.delete_schedule(Name=request["Name"])  # of a deleted endpoint
            client.create_schedule(**request)
    except (ClientError, BotoCoreError) as error:
        role = request["Target"]["RoleArn"]
        rights = (
            "scheduler:CreateSchedule and iam:PassRole, and let scheduler.amazonaws.com assume"
            f" {role}"
        )
        refusal = why_refused(error, f"allow yourself {rights}")
        raise JobError(
            f"the schedule that would delete {name} could not be made, so the endpoint was not"
            f" either: {refusal}",
            code=refusal.code,
        ) from None


def _create(
    place: SageMakerBackend, spec: EndpointSpec, calls: Mapping[str, dict[str, Any]]
) -> None:
    """Create model, configuration and endpoint.

    What a refused call leaves is free, and the next call uses it.
    """
    from botocore.exceptions import ClientError

    client = place.sagemaker
    try:
        _create_once(client.create_model, calls["CreateModel"])
        _create_once(client.create_endpoint_config, calls["CreateEndpointConfig"])
        client.create_endpoint(**calls["CreateEndpoint"])
    except ClientError as error:
        if "CreateSchedule" in calls:
            place.client("scheduler").delete_schedule(Name=schedule_name(spec.name))
        raise JobError(f"endpoint {spec.name} was refused: {error}", code="aws.refused") from None


def _create_once(call: Any, request: dict[str, Any]) -> None:
    """Create an object. Its name is a digest of its content, so an existing one is the same."""
    from botocore.exceptions import ClientError

    try:
        call(**request)
    except ClientError as error:
        if "already exist" not in str(error).lower():
            raise


def _follow(place: SageMakerBackend, name: str, say: Say) -> str:
    """Wait until the endpoint answers or fails; return its status.

    Raises `JobError` if it failed.
    """
    previous_status, began = "", time.monotonic()
    while True:
        description = describe_endpoint(place, name)
        if description is None:
            raise JobError(f"endpoint {name} is gone: somebody deleted it while it was being made")
        status = str(description["EndpointStatus"])
        if status != previous_status:
            say(f"-- {name}: {status} ({spell(time.monotonic() - began)})")
            previous_status = status
        if status == "Failed":
            raise JobError(
                f"endpoint {name} failed:"
                f" {description.get('FailureReason', 'no reason was given')}; its log is in"
                f" CloudWatch, /aws/sagemaker/Endpoints/{name}; `smtrain undeploy {name}`"
                " deletes it"
            )
        if status not in ("Creating", "Updating", "SystemUpdating"):
            return status
        time.sleep(place.pace.look)


def _announcement(
    spec: EndpointSpec, hourly: float | None, price: Any, deletion_time: datetime.datetime | None
) -> str:
    money = f"${hourly:,.2f} an hour ({price})" if hourly is not None else "at an unknown price"
    end = f"until {deletion_time:%Y-%m-%d %H:%M} UTC" if deletion_time else "until it is deleted"
    return f"endpoint {spec.name}: {spec.instance_count} x {spec.instance_type}, {money}, {end}"


def _usage_text(place: SageMakerBackend, spec: EndpointSpec, status: str) -> str:
    if place.record.here:
        return (
            f"{spec.name} is {status}; on this machine no server runs behind an endpoint, so use"
            " `smtrain serve` to ask the model"
        )
    return (
        f'{spec.name} is {status}; ask it by InvokeEndpoint with OpenAI\'s JSON and "model":'
        f' "{spec.name}"; `smtrain undeploy {spec.name}` deletes it'
    )


def price_of(instance_type: str, region: str | None) -> Price | None:
    """Price of an hour: the training price, which SageMaker's endpoints have too; None if
    unknown.
    """
    return known_prices().find(instance_type, "on_demand", region)
