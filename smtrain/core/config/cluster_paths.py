"""Paths of a config that lie on a Slurm cluster and not on the laptop that reads the config."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

SCHEME = "file://"
"""Of a path on the cluster, as it is written in a config that was read, or by hand."""


def readable_schemes(target: str) -> tuple[str, ...]:
    """What the URI of an input may begin with, beside those of AWS."""
    return (SCHEME,) if target == "slurm" else ()


def place_on_cluster(raw: dict[str, Any], places: list[tuple[Any, str]]) -> None:
    """Where a cluster is reached by ssh, make file:// of absolute paths that are not on this machine.

    `places` are sections, and the key of each that holds a path. Whether the path is there is for the cluster to say.
    """
    cluster = raw.get("cluster")
    if raw.get("target") != "slurm" or not isinstance(cluster, dict) or not cluster.get("host"):
        return
    for given, field in places:
        value = given.get(field) if isinstance(given, dict) else None
        if not (isinstance(given, dict) and isinstance(value, str) and value.startswith("/")):
            continue
        if not glob.has_magic(value) and not Path(value).exists():
            given[field] = SCHEME + value.rstrip("/")
