"""The kind of hosts of a local job, in a tag of its request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TAG = "smtrain:local"
"""Its value is `run_in=docker memory=8g cpus=2`; a request without it gets the control plane's settings."""
RUN_IN = ("sandbox", "docker", "auto")


@dataclass(frozen=True)
class LocalHosts:
    """The kind and limits of a host; by default a sandbox without limits.

    `memory` is bytes as Docker writes them (`512m`, `8g`) or `instance`, `cpus` a number of cores, `image` replaces a
    request's.
    """

    run_in: str = ""
    memory: str = ""
    cpus: str = ""
    image: str = ""

    def write(self) -> str:
        """The tag's value; empty if nothing differs from the default."""
        return " ".join(f"{key}={value}" for key, value in vars(self).items() if value)


def read(tags: Iterable[Mapping[str, str]]) -> LocalHosts:
    """The hosts that a request's tags ask for; unknown words are ignored."""
    value = next((tag.get("Value", "") for tag in tags if tag["Key"] == TAG), "")
    pairs = (part.partition("=") for part in value.split())
    return LocalHosts(**{key: text for key, equals, text in pairs if equals and key in ("run_in", "memory", "cpus")})
