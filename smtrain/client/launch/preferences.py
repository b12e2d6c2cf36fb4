"""Leave the choice among fallback types to SageMaker (ResourceConfig.InstancePreferences).

SageMaker's model of CreateTrainingJob (botocore 1.44.8): an ordered list of one to five types, each
at most once, of which the first with capacity gets the job. It excludes InstanceType,
InstanceGroups and spot machines, and a preference with TrainingPlanArns uses that plan. All types
get the same request, so types that need other variables, images or disks are tried by our own
loop (`submit`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from smtrain.core.config import JobConfig

LONGEST = 5
"""Types in a list of preferences."""


def with_preferences(
    config: JobConfig, request: dict[str, Any], variants: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The request with its type and those of `variants`, the requests for the fallback types, as
    preferences; None if one request cannot serve all of them.
    """
    compute, resources = config.compute, request["ResourceConfig"]
    is_possible = (
        0 < len(variants) < LONGEST
        and not compute.keep_alive  # the API names on-demand and training-plan capacity only
        and "InstanceType" in resources
        and all(_without_type(variant) == _without_type(request) for variant in variants)
        and _is_in_api()
    )
    if not is_possible:
        return None
    first: dict[str, Any] = {"InstanceType": resources["InstanceType"]}
    if compute.training_plan:
        first["TrainingPlanArns"] = [compute.training_plan]
    fallbacks = [
        {"InstanceType": variant["ResourceConfig"]["InstanceType"]} for variant in variants
    ]
    settings = {key: value for key, value in resources.items() if key not in _OF_TYPE}
    return {**request, "ResourceConfig": {**settings, "InstancePreferences": [first, *fallbacks]}}


_OF_TYPE = ("InstanceType", "TrainingPlanArn")


def _without_type(request: Mapping[str, Any]) -> dict[str, Any]:
    resources = request["ResourceConfig"]
    settings = {key: value for key, value in resources.items() if key not in _OF_TYPE}
    return {**request, "ResourceConfig": settings}


@cache
def _is_in_api() -> bool:
    """Whether the installed botocore knows the field; 1.41 does not."""
    from botocore.session import get_session

    model = get_session().get_service_model("sagemaker")
    shape: Any = model.shape_for("ResourceConfig")  # a structure, which the stubs do not say
    return "InstancePreferences" in shape.members
