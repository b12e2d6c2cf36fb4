"""Packages for options of data: known from the config, and the same for the launcher, the image and
pip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smtrain.core.protocol.entrypoints import (
    EXTRAS,
    WORDS,
    entrypoints_folder,
    package_needs,
    packages,
    requirements,
)


@pytest.mark.parametrize(
    ("data", "needs"),
    [
        ({"path": "text/"}, []),
        (
            {
                "path": "text/",
                "filters": [],
                "near_duplicates": None,
                "pii": None,
                "format": "auto",
            },
            [],
        ),
        ({"path": "text/", "filters": ["c4"], "pii": "mask"}, ["data.filters", "data.pii"]),
        ({"path": "text/", "near_duplicates": {}}, ["data.near_duplicates"]),
        ({"path": "text/", "near_duplicates": {"similarity": 0.8}}, ["data.near_duplicates"]),
        ({"path": "text/", "format": "mediawiki"}, ["data.format: mediawiki"]),
        ({"path": "enwiki.xml.bz2"}, ["data.format: mediawiki"]),
        ({"path": "notes.xml", "format": "text"}, []),
        ({"sources": [{"path": "a.txt"}, {"path": "hf://some/set"}]}, ["data.path: hf://"]),
        ({"path": "hf://some/set", "filters": ["c4"], "prepared": "tokens/"}, []),
        ({}, []),
    ],
)
def test_the_config_tells_what_is_needed(data: dict[str, Any], needs: list[str]) -> None:
    assert package_needs({"data": data}) == needs


def test_a_quantised_base_needs_packages_in_the_stages_that_read_it() -> None:
    config = {"data": {"path": "a/", "filters": ["c4"]}, "train": {"adapter": {"quantize": "nf4"}}}
    assert package_needs(config) == ["data.filters", "train.adapter.quantize"]
    assert package_needs(config, ["train"]) == ["train.adapter.quantize"]
    stages = ("train", "export", "generate", "evaluate")
    assert package_needs(config, stages) == [
        "train.adapter.quantize",
        "generate: an adapter on a quantized base",
        "evaluate: an adapter on a quantized base",
    ]
    merged = package_needs(config | {"export": {"merge": True}}, stages)
    assert merged == ["train.adapter.quantize", "export: merging into a quantized base"]
    for adapter in (None, {}, {"quantize": None}):
        assert package_needs({"train": {"adapter": adapter}}) == []


def test_requirements_are_for_a_stage_or_for_a_need(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("always>=1\nsome>=2  # prepare train\nsifting>=3 \\\n  # prepare+filters\n")
    assert requirements(file, "prepare") == ["always>=1", "some>=2"]
    assert requirements(file, WORDS["data.filters"]) == ["sifting>=3"]
    assert packages(file, "data.filters") == ["sifting"]
    assert packages(file, "data.pii") == []


def test_every_need_has_packages() -> None:
    for need in EXTRAS:
        assert packages(entrypoints_folder() / "requirements.txt", need), need
