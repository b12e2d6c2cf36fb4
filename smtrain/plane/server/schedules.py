"""EventBridge Scheduler as far as smtrain uses it: one-time schedules that delete a SageMaker
endpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
import time
from typing import Any

from moto.sagemaker.exceptions import AWSValidationException
from moto.sagemaker.models import FakeEndpointConfig, sagemaker_backends
from moto.scheduler.models import scheduler_backends

from smtrain.plane.client import ACCOUNT, REGION
from smtrain.plane.server import validation

_LOOK_S = 1.0
_DELETES = ":scheduler:::aws-sdk:sagemaker:deleteEndpoint"


def install() -> None:
    """Allow every instance type of the service's model for endpoints; moto's own list is years
    old.
    """

    def validate_instance_type(self: Any, instance_type: str) -> None:
        variant_shape = (
            validation.input_shape("sagemaker", "CreateEndpointConfig")
            .members["ProductionVariants"]
            .member
        )
        if instance_type not in variant_shape.members["InstanceType"].enum:
            raise AWSValidationException(
                f"InstanceType {instance_type} is not one that endpoints have."
            )

    FakeEndpointConfig.validate_instance_type = validate_instance_type  # type: ignore[method-assign]


def start() -> None:
    """Run due schedules every second, while the process lives."""
    threading.Thread(target=_watch, daemon=True).start()


def run_due(now: datetime.datetime) -> list[str]:
    """Run each due schedule once; return their names."""
    ran = []
    for group in list(scheduler_backends[ACCOUNT][REGION].schedule_groups.values()):
        for schedule in list(group.schedules.values()):
            try:
                if _run_if_due(schedule, now):
                    ran.append(schedule.name)
                    group.schedules.pop(schedule.name, None)
            except Exception as error:  # of this one: run every other schedule on time
                group.schedules.pop(schedule.name, None)
                print(
                    f"warning: schedule {schedule.name} cannot be run ({error!r}); it is removed",
                    flush=True,
                )
    return ran


def _run_if_due(schedule: Any, now: datetime.datetime) -> bool:
    at = _moment(schedule.schedule_expression)
    if at is None or at > now or not schedule.target.get("Arn", "").endswith(_DELETES):
        return False
    sagemaker_backends[ACCOUNT][REGION].endpoints.pop(
        json.loads(schedule.target["Input"])["EndpointName"], None
    )
    return True


def _moment(expression: str) -> datetime.datetime | None:
    """The moment of `at(...)`, which we write in UTC; None for a rate or a cron line."""
    try:
        return datetime.datetime.fromisoformat(
            expression.removeprefix("at(").removesuffix(")")
        ).replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        return None


def _watch() -> None:
    while True:
        time.sleep(_LOOK_S)
        with contextlib.suppress(Exception):  # the thread must not die
            run_due(datetime.datetime.now(datetime.timezone.utc))
