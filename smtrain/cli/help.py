"""Help of the commands: examples, options in groups, and lines that fit the terminal.

`options.app` makes commands of the classes below. Examples stand at the end of a command's
docstring, each with its
purpose: `$ smtrain stop my-run  # save a checkpoint, then stop`. Headings of options are an argument of its decorator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

_NO_LIMIT = 1000  # characters, longer than any first sentence
_WORD = r"(?:'[^']*'|\S)+"
_HYPHEN = "\u2011"  # click breaks a line after any other, also inside `max-model-len`


class WithExamples:
    """The examples of a docstring, each a command and its purpose, at the end of the help."""

    help: str | None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        description, *examples = re.split(r"\s+\$ (?=smtrain )", self.help or "")
        self.help = description or None
        self.examples = [
            tuple(part.strip() for part in example.split("# ", 1)) for example in examples
        ]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        if not self.examples:
            return
        with formatter.section("Examples"):
            for command, purpose in self.examples:
                indent = " " * formatter.current_indent
                formatter.write_text(f"# {purpose}")
                formatter.write(
                    "".join(f"{line}\n" for line in fold_command(command, formatter.width, indent))
                )


class Helped(WithExamples, TyperCommand):
    """A command whose help has examples and groups."""

    groups: Mapping[str, str] = {}
    """Options, as words, by the heading that they are listed below."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line, without redundant brackets."""
        return [_plain_word(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options: those of `groups` by heading, the rest below `Other
        options`.
        """
        heading = {
            option: title for title, options in self.groups.items() for option in options.split()
        }
        default_title = "Other options" if self.groups else "Options"
        rows: dict[str, list[tuple[str, str]]] = {
            title: [] for title in ("Arguments", *self.groups, default_title)
        }
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and param.param_type_name == "argument":
                rows["Arguments"].append(_plain_argument(*record))
            elif record is not None:
                panel = getattr(param, "rich_help_panel", None) or default_title
                title = next((heading[option] for option in param.opts if option in heading), panel)
                rows.setdefault(title, []).append((_plain_type(record[0]), record[1]))
        for title, records in rows.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(
                        [(name, text.replace("-", _HYPHEN)) for name, text in records]
                    )
        formatter.buffer[:] = [text.replace(_HYPHEN, "-") for text in formatter.buffer]


class HelpedGroup(WithExamples, TyperGroup):
    """A command with subcommands, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a row for each command; the text is wrapped, not cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            visible_commands = [
                (name, command) for name, command in commands if command and not command.hidden
            ]
            formatter.write_dl(
                [
                    (name, command.get_short_help_str(_NO_LIMIT))
                    for name, command in visible_commands
                ]
            )


def fold_command(command: str, width: int, indent: str) -> list[str]:
    """A command line in lines of `width` characters, an option next to its value, with a backslash
    at each fold.
    """
    lines, line = [], ""
    for word in re.findall(rf"--?\S+ (?!-){_WORD}|{_WORD}", command):
        if line and len(indent) + len(line) + len(word) + 3 > width:
            lines.append(f"{indent}{line} \\")
            line = f"  {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*lines, f"{indent}{line}"]


def _plain_word(piece: str) -> str:
    """`{CONFIG}` as CONFIG, and no second `...` after a name that has one."""
    piece = re.sub(r"\.\.\.([\]}])\.\.\.$", r"...\1", piece)
    return piece[1:-1] if re.fullmatch(r"\{[^{}|]*\}", piece) else piece


def _plain_type(record: str) -> str:
    """An option's name and type as a user would say it: a range is an int, a list takes one value
    at a time.
    """
    return re.sub(r"<list\[(\w+)\]>", r"<\1>", record).replace(" range>", ">")


def _plain_argument(name: str, text: str) -> tuple[str, str]:
    """An argument's name without its type; the usage line says whether it is required."""
    return re.sub(r" <[^>]*>$", "", name), text.removesuffix("[required]").rstrip()
