"""Check rights: the execution role's trust and permissions, and the caller's permissions for its
commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from smtrain.client.findings import Finding
from smtrain.client.iam.policies import role_statements
from smtrain.client.iam.statements import SCHEDULER, SERVICE, Arns, Statement, command_statements
from smtrain.client.preflight.context import Absent, Context, Unread
from smtrain.core.files import parse_json


def role(context: Context) -> Iterator[Finding]:
    """The role in IAM: its ARN and its trust policy."""
    arn = str(context.config.compute.role)
    name = arn.rpartition("/")[2]
    try:
        known = context.ask("iam", "get_role", absent=["NoSuchEntity"], RoleName=name)["Role"]
    except Absent:
        yield Finding(
            "role",
            "fault",
            f"there is no role {name}",
            "create it with what `smtrain iam policy CONFIG --role` prints, or correct"
            " compute.role",
        )
        return
    if known["Arn"] != arn:
        yield Finding(
            "role",
            "fault",
            f"the role {name} is {known['Arn']}",
            f"compute.role says {arn}; correct it",
        )
    if (
        context.on_aws
        and context.others.endpoint
        and not _trusted(known["AssumeRolePolicyDocument"], SCHEDULER)
    ):
        yield Finding(
            "role",
            "warning",
            f"{name} does not trust {SCHEDULER}, so `smtrain deploy --for` could not delete by it",
            "give it the trust policy of `smtrain iam policy CONFIG --endpoint NAME`, or deploy"
            " with --schedule-role",
        )
    if _trusted(known["AssumeRolePolicyDocument"]):
        yield Finding("role", "ok", f"{name} exists and trusts {SERVICE}")
    else:
        yield Finding(
            "role",
            "fault",
            f"{name} does not trust {SERVICE}, so no job can assume it",
            "give it the trust policy that `smtrain iam policy CONFIG --role` prints",
        )


def permissions(context: Context) -> Iterator[Finding]:
    """IAM's simulator on the rights of the role's jobs; it ignores bucket and key policies of other
    accounts.
    """
    if not context.on_aws:
        yield Finding("permissions", "ok", "the local control plane lets every role do everything")
        return
    arn = str(context.config.compute.role)
    lacking: list[str] = []
    for statement in role_statements(context.config, context.requests, context.others):
        lacking += denied(context, arn, statement)
    if lacking:
        yield Finding(
            "permissions",
            "fault",
            f"the role may not {', '.join(sorted(set(lacking)))}",
            "give it the policy that `smtrain iam policy CONFIG --role` prints"
            + (" with the same options" if context.others.commands else ""),
        )
    else:
        yield Finding("permissions", "ok", "the role may do all that its jobs need")


def denied(context: Context, arn: str, statement: Statement) -> Iterator[str]:
    """The actions of a statement that this principal may not do."""
    # The simulator accepts no wildcards, so one object below the prefix stands for all of them.
    resources = [
        resource.replace("*", "smtrain-check") if resource != "*" else "*"
        for resource in statement.resources
    ]
    entries: list[dict[str, Any]] = [
        {
            "ContextKeyName": key,
            "ContextKeyValues": [values[0].replace("*", "")],
            "ContextKeyType": "string",
        }
        for tests in statement.condition.values()
        for key, values in tests.items()
    ]
    arguments: dict[str, Any] = {"ContextEntries": entries} if entries else {}
    try:
        answer = context.ask(
            "iam",
            "simulate_principal_policy",
            absent=["NoSuchEntity"],
            PolicySourceArn=arn,
            ActionNames=list(statement.actions),
            ResourceArns=resources,
            **arguments,
        )
    except Absent:
        raise Unread(f"there is no {arn.rpartition(':')[2]}") from None
    for result in answer["EvaluationResults"]:
        if result["EvalDecision"] != "allowed":
            yield f"{result['EvalActionName']} on {result.get('EvalResourceName', resources[0])}"


def _trusted(document: str | dict[str, Any], service: str = SERVICE) -> bool:
    """True if a trust policy lets a service assume the role."""
    policy = parse_json(document) if isinstance(document, str) else document
    statements = policy.get("Statement", [])
    for statement in [statements] if isinstance(statements, dict) else statements:
        actions, principal = _list(statement.get("Action")), statement.get("Principal")
        services = (
            _list(principal.get("Service")) if isinstance(principal, dict) else _list(principal)
        )
        allowed = statement.get("Effect") == "Allow" and {"sts:AssumeRole", "sts:*", "*"} & set(
            actions
        )
        if allowed and {service, "*"} & set(services):
            return True
    return False


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


_SESSION = re.compile(r"arn:[^:]+:sts::\d+:assumed-role/([^/]+)/.*")


def caller(context: Context) -> Iterator[Finding]:
    """Only if one of these commands was named: a launch reports missing rights itself."""
    others = context.others
    if not context.on_aws or not others.commands:
        return
    who = str(context.ask("sts", "get_caller_identity").get("Arn", ""))
    if session := _SESSION.fullmatch(who):
        # a session does not contain the path of its role, and roles of the Identity Center have one
        try:
            who = str(
                context.ask("iam", "get_role", absent=["NoSuchEntity"], RoleName=session[1])[
                    "Role"
                ]["Arn"]
            )
        except Absent:
            raise Unread(f"IAM has no role {session[1]}, which you use") from None
    if who.endswith(":root"):
        raise Unread("IAM cannot simulate the root user", "call as a user or a role")
    wanted = list(command_statements(context.config, Arns.of(context.config), others))
    if lacking := [action for statement in wanted for action in denied(context, who, statement)]:
        yield Finding(
            "caller",
            "fault",
            f"you may not {', '.join(sorted(set(lacking)))}",
            "get the rights that `smtrain iam policy CONFIG --caller` prints with the same options",
        )
    else:
        yield Finding("caller", "ok", f"you may do what {' and '.join(others.commands)} need")
