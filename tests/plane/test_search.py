"""Search over training jobs, as SDK analytics and scripts use it."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from testing.plane import Plane

from .conftest import Client


@pytest.fixture(scope="module")
def jobs(client: Client) -> list[str]:
    """Three jobs in order of creation; the last one fails."""
    plane = Plane(client.endpoint)
    names = []
    for number, end in enumerate(("Completed", "Completed", "Failed")):
        name = plane.synthetic_job(
            name=f"searched-{number}", lines=1, end=end, reason="x" * (end == "Failed") or None
        ).name
        arn = client.wait(name)["TrainingJobArn"]
        client.sagemaker.add_tags(ResourceArn=arn, Tags=[{"Key": "n", "Value": str(number)}])
        names.append(name)
    return names


def search(client: Client, *filters: tuple[str, str, str | None], **params: Any) -> list[str]:
    """Names of the jobs that match all filters (property, operator, value)."""
    conditions = [
        {"Name": name, "Operator": operator, **({} if value is None else {"Value": value})}
        for name, operator, value in (*filters, ("TrainingJobName", "Contains", "searched-"))
    ]
    answer = client.sagemaker.search(
        Resource="TrainingJob", SearchExpression={"Filters": conditions}, **params
    )
    return [result["TrainingJob"]["TrainingJobName"] for result in answer["Results"]]


def test_filters(client: Client, jobs: list[str]) -> None:
    def chosen(*filters: tuple[str, str, str | None]) -> set[int]:
        return {jobs.index(name) for name in search(client, *filters)}

    assert chosen() == {0, 1, 2}
    assert chosen(("TrainingJobName", "Equals", jobs[1])) == {1}
    assert chosen(("TrainingJobStatus", "NotEquals", "Completed")) == {2}
    assert chosen(("TrainingJobStatus", "In", "Failed, Stopped")) == {2}
    assert chosen(("Tags.n", "Equals", "0")) == {0}
    assert chosen(("Tags.n", "Exists", None)) == {0, 1, 2}
    assert chosen(("FailureReason", "NotExists", None)) == {0, 1}
    assert chosen(("ResourceConfig.InstanceCount", "GreaterThanOrEqualTo", "1")) == {0, 1, 2}
    assert chosen(("Metrics.loss", "LessThan", "1")) == set()
    moment = client.describe(jobs[1])["CreationTime"].astimezone(datetime.timezone.utc).isoformat()
    assert chosen(("CreationTime", "LessThan", moment)) == {0}
    assert chosen(("CreationTime", "GreaterThan", moment.replace("+00:00", "Z"))) == {2}


def test_expressions_may_be_joined(client: Client, jobs: list[str]) -> None:
    either = {
        "Operator": "Or",
        "Filters": [{"Name": "TrainingJobName", "Operator": "Equals", "Value": jobs[0]}],
        "SubExpressions": [
            {
                "Filters": [
                    {"Name": "TrainingJobStatus", "Operator": "Equals", "Value": "Failed"},
                    {"Name": "TrainingJobName", "Operator": "Contains", "Value": "searched-"},
                ]
            }
        ],
    }
    answer = client.sagemaker.search(
        Resource="TrainingJob", SearchExpression=either, SortBy="CreationTime"
    )
    assert [result["TrainingJob"]["TrainingJobName"] for result in answer["Results"]] == [
        jobs[2],
        jobs[0],
    ]


def test_order_and_pages(client: Client, jobs: list[str]) -> None:
    assert search(client, SortBy="TrainingJobName", SortOrder="Ascending") == jobs
    assert search(client, SortBy="CreationTime") == jobs[::-1]
    ordered = search(client, SortBy="Tags.n", SortOrder="Ascending")
    assert ordered == jobs
    pages = client.sagemaker.get_paginator("search").paginate(
        Resource="TrainingJob",
        SortBy="CreationTime",
        PaginationConfig={"PageSize": 2},
        SearchExpression={
            "Filters": [{"Name": "TrainingJobName", "Operator": "Contains", "Value": "searched-"}]
        },
    )
    assert [[r["TrainingJob"]["TrainingJobName"] for r in page["Results"]] for page in pages] == [
        jobs[:0:-1],
        jobs[:1],
    ]


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"Resource": "Experiment"}, "searches training jobs only; use TrainingJob"),
        ({"SortBy": "Nonsense"}, "Unknown property name: Nonsense"),
        (
            {"SearchExpression": {"Filters": [{"Name": "Nonsense", "Value": "x"}]}},
            "Unknown property name: Nonsense",
        ),
        (
            {
                "SearchExpression": {
                    "Filters": [{"Name": "CreationTime", "Operator": "LessThan", "Value": "soon"}]
                }
            },
            "not a number or a time",
        ),
        ({"NextToken": "made up"}, "pagination token is not valid"),
        (
            {
                "SearchExpression": {
                    "NestedFilters": [{"NestedPropertyName": "a", "Filters": [{"Name": "b"}]}]
                }
            },
            "NestedFilters cannot be honoured",
        ),
    ],
)
def test_what_cannot_be_searched_is_a_sentence(
    client: Client, jobs: list[str], params: dict[str, Any], says: str
) -> None:
    with pytest.raises(ClientError, match="ValidationException") as caught:
        client.sagemaker.search(**{"Resource": "TrainingJob", **params})
    assert says in str(caught.value)
