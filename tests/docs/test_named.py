"""The pages name everything in the code, the index links to all pages, and smtrain has nothing that
scope.md excludes.

Each test was seen to fail: with a page missing in the index, one more command, stage, target,
objective or family in the code, and a row of scope.md about something that smtrain does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import smtrain
from smtrain.cli import COMMANDS
from smtrain.core.config.training import Train
from smtrain.core.model.families import FAMILIES
from smtrain.core.targets import TargetName
from smtrain.stages import STAGES
from tests.docs.pages import ROOT, blocks, pages
from tests.typed import typed

DOCS = ROOT / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text("utf-8")


def rows(text: str, heading: str = "") -> list[list[str]]:
    """The cells of a page's first table below a heading."""
    below = text.partition(f"\n## {heading}\n")[2] if heading else text
    lines = [line for line in below.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def links(page: Path) -> set[str]:
    """Pages that a page leads to, relative to docs/."""
    addresses = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text("utf-8"))
    return {
        (page.parent / link).resolve().relative_to(DOCS).as_posix()
        for link in addresses
        if "://" not in link
    }


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and subcommand, as typed."""
    for name, (module, _) in COMMANDS.items():
        made = typer.main.get_command(import_module(module).app)
        inner = getattr(made, "commands", {})
        yield from ((f"{name} {own}", command) for own, command in inner.items())
        if not inner:
            yield name, made


@pytest.mark.parametrize(
    ("heading", "named"),
    [
        ("Stages", set(STAGES)),
        ("Targets", set(get_args(TargetName))),
        ("Objectives", set(get_args(Train.model_fields["objective"].annotation))),
        ("Families", set(FAMILIES)),
        ("Commands", {name for name, _ in commands()}),
    ],
)
def test_the_glossary_names_all_there_is_and_no_more(heading: str, named: set[str]) -> None:
    words = [word for row in rows(GLOSSARY, heading) for word in row[0].split(", ")]
    assert sorted(words) == sorted(named)
    assert all(row[1] for row in rows(GLOSSARY, heading))


def test_the_page_that_the_glossary_names_for_a_command_has_it() -> None:
    for cells in rows(GLOSSARY, "Commands"):
        page = re.search(r"\]\(([^)#]+\.md)", cells[1])
        assert page, cells
        text = (DOCS / page[1]).read_text("utf-8")
        for command in cells[0].split(", "):
            assert re.search(rf"smtrain {command}\b", text), (
                f"{page[1]} does not have `smtrain {command}`"
            )


def test_the_help_of_a_group_names_its_commands() -> None:
    for name, _ in commands():
        group, _, own = name.partition(" ")
        assert not own or f"`{own}" in COMMANDS[group][1] or own == "post-install", name


def test_the_words_of_the_glossary_are_in_order() -> None:
    words = [cells[0].lower() for cells in rows(GLOSSARY)]
    assert words == sorted(words)
    assert len(set(words)) == len(words) > 30


def test_pages_install_smtrain_from_where_it_is() -> None:
    """The name is not ours on the index, so `pip install smtrain` would fetch a stranger's
    package.
    """
    for page in [*pages(), ROOT / "README.md"]:
        for line in re.findall(r"pip install [^`\n]*smtrain[^`\n]*", page.read_text("utf-8")):
            assert re.search(r"smtrain(?:\[[a-z0-9,-]+\])? @ ", line), f"{page.name}: {line}"


def test_the_index_leads_to_every_page() -> None:
    known = {page.relative_to(DOCS).as_posix() for page in pages()}
    parts = {page for page in known if page.endswith("/index.md")}
    below = {
        page
        for page in known
        if any(page.startswith(part.removesuffix("index.md")) for part in parts)
    }
    assert known - {"index.md"} - (below - parts) <= links(DOCS / "index.md")
    for part in parts:
        folder = part.removesuffix("index.md")
        assert {page for page in below if page.startswith(folder)} - {part} <= links(DOCS / part), (
            part
        )


PLANNED = "examples/llama-2-70b-trn1.yaml"


def test_the_plan_on_its_page_is_the_one_that_the_command_prints() -> None:
    page = DOCS / "planner.md"
    assert f"`smtrain plan {PLANNED}` prints" in page.read_text("utf-8")
    printed = typed("plan", str(ROOT / PLANNED)).stdout.rstrip()
    assert next(block.text for block in blocks(page) if block.tag == "text") == printed, (
        "paste it again"
    )


def test_each_line_of_a_plan_has_a_row_in_the_order_in_which_it_is_printed() -> None:
    printed = typed("plan", str(ROOT / PLANNED)).stdout.splitlines()
    named = [
        cells[0].strip("`")
        for cells in rows(
            (DOCS / "planner-reference.md").read_text("utf-8"), "The output, line by line"
        )
    ]
    explained = [(line, row_of(line, named)) for line in printed[1:] if line]
    assert [line for line, row in explained if row is None] == [], "no row explains it"
    order = [row for _, row in explained if row is not None]
    assert order == sorted(order), "not in the order of the output"
    assert named[0] == "first line"


def row_of(line: str, named: list[str]) -> int | None:
    """The number of the row that explains a line of a plan."""
    if re.match(r"[1-9]\. ", line):
        return named.index("choices")
    for number, name in enumerate(named):
        if (name in line) if name.startswith("$") else line.startswith(name):
            return number
    return None


def words_of(text: str) -> set[str]:
    """The stems of a text's words of three letters and more, without addresses of links."""
    bare = re.sub(r"\]\([^)]*\)", "]", text)
    return {stem(word) for word in re.findall(r"[A-Za-z]{3,}", bare) if word.lower() not in _SMALL}


