"""What the hosts of a local job are: the words of the tag by which a request tells the control plane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

TAG = "smtrain:local"
"""Its value is `run_in=docker memory=8g cpus=2`; a request without it gets what the control plane is set to."""
RUN_IN = ("sandbox", "docker", "auto")


@dataclass(frozen=True)
class LocalHosts:
    """How a host is made. `memory` is bytes as Docker writes them (`512m`, `8g`) or `instance`, `cpus` a number of
    cores, `image` what runs in place of a request's; empty means none of these, and the sandbox."""

    run_in: str = ""
    memory: str = ""
    cpus: str = ""
    image: str = ""

    def write(self) -> str:
        """The tag's value; empty where nothing differs from the default."""
        return " ".join(f"{key}={value}" for key, value in vars(self).items() if value)


def read(tags: Iterable[Mapping[str, str]]) -> LocalHosts:
    """What a request's tags ask for; words that are not known are left out."""
    value = next((tag.get("Value", "") for tag in tags if tag["Key"] == TAG), "")
    pairs = (part.partition("=") for part in value.split())
    return LocalHosts(**{key: text for key, equals, text in pairs if equals and key in ("run_in", "memory", "cpus")})
