"""Explain ResourceLimitExceeded: which quota, how much of it is used, and the command that requests
more.
"""

from __future__ import annotations

import re

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.facts.sagemaker import quota_command

_LIMIT = re.compile(
    r"service limit '(?P<name>.+?)' is (?P<limit>[\d.]+) .*?utilization of (?P<used>[\d.]+) "
    r".*?delta of (?P<asked>[\d.]+)"
)


class Refusal:
    """CreateTrainingJob's message, parsed if it has the form that SageMaker has used for years."""

    def __init__(self, target: SageMakerBackend, message: str) -> None:
        self.target, self.message = target, message
        limit = _LIMIT.search(message)
        self.name = limit["name"] if limit else None
        self.limit = float(limit["limit"]) if limit else 0.0
        self.used = float(limit["used"]) if limit else 0.0
        self.requested = float(limit["asked"]) if limit else 0.0

    def short(self) -> str:
        """The quota and its usage."""
        if self.name is None:
            return self.message
        return (
            f"the quota {self.name!r} is {self.limit:g}, {self.used:g} in use, {self.requested:g}"
            " asked for"
        )

    def sentence(self) -> str:
        """The quota, and the remedies."""
        if self.name is None:
            return self.message
        remedies = [f"ask for more: {self.command()}"]
        if self.used and self.requested <= self.limit:
            remedies.append("wait for what is in use with compute.quota_wait")
        if "warm pool" in self.name:
            remedies.append("release a pool (`smtrain pool list`), or set compute.keep_alive to 0")
        return f"{self.short()}; {'; or '.join(remedies)}"

    def command(self) -> str:
        """The AWS command that requests a sufficient quota."""
        code = self._code() or f"CODE (of {self.name!r} in the Service Quotas console)"
        return quota_command(code, self.used + self.requested, self.target.region_name())

    def _code(self) -> str | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            pages = self.target.client("service-quotas").get_paginator("list_service_quotas")
            for page in pages.paginate(ServiceCode="sagemaker"):
                for quota in page["Quotas"]:
                    if quota["QuotaName"] == self.name:
                        return str(quota["QuotaCode"])
        except (BotoCoreError, ClientError):
            pass
        return None
