"""Extend a training plan: reserved machines for a longer time (ExtendTrainingPlan)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.aws_errors import why_refused
from smtrain.core.errors import JobError


@dataclass(frozen=True)
class Extension:
    """An offer to extend a plan."""

    offer: str
    """Its ID, for `extend`."""
    hours: int
    fee: str
    """The upfront fee, in `currency`."""
    currency: str
    start: datetime | None
    end: datetime | None

    def __str__(self) -> str:
        span = (
            f", {self.start:%Y-%m-%d %H:%M} to {self.end:%Y-%m-%d %H:%M}"
            if self.start and self.end
            else ""
        )
        return f"{self.offer}  {self.hours} h{span}  {self.fee} {self.currency}"


def extensions(target: SageMakerBackend, plan: str) -> list[Extension]:
    """The offers to extend a plan, by its ARN, cheapest first. Raises `JobError`."""
    answer = _call(target, "search_training_plan_offerings", plan, TrainingPlanArn=plan)
    offers = [
        Extension(
            row["TrainingPlanExtensionOfferingId"],
            row.get("DurationHours", 0),
            row.get("UpfrontFee", "unknown"),
            row.get("CurrencyCode", "USD"),
            row.get("StartDate"),
            row.get("EndDate"),
        )
        for row in answer.get("TrainingPlanExtensionOfferings", [])
    ]
    return sorted(offers, key=lambda extension: (extension.hours, extension.fee))


def extend(target: SageMakerBackend, plan: str, offer: str) -> dict[str, Any]:
    """Buy an offer; the answer is the newest extension of the plan. Raises `JobError`."""
    answer = _call(target, "extend_training_plan", plan, TrainingPlanExtensionOfferingId=offer)
    bought_extensions = [
        row
        for row in answer["TrainingPlanExtensions"]
        if row["TrainingPlanExtensionOfferingId"] == offer
    ]
    return dict(bought_extensions[-1]) if bought_extensions else {}


def _call(target: SageMakerBackend, operation: str, plan: str, **arguments: Any) -> dict[str, Any]:
    from botocore.exceptions import BotoCoreError, ClientError

    method = getattr(target.sagemaker, operation, None)
    if method is None:
        raise JobError(
            f"the installed boto3 does not know {operation}; update it with `pip install --upgrade"
            " boto3`"
        )
    try:
        answer: dict[str, Any] = method(**arguments)
    except (ClientError, BotoCoreError) as error:
        reason = why_refused(error, "check the ARN of the training plan and its region")
        raise JobError(f"{plan} was not extended: {reason}", code=reason.code) from None
    return answer
