"""The ARN of the execution role that a config names."""

from __future__ import annotations

import json
from pathlib import Path

from smtrain.client.backends.sagemaker.clients import Clients
from smtrain.core.errors import ConfigError

# The file in which Studio, its spaces and notebook instances describe themselves (SageMaker Developer Guide).
STUDIO = Path("/opt/ml/metadata/resource-metadata.json")


def role_arn(role: str | None, target: Clients) -> str:
    """The ARN of a role given by ARN or name; by default Studio's role, or the local control plane's.

    Raises `ConfigError` if there is no role, or if IAM does not return it.
    """
    role = role or target.default_role() or _of_studio()
    if not role:
        raise ConfigError(["compute.role: is needed on AWS; set the ARN or the name of SageMaker's execution role"])
    if role.startswith("arn:"):
        return role
    if target.name == "local":
        return f"{str(target.default_role()).rpartition('/')[0]}/{role}"
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return str(target.client("iam").get_role(RoleName=role)["Role"]["Arn"])
    except ClientError as error:
        code = error.response["Error"]["Code"]
        raise ConfigError(
            [f"compute.role: IAM did not find the role {role!r} ({code}); correct the name, or give the role's ARN"]
        ) from None
    except BotoCoreError as error:
        why = str(error).rstrip(".")
        raise ConfigError(
            [
                f"compute.role: IAM could not be asked for the ARN of the role {role!r} ({why}); log in (`aws "
                "configure` or `aws sso login`), or give the role's ARN"
            ]
        ) from None


def _of_studio() -> str | None:
    try:
        told = json.loads(STUDIO.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return told.get("ExecutionRoleArn") if isinstance(told, dict) else None
