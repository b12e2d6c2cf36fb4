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
from smtrain.plane.server.refusals import PLANE_NAME

PAGE = 100
CALLER = f"arn:aws:sts::{ACCOUNT}:user/moto"
"""The caller, as GetCallerIdentity names it."""
_ALLOW_ALL = (
    '{"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}'
)
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
            if all(isinstance(entry, dict) for entry in statements):
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
        return ActionResult(simulate_policy(params))

    IamResponse.simulate_principal_policy = simulate_principal_policy  # type: ignore[attr-defined]


def simulate_policy(params: dict[str, Any]) -> dict[str, Any]:
    """Answer the call: a result for each action on each resource, in pages."""
    if params.get("ResourcePolicy"):
        raise InvalidInputError(
            f"ResourcePolicy cannot be honoured: {PLANE_NAME} simulates the principal's policies"
            " only"
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
    page_pairs = pairs[start : start + size]
    page: dict[str, Any] = {
        "EvaluationResults": [
            _result(policies + extra, boundary, *pair, context) for pair in page_pairs
        ],
        "IsTruncated": start + size < len(pairs),
    }
    if page["IsTruncated"]:
        page["Marker"] = base64.b64encode(str(start + size).encode()).decode()
    return page


def policies_of(arn: str) -> tuple[list[Policy], list[Policy]]:
    """The policies of a principal, and its permissions boundary. Raises moto's NoSuchEntity."""
    if arn in (ROLE, CALLER):
        return [Policy("all", "IAM Policy", _ALLOW_ALL)], []
    match = _KINDS.fullmatch(arn)
    if match is None:
        raise InvalidInputError(
            f"Invalid Entity Arn: {arn}; give the ARN of a role, a user or a group"
        )
    kind, name = match.groups()
    backend: Any = iam_backends[ACCOUNT]["aws"]
    principal = getattr(backend, f"get_{kind}")(name)
    if principal.arn != arn:
        raise NotFoundException(f"The {kind} with ARN {arn} cannot be found.")
    policies = list(_principal_policies(principal))
    if kind == "user":
        for group in backend.get_groups_for_user(name):
            policies += _principal_policies(group)
    boundary = getattr(principal, "permissions_boundary_arn", None)
    return policies, [_managed_policy(backend.get_policy(boundary))] if boundary else []


def _principal_policies(principal: Any) -> Iterator[Policy]:
    """Inline policies and attached ones."""
    for name, document in principal.policies.items():
        yield Policy(name, "IAM Policy", document)
    for policy in principal.managed_policies.values():
        yield _managed_policy(policy)


def _managed_policy(policy: Any) -> Policy:
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
    missing_keys: set[str] = set()
    decision, deciding_policies = _decision(policies, action, resource, context, missing_keys)
    result: dict[str, Any] = {"EvalActionName": action, "EvalResourceName": resource}
    if boundary:
        boundary_decision = _decision(boundary, action, resource, context, missing_keys)[0]
        result["PermissionsBoundaryDecisionDetail"] = {
            "AllowedByPermissionsBoundary": boundary_decision == "allowed"
        }
        if boundary_decision == "explicitDeny" or (
            boundary_decision == "implicitDeny" and decision == "allowed"
        ):
            decision = boundary_decision
    return {
        **result,
        "EvalDecision": decision,
        "MatchedStatements": [
            {"SourcePolicyId": policy.name, "SourcePolicyType": policy.kind}
            for policy in deciding_policies
        ],
        "MissingContextValues": sorted(missing_keys),
    }


def _decision(
    policies: Iterable[Policy],
    action: str,
    resource: str,
    context: dict[str, list[str]],
    missing_keys: set[str],
) -> tuple[str, list[Policy]]:
    """allowed, implicitDeny or explicitDeny, and the deciding policies; adds to `missing_keys`."""
    policies_by_effect: dict[str, list[Policy]] = {"Allow": [], "Deny": []}
    for policy in policies:
        for statement in policy.statements():
            if not _applies_to(statement, action, resource):
                continue
            if all(
                _holds(operator, key, expected, context, missing_keys)
                for operator, tests in (statement.get("Condition") or {}).items()
                for key, expected in tests.items()
            ):
                policies_by_effect.setdefault(str(statement.get("Effect")), []).append(policy)
    if policies_by_effect["Deny"]:
        return "explicitDeny", policies_by_effect["Deny"]
    return ("allowed" if policies_by_effect["Allow"] else "implicitDeny"), policies_by_effect[
        "Allow"
    ]


def _applies_to(statement: dict[str, Any], action: str, resource: str) -> bool:
    if "NotAction" in statement:
        applies = not any(
            _matches_pattern(pattern.lower(), action.lower())
            for pattern in _list(statement["NotAction"])
        )
    else:
        applies = any(
            _matches_pattern(pattern.lower(), action.lower())
            for pattern in _list(statement.get("Action"))
        )
    if not applies:
        return False
    if "NotResource" in statement:
        return not any(
            _matches_pattern(pattern, resource) for pattern in _list(statement["NotResource"])
        )
    return any(_matches_pattern(pattern, resource) for pattern in _list(statement.get("Resource")))


def _holds(
    operator: str, key: str, expected: Any, context: dict[str, list[str]], missing_keys: set[str]
) -> bool:
    """Whether a condition holds; not if its key has no value.

    Raises InvalidInputError for an unknown operator.
    """
    test, present = operator.rpartition(":")[2], context.get(key.lower())
    if test == "Null":
        return (present is None) == (str(_list(expected)[0]).lower() == "true")
    if test.endswith("IfExists"):
        test = test.removesuffix("IfExists")
        if present is None:
            return True
    is_negated, plain = "Not" in test, test.replace("Not", "")
    if plain not in _TESTS:
        raise InvalidInputError(
            f"The condition operator {operator} cannot be honoured: {PLANE_NAME} does not have it"
        )
    if present is None:
        missing_keys.add(key)
        return is_negated or operator.startswith("ForAllValues:")
    fits = [
        any(_TESTS[plain](str(pattern), value) for pattern in _list(expected)) != is_negated
        for value in present
    ]
    return all(fits) if is_negated or operator.startswith("ForAllValues:") else any(fits)


_TESTS: dict[str, Any] = {
    "StringEquals": lambda pattern, value: pattern == value,
    "StringEqualsIgnoreCase": lambda pattern, value: pattern.lower() == value.lower(),
    "StringLike": lambda pattern, value: _matches_pattern(pattern, value),
    "ArnEquals": lambda pattern, value: _matches_pattern(pattern, value),
    "ArnLike": lambda pattern, value: _matches_pattern(pattern, value),
    "Bool": lambda pattern, value: pattern.lower() == value.lower(),
    "NumericEquals": lambda pattern, value: pattern == value,
}


def _matches_pattern(pattern: str, value: str) -> bool:
    """Match as IAM does: only `*` and `?` are special."""
    return _compile_pattern(str(pattern)).match(value) is not None


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
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
