"""Check by IAM's simulator that the caller may use `smtrain tune` and `smtrain deploy`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from smtrain.client.iam.services import asked_for
from smtrain.client.iam.statement import Arns
from smtrain.client.preflight.context import Absent, Context, Unread
from smtrain.client.preflight.findings import Finding
from smtrain.client.preflight.role import denied

_SESSION = re.compile(r"arn:[^:]+:sts::\d+:assumed-role/([^/]+)/.*")


def caller(context: Context) -> Iterator[Finding]:
    """Only if one of these commands was named: a launch reports missing rights itself."""
    beside = context.beside
    if not context.on_aws or not beside.commands:
        return
    who = str(context.ask("sts", "get_caller_identity").get("Arn", ""))
    if session := _SESSION.fullmatch(who):
        try:  # a session does not contain the path of its role, and roles of the Identity Center have one
            who = str(context.ask("iam", "get_role", absent=["NoSuchEntity"], RoleName=session[1])["Role"]["Arn"])
        except Absent:
            raise Unread(f"IAM knows no role {session[1]}, which you are") from None
    if who.endswith(":root"):
        raise Unread("IAM simulates no root user", "call as a user or a role")
    wanted = list(asked_for(context.config, Arns.of(context.config), beside))
    if lacking := [action for statement in wanted for action in denied(context, who, statement)]:
        yield Finding(
            "caller", "fault", f"you may not {', '.join(sorted(set(lacking)))}",
            "get the rights that `smtrain iam policy CONFIG --caller` prints with the same options",
        )  # fmt: skip
    else:
        yield Finding("caller", "ok", f"you may do what {' and '.join(beside.commands)} need")
