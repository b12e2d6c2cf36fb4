"""The site builds without warnings, and every page is at most two clicks from the index, also
without navigation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

import smtrain
from tests.docs.pages import ROOT, pages

CLICKS = 2


class Article(HTMLParser):
    """Links in the text of a page, without those of the navigation, the header and the footer."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inside, self.links = 0, set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside += tag == "article"
        address = dict(attrs).get("href") or ""
        if self.inside and tag == "a" and not urlsplit(address).scheme:
            self.links.add(urlsplit(address).path)

    def handle_endtag(self, tag: str) -> None:
        self.inside -= tag == "article"


def clicks(begin: Path, links: Callable[[Path], Iterable[Path]]) -> dict[Path, int]:
    """Number of clicks from the first page to each page, with the links of a page from `links`."""
    distances, last = {begin: 0}, [begin]
    while last:
        near = {page for one in last for page in links(one)} - distances.keys()
        distances |= dict.fromkeys(near, distances[last[0]] + 1)
        last = sorted(near)
    return distances


def on_site(page: Path) -> list[Path]:
    """Pages of the site that a page's text leads to."""
    targets = [
        (page.parent / link).resolve() for link in Article(page.read_text("utf-8")).links if link
    ]
    return [target / "index.html" for target in targets if (target / "index.html").is_file()]


def in_markdown(page: Path) -> list[Path]:
    """Pages that a page links to in its Markdown, as on a code host."""
    links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text("utf-8"))
    return [(page.parent / link).resolve() for link in links if "://" not in link]


def far(distances: dict[Path, int], pages: Iterable[Path]) -> list[str]:
    """Pages that are not reached, or by too many clicks."""
    return [
        f"{page}: {distances.get(page, 'no way')}"
        for page in pages
        if distances.get(page, CLICKS + 1) > CLICKS
    ]


@pytest.fixture(scope="module")
def built(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site's folder, and the result of building it."""
    site = tmp_path_factory.mktemp("docs").resolve() / "site"
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "-q",
            "-f",
            str(ROOT / "mkdocs.yml"),
            "-d",
            str(site),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    return site, built


def test_the_site_builds_without_a_warning(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    site, result = built
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert (site / "index.html").is_file()
    assert (site / "planner/index.html").is_file()
    # The reference is built from docstrings, and the search of the site finds their text.
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))["docs"]
    texts = {entry["location"]: entry["text"] for entry in index}
    assert "more US dollars than this" in texts["api/before/#smtrain.plan"]
    # Inherited members are included.
    assert "api/running/#smtrain.Job.status" in texts
    assert {f"#smtrain.{name}" for name in smtrain.__all__} <= {
        place[place.find("#") :] for place in texts
    }


def test_every_page_of_the_site_is_within_two_clicks_of_the_index_by_links_in_the_text(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    site, _ = built
    every = set(site.rglob("index.html"))
    assert len(every) == len(pages()), "each page is on the site"
    assert far(clicks(site / "index.html", on_site), every) == []


def test_every_page_is_within_two_clicks_of_the_index_where_markdown_is_shown() -> None:
    assert far(clicks(ROOT / "docs/index.md", in_markdown), pages()) == []


def test_a_page_that_only_the_navigation_names_is_found(tmp_path: Path) -> None:
    texts = {
        "index.html": (
            '<nav><a href="c/">C</a></nav><article><a href="a/#x">A</a> <a'
            ' href="https://b.org">B</a></article>'
        ),
        "a/index.html": '<article><a href="../b/">B</a></article>',
        "b/index.html": '<article><a href="../d/">D</a></article>',
        "c/index.html": "",
        "d/index.html": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    every = [tmp_path / name for name in texts]
    missing = far(clicks(tmp_path / "index.html", on_site), every)
    assert missing == [f"{tmp_path}/c/index.html: no way", f"{tmp_path}/d/index.html: 3"]


def test_every_page_is_in_the_navigation() -> None:
    def files(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [
            file
            for part in (entry.values() if isinstance(entry, dict) else entry)
            for file in files(part)
        ]

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in pages())


def test_the_site_uses_no_more_than_what_is_to_build_it_next_reads() -> None:
    """docs/decisions/0014-site-after-material.md."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    named = {
        plugin if isinstance(plugin, str) else next(iter(plugin)) for plugin in config["plugins"]
    }
    assert named == {"search", "mkdocstrings"}
    assert config["hooks"] == ["scripts/docs_version.py"], "another hook would be silently ignored"
    assert "custom_dir" not in config["theme"]


def test_every_file_that_a_page_leads_to_is_there() -> None:
    for page in pages():
        for file in re.findall(r"\]\(([^)#\s:]+\.\w+)\)", page.read_text("utf-8")):
            assert (page.parent / file).is_file(), f"{page.name}: there is no {file}"


def test_every_table_has_a_head() -> None:
    for page in [*pages(), ROOT / "README.md"]:
        lines = page.read_text("utf-8").splitlines()
        empty = [
            number for number, line in enumerate(lines, 1) if re.fullmatch(r"\|(\s*\|)+\s*", line)
        ]
        assert not empty, f"{page.name}: a table without a head in line {empty}"


def test_every_picture_is_there_and_says_what_it_shows() -> None:
    shown = 0
    for page in [*pages(), ROOT / "README.md"]:
        for words, file in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", page.read_text("utf-8")):
            assert len(words) > 10, f"{page.name}: {file} has no text for readers who cannot see it"
            assert (page.parent / file).is_file(), f"{page.name}: there is no {file}"
            shown += 1
    assert shown >= 3


def test_the_tested_commit_of_neuronx_distributed_is_one_everywhere() -> None:
    page, script = (
        (ROOT / name).read_text("utf-8")
        for name in ("docs/nxd-tests.md", "scripts/nxd-environment")
    )
    (commit,) = set(re.findall(r"\b[0-9a-f]{40}\b", page))
    assert f"tested={commit}\n" in script
    short = set(re.findall(r"commit ([0-9a-f]{7})\b", page + script))
    assert short == {commit[:7]}
