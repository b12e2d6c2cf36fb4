"""Suggest the instance type or region that was probably meant."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from smtrain.core.facts import table
from smtrain.core.suggest import nearest


def instance_meant(word: str) -> str | None:
    """The known instance type for a word: without `ml.`, misspelled, or the name of its chip."""
    facts = table("instances")
    rows, plain = facts["instances"], word.strip().lower()
    instance_types = [*rows, *facts["cpu"]]
    for candidate in (plain, f"ml.{plain}"):
        if candidate in instance_types:
            return str(candidate)
    chips: dict[str, str] = {str(row.get("chip", "")).lower(): kind for kind, row in rows.items()}
    chips |= {
        "trainium": "ml.trn1.32xlarge",
        "trainium1": "ml.trn1.32xlarge",
        "trainium2": "ml.trn2.48xlarge",
    }
    if plain.removeprefix("ml.").startswith(
        ("trn3", "trainium3")
    ):  # named by UltraServer, as EC2 has no name for it
        return "trn3-gen2" if "gen2" in plain else "trn3-gen1"
    if chip := next(
        (
            candidate
            for candidate in (plain, plain.rpartition(":")[0], plain.replace("nvidia-", ""))
            if candidate in chips
        ),
        "",
    ):
        return chips[chip]
    if family := [kind for kind in rows if kind.startswith((f"{plain}.", f"ml.{plain}."))]:
        return str(family[-1])
    return nearest(plain if plain.startswith("ml.") else f"ml.{plain}", instance_types, cutoff=0.85)


def region_meant(word: str) -> str | None:
    """The region for a word such as `us-west2`, `us-west-2a` or `uswest2`."""
    images = table("images")
    regions = {*images["accounts"], *images["default_regions"]}
    regions_by_letters: dict[str, str] = {name.replace("-", ""): name for name in sorted(regions)}
    plain = word.strip().lower().replace("-", "").replace("_", "").replace(" ", "")
    for candidate in (plain, plain[:-1]):
        if candidate in regions_by_letters:
            return regions_by_letters[candidate]
    suggestion = nearest(plain, regions_by_letters, cutoff=0.75)
    return regions_by_letters[suggestion] if suggestion else None


def positions(uri: str) -> int | None:
    """The longest sequence of a model on the hub (`hf://organization/model[@revision]`) as
    published; None if unknown.
    """
    source = f"config.json of {uri.removeprefix('hf://').partition('@')[0]}".lower()
    for row in table("models")["models"].values():
        if uri.startswith("hf://") and row["source"].lower() == source:
            count: int | None = row.get("positions")
            return count
    return None


def is_gated(uri: str, *, data: bool = False) -> bool:
    """Whether a model or data set on the Hugging Face hub is known to need a token."""
    if not uri.startswith("hf://"):
        return False
    name = re.split("[@#:]", uri.removeprefix("hf://"), maxsplit=1)[0].lower()
    return any(
        fnmatchcase(name, pattern) for pattern in table("gated")["data" if data else "models"]
    )
