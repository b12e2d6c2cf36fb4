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
