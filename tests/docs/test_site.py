"""The docs build as a site, without a warning, and every page is found from its navigation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

import smtrain
from tests.docs.pages import ROOT, pages


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(site)],
        capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    assert (site / "index.html").is_file()
    assert (site / "planner/index.html").is_file()
    # The reference is made from docstrings, and the search of the site finds what it says.
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    found = {entry["location"]: entry["text"] for entry in index}
    assert "so many US dollars" in found["api/before/#smtrain.plan"]
    # What a class inherits is part of it.
    assert "api/running/#smtrain.Job.status" in found
    assert {f"#smtrain.{name}" for name in smtrain.__all__} <= {place[place.find("#") :] for place in found}


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [file for part in (entry.values() if isinstance(entry, dict) else entry) for file in files(part)]

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages())


def test_every_table_has_a_head() -> None:
    for page in [*pages(), ROOT / "README.md"]:
        lines = page.read_text("utf-8").splitlines()
        empty = [number for number, line in enumerate(lines, 1) if re.fullmatch(r"\|(\s*\|)+\s*", line)]
        assert not empty, f"{page.name}: a table without a head in line {empty}"


def test_every_picture_is_there_and_says_what_it_shows() -> None:
    shown = 0
    for page in [*pages(), ROOT / "README.md"]:
        for words, file in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text("utf-8")):
            assert len(words) > 10, f"{page.name}: {file} has no words for those who do not see it"
            assert (page.parent / file).is_file(), f"{page.name}: there is no {file}"
            shown += 1
    assert shown >= 3


def test_the_tested_commit_of_neuronx_distributed_is_one_everywhere() -> None:
    page, script = ((ROOT / name).read_text("utf-8") for name in ("docs/nxd.md", "scripts/nxd-environment"))
    (commit,) = set(re.findall(r"\b[0-9a-f]{40}\b", page))
    assert f"tested={commit}\n" in script
    short = set(re.findall(r"commit ([0-9a-f]{7})\b", page + script))
    assert short == {commit[:7]}
