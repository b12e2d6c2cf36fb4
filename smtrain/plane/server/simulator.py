"""IAM's SimulatePrincipalPolicy: evaluate the policies of a role, a user or a group.

The default role of the control plane, and its caller, may do everything. moto's own evaluation
ignores NotResource and `?`, matches any character with a dot, and mistakes conditions, so it is not
used.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from typing import Any

from moto.core.responses import ActionResult
from moto.iam.exceptions import IAMException, NotFoundException
from moto.iam.models import iam_backends
from moto.iam.responses import IamResponse

from smtrain.plane.client import ACCOUNT, ROLE
from smtrain.plane.server import validation
from smtrain.plane.server.refusals import HERE

PAGE = 100
CALLER = f"arn:aws:sts::{ACCOUNT}:user/moto"
"""The caller, as GetCallerIdentity names it."""
_ALL = '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}'
_KINDS = re.compile(rf"arn:aws:iam::{ACCOUNT}:(role|user|group)/(?:.*/)?([^/]+)")


class InvalidInputError(IAMException):
    """An invalid request."""

    code = "InvalidInput"


@dataclass(frozen=True)
class Policy:
    """A policy document and its origin."""

    name: str
    kind: str
    document: str

    def statements(self) -> list[dict[str, Any]]:
        """Its statements. Raises InvalidInputError for an invalid document."""
        try:
            statement = json.loads(self.document)["Statement"]
            statements = [statement] if isinstance(statement, dict) else list(statement)
            if all(isinstance(each, dict) for each in statements):
                return statements
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise InvalidInputError(
            f"The policy {self.name} is not a JSON object with statements; correct it"
        )


def install() -> None:
    """Add the operation to moto's IAM."""

    def simulate_principal_policy(self: Any) -> ActionResult:
        params = {key: value for key, value in self._get_params().items() if value is not None}
        if fault := validation.fault_of("iam", "SimulatePrincipalPolicy", params):
            raise InvalidInputError(fault)
        return ActionResult(simulated(params))

    IamResponse.simulate_principal_policy = simulate_principal_policy  # type: ignore[attr-defined]


def simulated(params: dict[str, Any]) -> dict[str, Any]:
    """Answer the call: a result for each action on each resource, in pages."""
    if params.get("ResourcePolicy"):
        raise InvalidInputError(
            f"ResourcePolicy cannot be honoured: {HERE} simulates the principal's policies only"
        )
    extra = [
        Policy(f"PolicyInputList.{n}", "none", text)
        for n, text in enumerate(params.get("PolicyInputList") or [], 1)
    ]
    policies, boundary = policies_of(params["PolicySourceArn"])
    limits = [
        Policy("boundary", "none", text)
        for text in params.get("PermissionsBoundaryPolicyInputList") or []
    ]
    boundary = limits or boundary
    context = {
        entry["ContextKeyName"].lower(): list(entry.get("ContextKeyValues") or [])
        for entry in params.get("ContextEntries") or []
    }
    for action in params["ActionNames"]:
        if not re.fullmatch(r"[A-Za-z0-9-]+:[A-Za-z0-9]+", action):
            raise InvalidInputError(
                f"Invalid Entity Action: {action}; give it as service:Operation"
            )
    pairs = [
        (action, resource)
        for action in params["ActionNames"]
        for resource in params.get("ResourceArns") or ["*"]
    ]
    start, size = _offset(params.get("Marker")), int(params.get("MaxItems") or PAGE)
    chosen = pairs[start : start + size]
    page: dict[str, Any] = {
        "EvaluationResults": [
            _result(policies + extra, boundary, *pair, context) for pair in chosen
        ],
        "IsTruncated": start + size < len(pairs),
    }
    if page["IsTruncated"]:
        page["Marker"] = base64.b64encode(str(start + size).encode()).decode()
    return page


def policies_of(arn: str) -> tuple[list[Policy], list[Policy]]:
    """The policies of a principal, and its permissions boundary. Raises moto's NoSuchEntity."""
    if arn in (ROLE, CALLER):
        return [Policy("all", "IAM Policy", _ALL)], []
    named = _KINDS.fullmatch(arn)
    if named is None:
        raise InvalidInputError(
            f"Invalid Entity Arn: {arn}; give the ARN of a role, a user or a group"
        )
    kind, name = named.groups()
    backend: Any = iam_backends[ACCOUNT]["aws"]
    principal = getattr(backend, f"get_{kind}")(name)
    if principal.arn != arn:
        raise NotFoundException(f"The {kind} with ARN {arn} cannot be found.")
    policies = list(_own(principal))
    if kind == "user":
        for group in backend.get_groups_for_user(name):
            policies += _own(group)
    boundary = getattr(principal, "permissions_boundary_arn", None)
    return policies, [_managed(backend.get_policy(boundary))] if boundary else []


