"""`smtrain help`: the pages of the documentation in a terminal, and what messages name of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import smtrain
from smtrain.cli import manual

PACKAGE = Path(smtrain.__file__).parent


def test_every_page_of_the_index_is_a_topic_with_its_title(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = list(manual.topics())
    assert {"data", "sft", "dpo", "lora", "slurm", "gpus", "config"} <= {row[1] for row in rows}
    assert ("Start it", "slurm", "A Slurm cluster") in rows
    assert not any("architecture" in row for row in rows), "maintainers read the site"
    manual.help_(None)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "Tutorial"
    assert any(re.fullmatch(r"  slurm +A Slurm cluster", line) for line in printed)


def test_a_page_names_commands_in_place_of_links_and_has_no_html(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for topic in manual.pages():
        manual.help_(topic)
        page = re.sub(r"```.*?```|`[^`]*`", "", capsys.readouterr().out, flags=re.DOTALL)
        assert not re.search(r"\]\([\w/-]+\.md|<a id|!\[|\n=== ", page), topic


def test_every_page_that_a_message_names_is_a_topic() -> None:
    named = {
        topic
        for file in PACKAGE.rglob("*.py")
        for topic in re.findall(r"smtrain help ([a-z][\w-]*)", file.read_text("utf-8"))
    }
    assert len(named) > 10
    assert named <= {*manual.pages(), "lists"}
