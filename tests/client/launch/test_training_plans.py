"""`smtrain pool extend`: offers to extend a training plan, and the purchase of one."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from smtrain.client.launch.training_plans import extend, extensions
from smtrain.core.errors import JobError
from tests.client.preflight.account import Account, Answer

PLAN = "arn:aws:sagemaker:us-west-2:123456789012:training-plan/week"


def offer(name: str, hours: int) -> dict[str, Any]:
    return {
        "TrainingPlanExtensionOfferingId": name,
        "DurationHours": hours,
        "UpfrontFee": f"{100 * hours}",
        "CurrencyCode": "USD",
        "StartDate": datetime(2026, 12, 1, tzinfo=timezone.utc),
        "EndDate": datetime(2026, 12, 2, tzinfo=timezone.utc),
    }


ANSWERS: dict[str, Answer] = {
    "sagemaker.SearchTrainingPlanOfferings": {
        "TrainingPlanOfferings": [],
        "TrainingPlanExtensionOfferings": [offer("two-days", 48), offer("a-day", 24)],
    },
    "sagemaker.ExtendTrainingPlan": {
        "TrainingPlanExtensions": [{**offer("a-day", 24), "Status": "Pending"}]
    },
}


def test_offers_are_listed_with_their_prices_and_one_is_bought() -> None:
    account = Account("us-west-2", ANSWERS, None)
    offers = extensions(account, PLAN)
    assert [str(one) for one in offers] == [
        "a-day  24 h, 2026-12-01 00:00 to 2026-12-02 00:00  2400 USD",
        "two-days  48 h, 2026-12-01 00:00 to 2026-12-02 00:00  4800 USD",
    ]
    assert account.asked == [("sagemaker.SearchTrainingPlanOfferings", {"TrainingPlanArn": PLAN})]
    assert extend(account, PLAN, "a-day")["DurationHours"] == 24
    assert account.asked[-1] == (
        "sagemaker.ExtendTrainingPlan",
        {"TrainingPlanExtensionOfferingId": "a-day"},
    )


def test_a_refusal_of_aws_is_said() -> None:
    account = Account("us-west-2", {}, None)
    with pytest.raises(JobError, match=r"week was not extended: .*AccessDenied"):
        extend(account, PLAN, "a-day")
