"""Every module, file and line that pages, docstrings, comments and TOML files name is in the
checkout.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

ROOMS = "core|stages|worker|plane|client|tools|cli"
FILE = re.compile(
    r"(?<![\w/.{}<>~-])((?:smtrain|entrypoints|testing|tests|scripts|docs|"
    + ROOMS
    + r")/[\w/.-]+?\.(?:py|toml|md|txt|json))"
    r"(?![\w/])(?::(\d+))?"
)
MODULE = re.compile(r"(?<![\w/.-])((?:smtrain\.)?(?:" + ROOMS + r")(?:\.\w+)+)(?![\w.(/])")
MADE_UP = (
    "NAME",
    "SECTION",
    "full-runs.json",
    "history.json",
)  # of a recipe; written by a benchmark or a part
ELSEWHERE = (
    "torch_api_compatibility.md",
    "throughput_gpu.toml",
)  # pages of AWS's and NVIDIA's repositories


@cache
def tracked() -> frozenset[str]:
    """All files of the checkout."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    )
    return frozenset(listed.stdout.splitlines())


def sources() -> list[str]:
    """Files whose words are about this checkout; tests have made-up names."""
    return sorted(
        f
        for f in tracked()
        if f.endswith((".py", ".md", ".toml")) and not f.startswith(("tests/", "docs/reviews"))
    )


def wrong(name: str, text: str) -> Iterator[str]:
    """The files, lines and modules that a text names and that do not exist."""
    near = str(Path(name).parent)
    for match in FILE.finditer(text):
        path, line = match.groups()
        found = next(
            (
                p
                for p in (path, f"smtrain/{path}", f"tests/{path}", f"{near}/{path}")
                if p in tracked()
            ),
            None,
        )
        if found is None and not any(word in path for word in (*MADE_UP, *ELSEWHERE)):
            yield path
        elif found and line and int(line) > (ROOT / found).read_text("utf-8").count("\n"):
            yield match[0]
    if name.endswith(".md"):
        for quoted in re.findall(r"`([^`\n]+)`", text):
            yield from (match[1] for match in MODULE.finditer(quoted) if not is_module(match[1]))


def is_module(name: str) -> bool:
    """Return whether a dotted name is a module, or a name in one."""
    parts = name.removeprefix("smtrain.").split(".")
    for count in range(len(parts), 0, -1):
        stem = "/".join(["smtrain", *parts[:count]])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in tracked():
                rest = parts[count:]
                return (
                    not rest
                    or re.search(rf"\b{rest[0]}\b", (ROOT / file).read_text("utf-8")) is not None
                )
    return False


@pytest.mark.parametrize("folder", ["docs", "smtrain", "entrypoints", "testing", "scripts", "."])
def test_each_file_and_module_that_is_named_exists(folder: str) -> None:
    named = [f for f in sources() if f.startswith(f"{folder}/") or (folder == "." and "/" not in f)]
    assert named
    bad = {
        f: found
        for f in named
        if f.rpartition("/")[2] not in ELSEWHERE
        and (found := sorted(set(wrong(f, (ROOT / f).read_text("utf-8")))))
    }
    assert bad == {}


@pytest.mark.parametrize(
    "text",
    [
        "see core/protocol/no.py",
        "see smtrain/core/text.py:100000",
        "by `client.launch.create`",
        "`core.text.nothing`",
    ],
)
def test_a_name_of_nothing_is_found(text: str) -> None:
    assert list(wrong("docs/architecture.md", text))
    assert not list(
        wrong(
            "docs/architecture.md",
            "see core/text.py:1, by `client.launch.submit`, `core.text.say`",
        )
    )
