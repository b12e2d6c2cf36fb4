"""A secret by its name: what a config may say of one."""

from __future__ import annotations

from smtrain.core.config.section import Section


class Secret(Section):
    """A secret by its name; the container reads it with the job's role, and it is in no request, log or file."""

    secret: str | None = None
    """Name or ARN in Secrets Manager."""
    ssm: str | None = None
    """Name or ARN of an SSM parameter."""
    key: str | None = None
    """The field to take where the secret is a JSON object."""
