"""The kind of hosts of a local job, in a tag of its request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smtrain.core.files import home

TAG = "smtrain:local"
"""Its value is `run_in=docker memory=8g cpus=2`; a request without it gets the control plane's
settings.
"""
RUN_IN = ("sandbox", "docker", "auto")


@dataclass(frozen=True)
class LocalHosts:
    """The kind and limits of a host; by default a sandbox without limits.

    `memory` is bytes as Docker writes them (`512m`, `8g`) or `instance`, `cpus` a number of cores,
    `image` replaces a request's.
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
    return LocalHosts(
        **{
            key: text
            for key, equals, text in pairs
            if equals and key in ("run_in", "memory", "cpus")
        }
    )


def note(origins: Mapping[str, str]) -> None:
    """Record the path or demo:// URI that each s3:// prefix was uploaded from; the last record
    counts.
    """
    recorded_origins = read_origins()
    lines = [
        json.dumps({uri: path})
        for uri, path in origins.items()
        if recorded_origins.get(uri) != path
    ]
    if lines:
        with _file().open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))


def read_origins() -> dict[str, str]:
    """The recorded paths by s3:// prefix."""
    origins: dict[str, str] = {}
    try:
        lines = _file().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    for line in lines:
        with suppress(ValueError, TypeError):  # a line that another process is still writing
            origins |= {str(uri): str(path) for uri, path in dict(json.loads(line)).items()}
    return origins


def _file() -> Path:
    return home() / "origins.jsonl"
