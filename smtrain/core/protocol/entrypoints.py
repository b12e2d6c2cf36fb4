"""The entry scripts, and the packages that a stage needs for the options in `data`.

entrypoints/requirements.txt has a comment after each requirement: the stages or options that need
it. Standard library only, as the launcher reads it before anything is installed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2]


def entrypoints_folder() -> Path:
    """The folder next to the package in a checkout and in a job, inside it when installed."""
    installed_folder = PACKAGE / "entrypoints"
    return installed_folder if installed_folder.is_dir() else PACKAGE.parent / "entrypoints"


GRAPHS, GRAPHS_FOLDER = "SMTRAIN_GRAPHS", "SMTRAIN_GRAPHS_FOLDER"
"""Variables of a job of engine native on Neuron cores: the place that keeps compiled graphs between
jobs, and the folder of a warm pool that keeps them on its machines.
"""

EXTRAS = {
    "data.filters": "filters",
    "data.near_duplicates": "near",
    "data.pii": "pii",
    "data.fix_mojibake": "mojibake",
    "data.language": "language",
    "data.format: mediawiki": "wiki",
    "data.path: hf://": "hub",
    "data.machines": "ray",
    "train.adapter.quantize": "qlora",
    "export: merging into a quantized base": "qlora",
    "generate: an adapter on a quantized base": "qlora",
    "evaluate: an adapter on a quantized base": "qlora",
}
"""Each option that needs more packages, and the extra of smtrain with them."""
_STAGES = {"data": "prepare"}
"""The stage that uses the options of a section, if it has another name."""
WORDS = {
    need: f"{_STAGES.get(section := re.split('[.:]', need)[0], section)}+{extra}"
    for need, extra in EXTRAS.items()
}
"""The word for each in requirements.txt."""
_DUMP = re.compile(r"\.xml(\.\w+)?$", re.IGNORECASE)


def package_needs(
    config: Mapping[str, Any], stages: Collection[str] = ("prepare", "train")
) -> list[str]:
    """The options of a config that need more packages in one of these stages."""
    adapter = (config.get("train") or {}).get("adapter") or {}
    needs = [
        *_data_needs(config.get("data") or {}),
        *(_needs_of_quantized(config.get("export") or {}) if adapter.get("quantize") else []),
    ]
    return [need for need in needs if stage_of(need) in stages]


def _needs_of_quantized(export: Mapping[str, Any]) -> list[str]:
    """The stages that quantise the base again, as an adapter is not used on other weights."""
    uses = ["export: merging into a quantized base"]
    if not export.get("merge"):
        uses = [f"{stage}: an adapter on a quantized base" for stage in ("generate", "evaluate")]
    return ["train.adapter.quantize", *uses]


def stage_of(need: str) -> str:
    """The stage that uses an option of EXTRAS."""
    return WORDS[need].partition("+")[0]


def _data_needs(data: Mapping[str, Any]) -> list[str]:
    """The options of a section `data`; MediaWiki dumps are recognised by their path."""
    if data.get("prepared"):
        return []
    source_paths = [data.get("path"), *(source.get("path") for source in data.get("sources") or ())]
    tests = str((data.get("decontaminate") or {}).get("path"))
    paths = [path for path in source_paths if path]
    uses = {
        "data.filters": data.get("filters"),
        "data.near_duplicates": data.get("near_duplicates") is not None,
        "data.pii": data.get("pii"),
        "data.fix_mojibake": data.get("fix_mojibake"),
        "data.language": data.get("language") is not None,
        "data.format: mediawiki": (
            data.get("format") == "mediawiki"
            or (data.get("format", "auto") == "auto" and any(_DUMP.search(path) for path in paths))
        ),
        "data.path: hf://": any(path.startswith("hf://") for path in [*paths, tests]),
        "data.machines": (data.get("machines") or 1) > 1 or data.get("ray_address"),
    }
    return [need for need, used in uses.items() if used]


def requirements(file: Path, word: str) -> list[str]:
    """The requirements of a pip file for a stage, or for a word in WORDS.

    A requirement without a comment is for every stage.
    """
    text = file.read_text("utf-8").replace("\\\n", " ")
    parts = [line.partition("#") for line in text.splitlines()]
    default_stages = [] if word in WORDS.values() else [word]
    return [
        line.strip()
        for line, _, words in parts
        if line.strip() and word in (words.split() or default_stages)
    ]


def packages(file: Path, need: str) -> list[str]:
    """The packages for an option in EXTRAS."""
    return [re.split(r"[^A-Za-z0-9._-]", line)[0] for line in requirements(file, WORDS[need])]
