"""`smtrain help [TOPIC]`: pages of the documentation, which the wheel brings, in the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from smtrain.cli import COMMANDS, options
from smtrain.core.errors import SmtrainError
from smtrain.core.suggest import nearest
from smtrain.core.text import align_columns, say

app = options.app()
_PACKAGE = Path(__file__).resolve().parents[1]
_SECTIONS = ("Tutorial", "How to", "Reference")
"""Sections of index.md whose pages are topics; the rest is for maintainers."""
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([\w/.-]*\.md)?(#[\w.-]+)?\)")
_TAB = re.compile(r'=== "(.*)"')
_NOT_FOR_TERMINALS = re.compile(r"!\[[^\]]*\]\([^)]*\)\n*|</?a\b[^>]*>|\s*\{#[\w.-]+\}")


@app.command("help")
def help_(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="A page, or a command.")
    ] = None,
) -> None:
    """Show a page of the documentation, or the options of a command; without a topic, list the
    pages.

    $ smtrain help slurm  # a cluster, with a whole config
    $ smtrain help  # all pages, by their titles
    """
    if topic is None:
        _list_topics()
        return
    name = topic.strip().lower().removesuffix(".md").rpartition("/")[2]
    if page := pages().get(name):
        _show(page.read_text("utf-8"))
    elif name in COMMANDS:
        import_module(COMMANDS[name][0]).app(["--help"], prog_name=f"smtrain {name}")
    else:
        meant = nearest(name, [*pages(), *COMMANDS])
        hint = f"did you mean `smtrain help {meant}`?" if meant else "`smtrain help` lists them"
        raise SmtrainError(f"there is no page {topic!r}; {hint}")


def folder() -> Path:
    """The folder of the pages: inside the package when installed, next to it in a checkout."""
    installed_folder = _PACKAGE / "manual"
    return installed_folder if installed_folder.is_dir() else _PACKAGE.parent / "docs"


def pages() -> dict[str, Path]:
    """The pages by topic: the last part of their names."""
    return {
        file.stem: file
        for file in sorted([*folder().glob("*.md"), folder() / "reference/config.md"])
    }


def topics() -> Iterator[tuple[str, str, str]]:
    """(section, topic, title) of each page for users, in the order of index.md."""
    section = ""
    for line in (folder() / "index.md").read_text("utf-8").splitlines():
        if line.startswith("#"):
            level, _, title = line.partition(" ")
            section = title if title in _SECTIONS or (section and level == "###") else ""
        elif section:
            yield from (
                (section, page.stem, _title(page))
                for _, file, _ in _LINK.findall(line)
                if (page := pages().get(Path(file).stem))
            )


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next(lines).removeprefix("# ").strip()


def _list_topics() -> None:
    listed_topics, section_before = set[str](), ""
    rows: list[tuple[str, ...]] = []
    for section, topic, title in topics():
        if section != section_before:
            rows.append((section, ""))
            section_before = section
        if topic not in listed_topics:
            rows.append((f"  {topic}", title))
            listed_topics.add(topic)
    for line in align_columns(rows):
        say(line)
    say("\n`smtrain help TOPIC` shows a page.")


def _show(page: str) -> None:
    text = _LINK.sub(_reference, _NOT_FOR_TERMINALS.sub("", _without_tabs(page)))
    if not sys.stdout.isatty():
        say(text.rstrip(), raw=True)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text))


def _without_tabs(page: str) -> str:
    """The page with the site's tabs below each other: their titles bold, their text not indented."""
    lines, in_tab = [], False
    for line in page.splitlines():
        if title := _TAB.fullmatch(line):
            lines.append(f"**{title[1]}**")
            in_tab = True
            continue
        in_tab = in_tab and line[:4].strip() == ""
        lines.append(line[4:] if in_tab else line)
    return "\n".join(lines)


def _reference(link: re.Match[str]) -> str:
    """A link as text, with the command that shows its page."""
    text, file, _ = link.groups()
    topic = Path(file).stem if file else ""
    return f"{text} (`smtrain help {topic}`)" if topic in pages() else text
