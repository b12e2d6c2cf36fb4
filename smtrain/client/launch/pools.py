"""Warm pools: machines that SageMaker keeps after a job for the next job with the same machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from smtrain.client.backends.base import Pace
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.retry import Backoff
from smtrain.core.config.units import spell
from smtrain.core.errors import JobError
from smtrain.core.facts.warm_pools import agreement, first_difference
from smtrain.core.interrupts import poll
from smtrain.core.text import Say


@dataclass(frozen=True)
class Pool:
    """Machines kept after a job."""

    job: str
    """The job that left them; the pool has its name."""
    instance_type: str
    instance_count: int
    kept_s: float
    """Seconds it has been kept so far; billed like training."""
    expires_at: datetime
    """The pool's end unless a job reuses it: the job's end plus its KeepAlivePeriodInSeconds."""
    dollars_per_hour: float | None
    """For all its instances at the on-demand price; None if no price is known."""
    request: Mapping[str, Any]
    """The job's description, with the fields that a job must have in common to reuse the pool."""

    @property
    def dollars(self) -> float | None:
        """Its cost so far."""
        return None if self.dollars_per_hour is None else self.dollars_per_hour * self.kept_s / 3600


def available(target: SageMakerBackend) -> list[Pool]:
    """The warm pools of the account and region that a job could reuse now, the oldest first."""
    from smtrain.client.prices import Prices, own_prices

    prices = Prices(own_prices())
    pools = []
    for description in _with_status(target, "Available"):
        resources, status = description["ResourceConfig"], description["WarmPoolStatus"]
        if status["Status"] != "Available":
            continue
        kind, count = resources["InstanceType"], int(resources["InstanceCount"])
        price = prices.find(kind, "on_demand", target.region_name())
        end_time = description.get("TrainingEndTime") or description["LastModifiedTime"]
        pools.append(
            Pool(
                description["TrainingJobName"],
                kind,
                count,
                status.get("ResourceRetainedBillableTimeInSeconds", 0),
                end_time + timedelta(seconds=resources.get("KeepAlivePeriodInSeconds", 0)),
                price.dollars_per_hour * count if price else None,
                description,
            )
        )
    return sorted(pools, key=lambda pool: pool.expires_at, reverse=True)


def release(target: SageMakerBackend, job: str) -> None:
    """End the warm pool of a job. Raises `JobError` if it has none any more."""
    from botocore.exceptions import ClientError

    from smtrain.client.jobs.job import Job

    status = Job(job, target).describe().get("WarmPoolStatus", {}).get("Status")
    if status not in ("Available", "InUse"):
        raise JobError(
            f"{job}: its warm pool is {(status or 'not there').lower()}; `smtrain pool list`"
            " shows all"
        )
    try:
        target.sagemaker.update_training_job(
            TrainingJobName=job, ResourceConfig={"KeepAlivePeriodInSeconds": 0}
        )
    except ClientError as error:
        raise JobError(
            f"{job}: its warm pool was not released: {error.response['Error']['Message']}",
            code="aws.refused",
        ) from None


def announce_reuse(
    target: SageMakerBackend, request: Mapping[str, Any], say: Say, *, wait: float = 0
) -> None:
    """Say which warm pool a request will get, or the first field that keeps it from the nearest
    one.

    With `wait`, wait so many seconds for the pool of a running job with matching machines.
    """
    deadline = time.monotonic() + wait
    while True:
        pools = available(target)
        match = next(
            (pool for pool in pools if first_difference(request, pool.request) is None), None
        )
        if match:
            say(
                f"will reuse the warm pool of {match.job} ({match.instance_count} x"
                f" {match.instance_type})"
            )
            return
        busy = _with_status(target, "InUse")
        users = [
            description["TrainingJobName"]
            for description in busy
            if first_difference(request, description) is None
        ]
        if not users or time.monotonic() >= deadline:
            break
        remaining_s = deadline - time.monotonic()
        say(
            f"waiting for the warm pool of {users[0]}, which still runs, for {spell(remaining_s)}"
            " more"
        )
        poll(partial(_is_free, target, users[0]), target.pace.look, remaining_s)
    if users:
        say(
            f"will not wait for {users[0]}, whose warm pool would match once it ends; set"
            " compute.pool_wait to wait"
        )
    elif pools:
        nearest = max(pools, key=lambda pool: agreement(request, pool.request))
        say(
            f"will miss the warm pool of {nearest.job}:"
            f" {first_difference(request, nearest.request)}"
        )


def _is_free(target: SageMakerBackend, job: str) -> bool:
    description = target.sagemaker.describe_training_job(TrainingJobName=job)
    return bool(description.get("WarmPoolStatus", {}).get("Status") != "InUse")


def _with_status(target: SageMakerBackend, status: str) -> Iterator[dict[str, Any]]:
    """The description of every job whose pool has this status."""
    pages = target.sagemaker.get_paginator("list_training_jobs").paginate(
        WarmPoolStatusEquals=status, PaginationConfig={"PageSize": 100}
    )
    for page in pages:
        for row in page["TrainingJobSummaries"]:
            description: dict[str, Any] = target.sagemaker.describe_training_job(
                TrainingJobName=row["TrainingJobName"]
            )
            if description.get("WarmPoolStatus"):
                yield description


def capacity_backoff(
    seconds: float, pace: Pace, clock: Callable[[], float] = time.monotonic
) -> Backoff:
    """Pauses between attempts to get machines, from now on and for so many seconds."""
    return Backoff(seconds, *pace.pauses, clock)