def stem(word: str) -> str:
    """The rough stem of a word: the same for `register` and `registry`, `filter` and
    `filtering`.
    """
    return re.sub(r"(ies|ing|ion|ers?|s)$", "", word.lower())[:6]


_SMALL = {"and", "the", "for", "with", "you", "your", "other", "than", "of", "across", "into"}


def vocabulary() -> dict[str, str]:
    """Stems of all words for features of smtrain, with the place of each."""
    places: dict[str, str] = {}

    def add(place: str, text: str) -> None:
        places.update(
            dict.fromkeys(words_of(text.replace("_", " ").replace("-", " ")) - places.keys(), place)
        )

    for name, command in commands():
        add(f"smtrain {name}", f"{name} {COMMANDS[name.split()[0]][1]}")
        add(f"the options of smtrain {name}", " ".join(options_of(command)))
    add("smtrain.__all__", " ".join(smtrain.__all__))
    add(
        "the config",
        " ".join(
            keys(json.loads((ROOT / "smtrain/core/config/smtrain.schema.json").read_text("utf-8")))
        ),
    )
    add("a value of the config", " ".join([*get_args(TargetName), *STAGES, *FAMILIES]))
    for page in pages():
        if page.name not in ("scope.md", "users.md") and "decisions" not in page.parts:
            add(page.name, page.read_text("utf-8").partition("\n")[0])
    for cells in rows(GLOSSARY):
        add("the glossary", cells[0])
    return places


def options_of(command: Any) -> Iterator[str]:
    """Long options of a command."""
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--"))


def keys(schema: Any) -> Iterator[str]:
    """Names of keys, and texts that a key may have."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        yield from (value for value in schema.get("enum", ()) if isinstance(value, str))
        for part in schema.values():
            yield from keys(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from keys(part)


def untrue(row: list[str]) -> dict[str, str]:
    """Words of a row of scope.md that smtrain uses, with the place."""
    known = vocabulary()
    return {word: known[word] for word in words_of(row[0]) if word in known}


def test_what_is_not_in_scope_is_nothing_that_smtrain_does() -> None:
    table = rows((DOCS / "scope.md").read_text("utf-8"))
    assert len(table) > 5
    for row in table:
        assert words_of(row[0]), row
        assert untrue(row) == {}, row
        assert row[1], row


@pytest.mark.parametrize(
    "row",
    [
        "crawling, deduplicating across documents, filtering text by quality",
        "choosing hyperparameters for you",
        "serving at scale, a model registry",
        "LoRA",
        "evaluation",
        "SageMaker pipelines",
        "exporting a model",
        "GPUs",
        "instruction data",
        "a chat",
        "Slurm clusters",
        "reports",
        "profiling",
    ],
)
def test_a_row_about_something_that_smtrain_does_is_found(row: str) -> None:
    assert untrue([row, "something else"])
