"""Help of every command: examples that its parser accepts, groups instead of long lists, no heavy
import.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import typer

from smtrain.cli import COMMANDS
from smtrain.cli import EXAMPLES as BEGIN
from smtrain.cli.help import fold_command
from tests.typed import typed

MANY = 8
"""Longest list of options without groups."""


def made(name: str) -> Any:
    """A command as a click object."""
    return typer.main.get_command(import_module(COMMANDS[name][0]).app)


def every() -> Iterator[tuple[str, Any]]:
    """All commands and subcommands."""
    for name in COMMANDS:
        command = made(name)
        yield name, command
        yield from (
            (f"{name} {own}", inner) for own, inner in getattr(command, "commands", {}).items()
        )


ALL = dict(every())
EXAMPLES: dict[str, list[tuple[str, str]]] = {
    path: command.examples for path, command in ALL.items()
}
GROUPS = {path: command.groups for path, command in ALL.items() if getattr(command, "groups", None)}


def words_of(command: str) -> list[str]:
    """The words after `smtrain`, without the redirection."""
    words = shlex.split(command)
    assert words[0] == "smtrain"
    return words[1 : words.index(">") if ">" in words else None]


def parsed(words: list[str]) -> str:
    """Parse a command line without running it; return the command's path."""
    name, *rest = words
    command, path = made(name), name
    if hasattr(command, "commands"):
        command, path, rest = command.commands[rest[0]], f"{name} {rest[0]}", rest[1:]
    command.make_context(path, rest)
    return path


def test_every_command_has_one_or_two_examples() -> None:
    assert {
        path: len(examples) for path, examples in EXAMPLES.items() if len(examples) not in (1, 2)
    } == {}


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_is_a_command_line_that_its_parser_takes(path: str) -> None:
    for command, what_for in EXAMPLES[path]:
        called = parsed(words_of(command))
        assert called == path or called.startswith(f"{path} "), command
        assert what_for


def test_the_help_of_smtrain_itself_shows_how_to_begin() -> None:
    text = typed("--help").stdout
    for command, what_for in BEGIN:
        assert f"\n  # {what_for}\n  {command}\n" in text
        assert parsed(words_of(command)) == command.split()[1]


def test_an_option_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parsed(words_of("smtrain plan run.yaml --bset"))


@pytest.mark.parametrize("path", ALL)
def test_help_shows_the_examples_and_fits_80_columns(path: str) -> None:
    text = typed(*path.split(), "--help", COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    whole = " ".join(re.sub(r" \\\n\s*", " ", text).split())
    for command, what_for in EXAMPLES[path]:
        assert f"# {what_for} {command}" in whole
    assert "..." not in text.partition("\nCommands:\n")[2].partition("\nExamples:\n")[0], (
        "a sentence is cut short"
    )
    assert not re.search(r"\w-\n", text), "a word is cut at its hyphen"
    assert not re.search(r"<list\[| range>|\.\.\.[\]}]?\.\.\.", text)
    about = text.split("\n\n")[1]
    assert about.startswith("  "), "it does not say what the command is for"


def test_a_long_list_of_options_is_in_groups_without_one_left_over() -> None:
    for path, command in ALL.items():
        options = [
            param
            for param in command.params
            if param.param_type_name == "option" and not param.hidden
        ]
        options = [param for param in options if not getattr(param, "rich_help_panel", None)]
        names = [next(name for name in param.opts if name.startswith("--")) for param in options]
        listed = [option for group in GROUPS.get(path, {}).values() for option in group.split()]
        if len(options) > MANY or listed:
            assert sorted(listed) == sorted(set(names) - {"--help"}), (
                f"{path}: `groups` of its decorator"
            )
            assert all(len(group.split()) <= MANY for group in GROUPS[path].values()), path


def test_the_headings_stand_in_the_help() -> None:
    text = typed("run", "--help").stdout
    places = [text.index(f"\n{heading}:\n") for heading in GROUPS["run"]]
    assert places == sorted(places)
    assert (
        text.index("--from-step")
        < text.index("Look first, start nothing:")
        < text.index("--dry-run")
    )
    assert text.index("Other options:") < text.index("--help  ") < text.index("Examples:")


def test_a_folded_command_is_the_same_command() -> None:
    command = (
        "smtrain data prepare 'crawl of 2025/*.jsonl' tokens --model demo://smollm2 --text-column"
        " content"
    )
    lines = fold_command(command, 40, "  ")
    assert len(lines) > 2
    assert shlex.split(" ".join(line.removesuffix("\\") for line in lines)) == shlex.split(command)
    assert all(not line.rstrip(" \\").endswith(("--model", "--text-column")) for line in lines)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom importlib import import_module\nimport typer\nfrom smtrain.cli import"
        " COMMANDS\nfor name, (module, _) in COMMANDS.items():\n    command ="
        " typer.main.get_command(import_module(module).app)\n   "
        " command.get_help(command.context_class(command, info_name=name))\nheavy = {'torch',"
        " 'transformers', 'datasets', 'numpy', 'boto3', 'sagemaker', 'matplotlib', 'moto'}\nassert"
        " not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
