"""Facts about the world as dated rows: instances and images. Each file says where its numbers come from."""

from __future__ import annotations

import sys
from functools import cache
from importlib import resources
from typing import Any

from smtrain.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib


@cache
def table(name: str) -> dict[str, Any]:
    """The content of `facts/<name>.toml`."""
    return parse(resources.files("smtrain.facts").joinpath(f"{name}.toml").read_text("utf-8"))


def parse(text: str) -> dict[str, Any]:
    """TOML as a mapping. Raises `ValueError` where it is none."""
    return tomllib.loads(text)


def instance(instance_type: str) -> dict[str, Any] | None:
    """The row of a SageMaker instance type, or None where no row is known."""
    row: dict[str, Any] | None = table("instances")["instances"].get(instance_type)
    return row


def image_uri(region: str, tag: str | None = None) -> str:
    """The Neuron training image of a region; `tag` defaults to the newest that still ships neuronx-distributed.

    Raises `ConfigError` for a region whose registry account is not known.
    """
    images = table("images")
    account = images["accounts"].get(region, images["default_account"])
    if region not in images["accounts"] and region not in images["default_regions"]:
        raise ConfigError([f"compute.region: no Neuron image registry is known for {region!r}; set compute.image"])
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"{account}.dkr.ecr.{region}.{suffix}/{images['repository']}:{tag or images['default_tag']}"
