"""Where the entry scripts lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2]


def entrypoints_folder() -> Path:
    """Beside the package in a checkout and in a job, inside it when installed."""
    inside = PACKAGE / "entrypoints"
    return inside if inside.is_dir() else PACKAGE.parent / "entrypoints"


EXTRAS = {
    "data.filters": "filters",
    "data.near_duplicates": "near",
    "data.pii": "pii",
    "data.format: mediawiki": "wiki",
    "data.path: hf://": "hub",
}
"""Every need, and the extra of smtrain that holds its packages."""
WORDS = {need: f"prepare+{extra}" for need, extra in EXTRAS.items()}
"""How requirements.txt spells each."""
_DUMP = re.compile(r"\.xml(\.\w+)?$", re.IGNORECASE)


def data_needs(data: Mapping[str, Any]) -> list[str]:
    """The needs of a section `data`, as plain values; text that is a MediaWiki dump is known by the path alone."""
    if data.get("prepared"):
        return []
    named = [data.get("path"), *(source.get("path") for source in data.get("sources") or ())]
    paths = [path for path in named if path]
    asked = {
        "data.filters": data.get("filters"),
        "data.near_duplicates": data.get("near_duplicates") is not None,
        "data.pii": data.get("pii"),
        "data.format: mediawiki": data.get("format") == "mediawiki"
        or (data.get("format", "auto") == "auto" and any(_DUMP.search(path) for path in paths)),
        "data.path: hf://": any(path.startswith("hf://") for path in paths),
    }
    return [need for need in EXTRAS if asked[need]]


def requirements(file: Path, word: str) -> list[str]:
    """The requirements of a pip file that concern a stage, or a need by its word in WORDS.

    A comment behind a requirement names what it is for; without one it concerns every stage.
    """
    text = file.read_text("utf-8").replace("\\\n", " ")
    parts = [line.partition("#") for line in text.splitlines()]
    every = [] if word in WORDS.values() else [word]
    return [line.strip() for line, _, words in parts if line.strip() and word in (words.split() or every)]


def packages(file: Path, need: str) -> list[str]:
    """Names of the packages of a need."""
    return [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requirements(file, WORDS[need])]
