"""Facts about instances, images and models as dated rows; each file names its sources."""

from __future__ import annotations

import sys
from functools import cache
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib


@cache
def table(name: str) -> dict[str, Any]:
    """The content of `facts/<name>.toml`."""
    return parse(resources.files("smtrain.core.facts").joinpath(f"{name}.toml").read_text("utf-8"))


def parse(text: str) -> dict[str, Any]:
    """Parse TOML. Raises `ValueError` for other text."""
    return tomllib.loads(text)


def instance(instance_type: str) -> dict[str, Any] | None:
    """The row of a SageMaker instance type; None if unknown."""
    row: dict[str, Any] | None = table("instances")["instances"].get(instance_type)
    return row


def is_known(instance_type: str) -> bool:
    """Whether core/facts/instances.toml has this type, with or without an accelerator."""
    instances, parts = table("instances"), instance_type.split(".")
    on_cpu = len(parts) == 3 and parts[2] in instances["cpu_sizes"].get(parts[1], ())
    return on_cpu or instance_type in instances["instances"]
