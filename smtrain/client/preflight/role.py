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
from smtrain.client.preflight.context import CheckUnavailable, Context, ResourceMissing
from smtrain.core.files import parse_json


def role(context: Context) -> Iterator[Finding]:
    """The role in IAM: its ARN and its trust policy."""
    arn = str(context.config.compute.role)
    name = arn.rpartition("/")[2]
    try:
        iam_role = context.ask("iam", "get_role", absent=["NoSuchEntity"], RoleName=name)["Role"]
    except ResourceMissing:
        yield Finding(
            "role",
            "fault",
            f"there is no role {name}",
            "create it with what `smtrain iam policy CONFIG --role` prints, or correct"
            " compute.role",
        )
        return
    if iam_role["Arn"] != arn:
        yield Finding(
            "role",
            "fault",
            f"the role {name} is {iam_role['Arn']}",
            f"compute.role says {arn}; correct it",
        )
    if (
        context.on_aws
        and context.other_commands.endpoint
        and not _trusts_service(iam_role["AssumeRolePolicyDocument"], SCHEDULER)
    ):
        yield Finding(
            "role",
            "warning",
            f"{name} does not trust {SCHEDULER}, so `smtrain deploy --for` could not delete by it",
            "give it the trust policy of `smtrain iam policy CONFIG --endpoint NAME`, or deploy"
            " with --schedule-role",
        )
    if _trusts_service(iam_role["AssumeRolePolicyDocument"]):
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
    missing_actions: list[str] = []
    for statement in role_statements(context.config, context.requests, context.other_commands):
        missing_actions += denied_actions(context, arn, statement)
    if missing_actions:
        yield Finding(
            "permissions",
            "fault",
            f"the role may not {', '.join(sorted(set(missing_actions)))}",
            "give it the policy that `smtrain iam policy CONFIG --role` prints"
            + (" with the same options" if context.other_commands.commands else ""),
        )
    else:
        yield Finding("permissions", "ok", "the role may do all that its jobs need")


def denied_actions(context: Context, arn: str, statement: Statement) -> Iterator[str]:
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
    except ResourceMissing:
        raise CheckUnavailable(f"there is no {arn.rpartition(':')[2]}") from None
    for result in answer["EvaluationResults"]:
        if result["EvalDecision"] != "allowed":
            yield f"{result['EvalActionName']} on {result.get('EvalResourceName', resources[0])}"


def _trusts_service(document: str | dict[str, Any], service: str = SERVICE) -> bool:
    """True if a trust policy lets a service assume the role."""
    policy = parse_json(document) if isinstance(document, str) else document
    statements = policy.get("Statement", [])
    for statement in [statements] if isinstance(statements, dict) else statements:
        actions, principal = _list(statement.get("Action")), statement.get("Principal")
        services = (
            _list(principal.get("Service")) if isinstance(principal, dict) else _list(principal)
        )
        allows_assume = statement.get("Effect") == "Allow" and {
            "sts:AssumeRole",
            "sts:*",
            "*",
        } & set(actions)
        if allows_assume and {service, "*"} & set(services):
            return True
    return False


def _list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


_SESSION = re.compile(r"arn:[^:]+:sts::\d+:assumed-role/([^/]+)/.*")


def caller(context: Context) -> Iterator[Finding]:
    """Only if one of these commands was named: a launch reports missing rights itself."""
    other_commands = context.other_commands
    if not context.on_aws or not other_commands.commands:
        return
    principal = str(context.ask("sts", "get_caller_identity").get("Arn", ""))
    if session := _SESSION.fullmatch(principal):
        # a session does not contain the path of its role, and roles of the Identity Center have one
        try:
            principal = str(
                context.ask("iam", "get_role", absent=["NoSuchEntity"], RoleName=session[1])[
                    "Role"
                ]["Arn"]
            )
        except ResourceMissing:
            raise CheckUnavailable(f"IAM has no role {session[1]}, which you use") from None
    if principal.endswith(":root"):
        raise CheckUnavailable("IAM cannot simulate the root user", "call as a user or a role")
    statements = list(command_statements(context.config, Arns.of(context.config), other_commands))
    if missing_actions := [
        action
        for statement in statements
        for action in denied_actions(context, principal, statement)
    ]:
        yield Finding(
            "caller",
            "fault",
            f"you may not {', '.join(sorted(set(missing_actions)))}",
            "get the rights that `smtrain iam policy CONFIG --caller` prints with the same options",
        )
    else:
        yield Finding(
            "caller", "ok", f"you may do what {' and '.join(other_commands.commands)} need"
        )
