"""The section `notify`: who is told when a run ends."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from smtrain.core.config.section import Section

Occasion = Literal["finished", "failed", "stopped"]


class Notify(Section):
    """Who is told when a run has finished, or when one of its jobs failed or was stopped."""

    on: tuple[Occasion, ...] = Field(("finished", "failed", "stopped"), min_length=1)
    """When."""
    sns: str | None = Field(None, pattern=r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256}$")
    """ARN of an SNS topic, on AWS: an EventBridge rule sends the jobs' changes of state there, whoever follows."""
    webhook_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of an environment variable that holds the URL to which the following command posts JSON."""
    command: tuple[str, ...] = ()
    """A command that the following command starts, with the event as JSON on its standard input."""
