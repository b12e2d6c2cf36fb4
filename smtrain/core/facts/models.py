"""What is known of published models without their files."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from smtrain.core.facts import table


def positions(uri: str) -> int | None:
    """The longest sequence of a model of the hub (`hf://organization/model`, with a revision or without) as its
    organization published it; None if that is not known."""
    told = f"config.json of {uri.removeprefix('hf://').partition('@')[0]}".lower()
    for row in table("models")["models"].values():
        if uri.startswith("hf://") and row["source"].lower() == told:
            found: int | None = row.get("positions")
            return found
    return None


def is_gated(uri: str, *, data: bool = False) -> bool:
    """True for a model of the Hugging Face hub, or a data set, that is known to be given only to a token."""
    if not uri.startswith("hf://"):
        return False
    name = re.split("[@#:]", uri.removeprefix("hf://"), maxsplit=1)[0].lower()
    return any(fnmatchcase(name, pattern) for pattern in table("gated")["data" if data else "models"])
