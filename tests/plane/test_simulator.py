"""SimulatePrincipalPolicy: the default role may do everything, the user's roles what their policies
allow.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smtrain.plane.server.simulator import CALLER

from .conftest import Client, refused

Statement = dict[str, Any]
GET, BUCKET = "s3:GetObject", "arn:aws:s3:::a.bucket/x"
_numbers = itertools.count()


@pytest.fixture
def iam(client: Client) -> Any:
    return client.endpoint.session().client("iam")


@pytest.fixture
def role_with(iam: Any) -> Iterator[Callable[..., str]]:
    """Make a role with these inline statements; return its ARN."""
    made = []

    def make(*statements: Statement, **more: Any) -> str:
        name = f"simulated-{next(_numbers)}"
        made.append(name)
        arn: str = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}", **more)["Role"][
            "Arn"
        ]
        document = json.dumps({"Version": "2012-10-17", "Statement": list(statements)})
        iam.put_role_policy(RoleName=name, PolicyName="inline", PolicyDocument=document)
        return arn

    yield make
    for name in made:
        iam.delete_role_policy(RoleName=name, PolicyName="inline")
        for attached in iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]:
            iam.detach_role_policy(RoleName=name, PolicyArn=attached["PolicyArn"])
        iam.delete_role(RoleName=name)


def decisions(iam: Any, arn: str, *actions: str, **params: Any) -> list[str]:
    """Decisions of all pages."""
    pages = iam.get_paginator("simulate_principal_policy").paginate(
        PolicySourceArn=arn, ActionNames=list(actions or [GET]), **params
    )
    return [result["EvalDecision"] for page in pages for result in page["EvaluationResults"]]


def allow(action: Any = GET, resource: Any = "*", **more: Any) -> Statement:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


def test_the_default_role_and_the_caller_may_do_everything(client: Client, iam: Any) -> None:
    assert client.endpoint.session().client("sts").get_caller_identity()["Arn"] == CALLER
    for arn in (client.endpoint.role, CALLER):
        assert (
            decisions(iam, arn, GET, "sagemaker:CreateTrainingJob", ResourceArns=[BUCKET, "*"])
            == ["allowed"] * 4
        )


@pytest.mark.parametrize(
    ("statements", "wanted"),
    [
        ([allow()], "allowed"),
        ([allow("s3:get*")], "allowed"),
        ([allow(["iam:*", "S3:Get?bject"])], "allowed"),
        ([allow("s3:Get")], "implicitDeny"),
        ([allow("s3:PutObject")], "implicitDeny"),
        ([allow(resource=["arn:aws:s3:::a.bucket/*"])], "allowed"),
        ([allow(resource="arn:aws:s3:::a?bucket/x")], "allowed"),
        ([allow(resource="arn:aws:s3:::aXbucket/*")], "implicitDeny"),
        ([allow(resource="arn:aws:s3:::[a].bucket/*")], "implicitDeny"),
        ([allow(), {"Effect": "Deny", "Action": "s3:*", "Resource": "*"}], "explicitDeny"),
        (
            [allow(), {"Effect": "Deny", "Action": "s3:*", "Resource": "arn:aws:s3:::other/*"}],
            "allowed",
        ),
        (
            [allow(), {"Effect": "Deny", "Action": "s3:*", "NotResource": "arn:aws:s3:::other/*"}],
            "explicitDeny",
        ),
        ([{"Effect": "Allow", "NotAction": "iam:*", "Resource": "*"}], "allowed"),
        ([{"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}], "implicitDeny"),
        ([allow(Condition={"StringEquals": {"aws:RequestTag/team": "a"}})], "implicitDeny"),
        ([allow(), allow(Condition={"StringEquals": {"aws:RequestTag/team": "a"}})], "allowed"),
        ([allow(Condition={"StringEqualsIfExists": {"aws:RequestTag/team": "a"}})], "allowed"),
        ([allow(Condition={"StringLike": {"s3:Prefix": ["a*", "b*"]}})], "allowed"),
        ([allow(Condition={"StringNotLike": {"S3:prefix": "b*"}})], "implicitDeny"),
        ([allow(Condition={"ForAnyValue:StringEquals": {"s3:prefix": ["bcd"]}})], "allowed"),
        ([allow(Condition={"Null": {"s3:prefix": "false"}})], "allowed"),
    ],
)
def test_the_policies_of_a_role_decide(
    iam: Any, role_with: Callable[..., str], statements: list[Statement], wanted: str
) -> None:
    entries = [
        {"ContextKeyName": "s3:prefix", "ContextKeyValues": ["bcd"], "ContextKeyType": "string"}
    ]
    arn = role_with(*statements)
    assert decisions(iam, arn, ResourceArns=[BUCKET], ContextEntries=entries) == [wanted]


def test_attached_policies_and_boundaries_count(iam: Any, role_with: Callable[..., str]) -> None:
    document = json.dumps({"Version": "2012-10-17", "Statement": allow("s3:*")})
    made = iam.create_policy(PolicyName=f"attached-{next(_numbers)}", PolicyDocument=document)[
        "Policy"
    ]["Arn"]
    arn = role_with(allow("iam:*"))
    assert decisions(iam, arn, GET) == ["implicitDeny"]
    iam.attach_role_policy(RoleName=arn.rpartition("/")[2], PolicyArn=made)
    assert decisions(iam, arn, GET, "iam:GetRole") == ["allowed", "allowed"]
    bounded = role_with(allow("iam:*"), allow(), PermissionsBoundary=made)
    assert decisions(iam, bounded, GET, "iam:GetRole") == ["allowed", "implicitDeny"]


def test_users_have_the_policies_of_their_groups(iam: Any) -> None:
    user, group = (f"simulated-{next(_numbers)}" for _ in range(2))
    arn = iam.create_user(UserName=user)["User"]["Arn"]
    of_group = iam.create_group(GroupName=group)["Group"]["Arn"]
    iam.put_group_policy(
        GroupName=group,
        PolicyName="p",
        PolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [allow()]}),
    )
    assert decisions(iam, arn) == ["implicitDeny"]
    iam.add_user_to_group(GroupName=group, UserName=user)
    assert decisions(iam, arn) == decisions(iam, of_group) == ["allowed"]


def test_results_come_in_pages_and_say_what_was_asked(
    iam: Any, role_with: Callable[..., str]
) -> None:
    arn = role_with(
        allow(resource=BUCKET, Condition={"Bool": {"aws:SecureTransport": "true"}}),
        allow("s3:Put*"),
    )
    actions, resources = ["s3:GetObject", "s3:PutObject"], [BUCKET, f"{BUCKET}y"]
    first = iam.simulate_principal_policy(
        PolicySourceArn=arn, ActionNames=actions, ResourceArns=resources, MaxItems=3
    )
    assert first["IsTruncated"]
    second = iam.simulate_principal_policy(
        PolicySourceArn=arn,
        ActionNames=actions,
        ResourceArns=resources,
        MaxItems=3,
        Marker=first["Marker"],
    )
    assert not second["IsTruncated"]
    results = first["EvaluationResults"] + second["EvaluationResults"]
    assert [(r["EvalActionName"], r["EvalResourceName"]) for r in results] == list(
        itertools.product(actions, resources)
    )
    assert [r["EvalDecision"] for r in results] == ["implicitDeny"] * 2 + ["allowed"] * 2
    assert results[0]["MissingContextValues"] == ["aws:SecureTransport"]
    assert results[2]["MatchedStatements"][0]["SourcePolicyId"] == "inline"


@pytest.mark.parametrize(
    ("params", "code", "says"),
    [
        ({"PolicySourceArn": "arn:aws:iam::123456789012:role/nobody"}, "NoSuchEntity", "nobody"),
        (
            {"PolicySourceArn": "arn:aws:iam::123456789012:role/x/smtrain-local"},
            "NoSuchEntity",
            "cannot be found",
        ),
        (
            {"PolicySourceArn": "arn:aws:sagemaker:::x/abcdefg"},
            "InvalidInput",
            "Invalid Entity Arn",
        ),
        ({"ActionNames": ["nonsense"]}, "InvalidInput", "Invalid Entity Action: nonsense"),
        ({"Marker": "made up"}, "InvalidInput", "Invalid Marker"),
        (
            {"PolicyInputList": ["not json"]},
            "InvalidInput",
            "PolicyInputList.1 is not a JSON object",
        ),
        ({"ResourcePolicy": "{}"}, "InvalidInput", "ResourcePolicy cannot be honoured"),
        (
            {
                "PolicyInputList": [
                    json.dumps(
                        {
                            "Statement": allow(
                                Condition={"DateLessThan": {"aws:CurrentTime": "2027-01-01"}}
                            )
                        }
                    )
                ]
            },
            "InvalidInput",
            "DateLessThan cannot be honoured",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    client: Client, iam: Any, params: dict[str, Any], code: str, says: str
) -> None:
    params = {"PolicySourceArn": client.endpoint.role, "ActionNames": [GET], **params}
    answered, message = refused(iam.simulate_principal_policy, **params)
    assert (answered, says in message) == (code, True), message
