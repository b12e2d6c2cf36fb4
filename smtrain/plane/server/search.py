"""SageMaker's Search over training jobs: filters, subexpressions, order and pages."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from typing import Any

from moto.sagemaker.exceptions import AWSValidationException

from smtrain.core.botocore_models import service_model
from smtrain.plane.server.jobs import JobRecord
from smtrain.plane.server.refusals import PLANE_NAME

PAGE = 100
"""Default number of results of a page."""
_COMPARES: dict[str, Callable[[Any, Any], bool]] = {
    "GreaterThan": lambda actual, expected: actual > expected,
    "GreaterThanOrEqualTo": lambda actual, expected: actual >= expected,
    "LessThan": lambda actual, expected: actual < expected,
    "LessThanOrEqualTo": lambda actual, expected: actual <= expected,
}


def search(jobs: Iterable[JobRecord], params: dict[str, Any]) -> dict[str, Any]:
    """Answer a Search. Raises AWSValidationException for expressions that are not supported."""
    if params["Resource"] != "TrainingJob":
        raise AWSValidationException(
            f"Resource is {params['Resource']}: {PLANE_NAME} searches training jobs only; use"
            " TrainingJob"
        )
    expression = params.get("SearchExpression") or {}
    records = [job.gen_response_object() for job in jobs]
    matching_records = [record for record in records if _holds(expression, record)]
    field = params.get("SortBy") or "LastModifiedTime"
    _check(field)
    descending = params.get("SortOrder", "Descending") == "Descending"
    matching_records.sort(
        key=lambda record: (_order(record, field), record["TrainingJobName"]), reverse=descending
    )
    page_records, next_page = slice_page(matching_records, params, PAGE)
    return {"Results": [{"TrainingJob": record} for record in page_records], **next_page}


def slice_page(
    jobs: list[dict[str, Any]], params: dict[str, Any], size: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The jobs of the requested page, of `size` by default, and the token of the next page.

    A token names the last job shown, so that jobs created meanwhile do not shift pages. Raises
    AWSValidationException for an invalid token.
    """
    names = [job["TrainingJobName"] for job in jobs]
    token = params.get("NextToken")
    if token and token not in names:
        raise AWSValidationException("The pagination token is not valid.")
    start = names.index(token) + 1 if token else 0
    end = start + int(params.get("MaxResults") or size)
    return jobs[start:end], {"NextToken": names[end - 1]} if end < len(jobs) else {}


def _holds(expression: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether a job's record matches an expression; an empty one matches all."""
    if expression.get("NestedFilters"):
        raise AWSValidationException(
            f"NestedFilters cannot be honoured: {PLANE_NAME} has Filters and SubExpressions only"
        )
    results = [
        _holds_for_property(condition, record) for condition in expression.get("Filters") or []
    ]
    results += [_holds(condition, record) for condition in expression.get("SubExpressions") or []]
    return any(results) or not results if expression.get("Operator") == "Or" else all(results)


def _holds_for_property(condition: dict[str, Any], record: dict[str, Any]) -> bool:
    name, operator = (
        condition["Name"],
        condition.get("Operator") or ("Equals" if "Value" in condition else "Exists"),
    )
    _check(name)
    values = _values(record, name)
    if operator in ("Exists", "NotExists"):
        return bool(values) == (operator == "Exists")
    if "Value" not in condition:
        raise AWSValidationException(f"The filter of {name} has no Value, which {operator} needs.")
    expected: str = condition["Value"]
    if operator == "NotEquals":
        return not any(_equal(value, expected) for value in values)
    if operator == "Contains":
        return any(expected in str(value) for value in values)
    if operator == "In":
        return any(
            _equal(value, choice.strip()) for value in values for choice in expected.split(",")
        )
    if compare := _COMPARES.get(operator):
        return any(
            compare(value, _parse_like(value, expected))
            for value in values
            if not isinstance(value, dict)
        )
    return any(_equal(value, expected) for value in values)


def _check(name: str) -> None:
    """Raise AWSValidationException for a property that training jobs do not have."""
    first = name.partition(".")[0]
    if (
        first != "Metrics"
        and first not in service_model("sagemaker").shape_for("TrainingJob").members
    ):
        raise AWSValidationException(f"Unknown property name: {name}")


def _values(record: dict[str, Any], name: str) -> list[Any]:
    """All values of a property (`TrainingJobName`, `Tags.team`, `HyperParameters.lr`,
    `Metrics.loss`).
    """
    first, _, subkey = name.partition(".")
    if first == "Tags":
        return [tag["Value"] for tag in record["Tags"] if tag["Key"] == subkey]
    if first == "Metrics":
        return [
            metric["Value"]
            for metric in record["FinalMetricDataList"]
            if metric["MetricName"] == subkey
        ]
    if first in ("HyperParameters", "Environment") and subkey:
        return [value for key, value in (record.get(first) or {}).items() if key == subkey]
    values: list[Any] = [record]
    for part in name.split("."):
        members = [member.get(part) for member in values if isinstance(member, dict)]
        values = [
            item
            for member in members
            if member is not None
            for item in (member if isinstance(member, list) else [member])
        ]
    return values


def _equal(value: Any, expected: str) -> bool:
    try:
        return bool(value == _parse_like(value, expected))
    except AWSValidationException:
        return False


def _parse_like(value: Any, expected: str) -> Any:
    """The filter's value in the type that it is compared with: a number, a time, or text."""
    try:
        if isinstance(value, bool):
            return expected.lower() == "true"
        if isinstance(value, (int, float)):
            return float(expected)
        if isinstance(value, datetime.datetime):
            moment = datetime.datetime.fromisoformat(expected.replace("Z", "+00:00"))
            return moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)
    except ValueError:
        raise AWSValidationException(
            f"The Value {expected[:60]!r} of a filter is not a number or a time, which its property"
            " needs."
        ) from None
    return expected


def _order(record: dict[str, Any], field: str) -> tuple[int, Any]:
    """The sort key of a job; jobs without the property come first."""
    values = [value for value in _values(record, field) if not isinstance(value, dict)]
    if not values:
        return (0, 0)
    value = values[0]
    if isinstance(value, datetime.datetime):
        value = value.timestamp()
    return (1, value) if isinstance(value, (int, float)) else (2, str(value))