def _own(principal: Any) -> Iterator[Policy]:
    """Inline policies and attached ones."""
    for name, document in principal.policies.items():
        yield Policy(name, "IAM Policy", document)
    for policy in principal.managed_policies.values():
        yield _managed(policy)


def _managed(policy: Any) -> Policy:
    document = next(version.document for version in policy.versions if version.is_default)
    return Policy(policy.name, "IAM Policy", document)


def _result(
    policies: list[Policy],
    boundary: list[Policy],
    action: str,
    resource: str,
    context: dict[str, list[str]],
) -> dict[str, Any]:
    """An entry of EvaluationResults."""
    missing: set[str] = set()
    decision, matched = _decision(policies, action, resource, context, missing)
    result: dict[str, Any] = {"EvalActionName": action, "EvalResourceName": resource}
    if boundary:
        bounded = _decision(boundary, action, resource, context, missing)[0]
        result["PermissionsBoundaryDecisionDetail"] = {
            "AllowedByPermissionsBoundary": bounded == "allowed"
        }
        if bounded == "explicitDeny" or (bounded == "implicitDeny" and decision == "allowed"):
            decision = bounded
    return {
        **result,
        "EvalDecision": decision,
        "MatchedStatements": [
            {"SourcePolicyId": policy.name, "SourcePolicyType": policy.kind} for policy in matched
        ],
        "MissingContextValues": sorted(missing),
    }


def _decision(
    policies: Iterable[Policy],
    action: str,
    resource: str,
    context: dict[str, list[str]],
    missing: set[str],
) -> tuple[str, list[Policy]]:
    """allowed, implicitDeny or explicitDeny, and the deciding policies; adds to `missing`."""
    matched: dict[str, list[Policy]] = {"Allow": [], "Deny": []}
    for policy in policies:
        for statement in policy.statements():
            if not _concerns(statement, action, resource):
                continue
            if all(
                _holds(operator, key, wanted, context, missing)
                for operator, tests in (statement.get("Condition") or {}).items()
                for key, wanted in tests.items()
            ):
                matched.setdefault(str(statement.get("Effect")), []).append(policy)
    if matched["Deny"]:
        return "explicitDeny", matched["Deny"]
    return ("allowed" if matched["Allow"] else "implicitDeny"), matched["Allow"]


def _concerns(statement: dict[str, Any], action: str, resource: str) -> bool:
    if "NotAction" in statement:
        concerned = not any(
            _like(pattern.lower(), action.lower()) for pattern in _list(statement["NotAction"])
        )
    else:
        concerned = any(
            _like(pattern.lower(), action.lower()) for pattern in _list(statement.get("Action"))
        )
    if not concerned:
        return False
    if "NotResource" in statement:
        return not any(_like(pattern, resource) for pattern in _list(statement["NotResource"]))
    return any(_like(pattern, resource) for pattern in _list(statement.get("Resource")))


def _holds(
    operator: str, key: str, wanted: Any, context: dict[str, list[str]], missing: set[str]
) -> bool:
    """Whether a condition holds; not if its key has no value.

    Raises InvalidInputError for an unknown operator.
    """
    test, present = operator.rpartition(":")[2], context.get(key.lower())
    if test == "Null":
        return (present is None) == (str(_list(wanted)[0]).lower() == "true")
    if test.endswith("IfExists"):
        test = test.removesuffix("IfExists")
        if present is None:
            return True
    negated, plain = "Not" in test, test.replace("Not", "")
    if plain not in _TESTS:
        raise InvalidInputError(
            f"The condition operator {operator} cannot be honoured: {HERE} does not have it"
        )
    if present is None:
        missing.add(key)
        return negated or operator.startswith("ForAllValues:")
    fits = [
        any(_TESTS[plain](str(pattern), value) for pattern in _list(wanted)) != negated
        for value in present
    ]
    return all(fits) if negated or operator.startswith("ForAllValues:") else any(fits)


_TESTS: dict[str, Any] = {
    "StringEquals": lambda pattern, value: pattern == value,
    "StringEqualsIgnoreCase": lambda pattern, value: pattern.lower() == value.lower(),
    "StringLike": lambda pattern, value: _like(pattern, value),
    "ArnEquals": lambda pattern, value: _like(pattern, value),
    "ArnLike": lambda pattern, value: _like(pattern, value),
    "Bool": lambda pattern, value: pattern.lower() == value.lower(),
    "NumericEquals": lambda pattern, value: pattern == value,
}


def _like(pattern: str, value: str) -> bool:
    """Match as IAM does: only `*` and `?` are special."""
    return _compiled(str(pattern)).match(value) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern.replace("[", "[[]")))


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _offset(marker: str | None) -> int:
    try:
        return max(0, int(base64.b64decode(marker))) if marker else 0
    except ValueError:
        raise InvalidInputError(
            "Invalid Marker; give one that this operation has returned"
        ) from None
