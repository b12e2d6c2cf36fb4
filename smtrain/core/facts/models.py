"""Facts about published models that need no files of theirs."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from smtrain.core.facts import table


def positions(uri: str) -> int | None:
    """The longest sequence of a model on the hub (`hf://organization/model[@revision]`) as published; None if
    unknown."""
    source = f"config.json of {uri.removeprefix('hf://').partition('@')[0]}".lower()
    for row in table("models")["models"].values():
        if uri.startswith("hf://") and row["source"].lower() == source:
            found: int | None = row.get("positions")
            return found
    return None


def is_gated(uri: str, *, data: bool = False) -> bool:
    """Whether a model or data set on the Hugging Face hub is known to need a token."""
    if not uri.startswith("hf://"):
        return False
    name = re.split("[@#:]", uri.removeprefix("hf://"), maxsplit=1)[0].lower()
    return any(fnmatchcase(name, pattern) for pattern in table("gated")["data" if data else "models"])
