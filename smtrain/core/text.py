"""Make foreign text safe to show: a job, a log or a service may contain sequences that control a
terminal.

`clean` removes them from text that comes in (every answer of AWS,
`client/backends/sagemaker/backend.py`; every message of our errors, `errors.py`) and again from
text that goes out (`say`, with which every command prints).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Any

from smtrain.core import spinner

_ASCII = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)),
    "…": "~",
    "━": "-",
    "╸": "-",
    "╺": "-",
    "─": "-",
    "±": "~",
}
_PLAINLY = "smtrain.plainly"
Say = Callable[[str], None]
"""A function that shows a sentence to the user."""

# A string sequence (OSC: titles, links, the clipboard; DCS, SOS, PM, APC) with its content; if it
# does not end in its line, only its beginning is removed, so that it cannot hide text. Then CSI,
# and any other escape. Both encodings.
_SEQUENCE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]?"
)
# Control characters except tab and line feed; changes of the writing direction; lone surrogates,
# which have no UTF-8.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_UNSHOWN = re.compile(rf"{_CONTROL.pattern}|[\u2028\u2029]")
_ENDS = re.compile(r"\r+\n|[\u2028\u2029]")
_WORD = re.compile(r"`[^`]*`\S*|\S+")
# The column below which the rest of a wrapped line is indented: its last column if it is far enough
# to the left, or its second, else the text behind a mark.
_COLUMN = re.compile(r" *(?:\S+(?: \S+)*  +|-> +|[-!] +|\d+\. +)?")
_NEXT_COLUMN = re.compile(r"\S+(?: \S+)*  +")
# A command to copy: the terminal wraps it, and copies it without a line break.
_COMMAND_LINE = re.compile(r" *(?:[a-z ]+: +)?(?:\$ |aws |smtrain (?![a-z ]+: )|pip |export )")


# Names of types, models and packages that are pronounced with a vowel first: `Nxd` and `SFT` letter
# by letter.
_VOWEL = re.compile(
    r"(?i:(?!eu|one\b|once)[aeio]|u(?=[bdfgklmnprst]{2})|hf|h(?=our)|[mn](?=[bcdfghjklmnpqrstvwxz])|x(?![aeiouy]))"
    r"|[FHLMNRSX](?=[A-Z0-9])"
)


def with_article(word: str) -> str:
    """The word after `a` or `an`."""
    return f"{'an' if _VOWEL.match(word) else 'a'} {word}"


def clean(text: str) -> str:
    """Remove terminal sequences, control characters and changes of the writing direction; tabs and
    line ends stay.

    Of a line that was drawn repeatedly (`\\r`) the last state stays.
    """
    if text.isprintable():
        return text  # printable text has no controls and no changes of direction
    text = _SEQUENCE.sub("", _ENDS.sub("\n", text))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROL.sub("", text)


def clean_values(value: object) -> object:
    """Apply `clean` to every text in the mappings and lists of an answer, in place; returns the
    value.
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (str, dict, list)):
                value[key] = clean_values(item)
    elif isinstance(value, list):
        value[:] = [clean_values(item) for item in value]
    return value


def json_text(value: object, indent: int | None = None) -> str:
    """JSON with its letters as they are, which `clean` leaves unchanged: characters that it would
    remove are escaped.
    """
    import json

    encoded_text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _UNSHOWN.sub(lambda match: json.dumps(match[0])[1:-1], encoded_text)


def shell_word(text: str) -> str:
    """A word that bash reads as this text, and that `clean` leaves unchanged (line ends
    excepted).
    """
    import shlex

    if not _UNSHOWN.search(text):
        return shlex.quote(text)
    letters = (
        _UNSHOWN.sub(lambda match: _bytes_of(match[0]), part) for part in re.split(r"([\\'])", text)
    )
    return "$'" + "".join(f"\\{part}" if part in ("\\", "'") else part for part in letters) + "'"


def _bytes_of(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode("utf-8", "surrogateescape"))


def span(low: str, high: str) -> str:
    """A range of two numbers as shown; only one if they look the same."""
    return low if low == high else f"{low} to {high}"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with left-aligned columns, not wrapped, so that a pipe gets whole rows (rich
    folds at 80).
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def wrap_text(text: str, columns: int) -> str:
    """Wrap long lines between words; a command, also in backticks, stays in one piece."""
    return "\n".join(
        _break_line(line, columns) if len(line) > columns else line for line in text.split("\n")
    )


def _break_line(line: str, columns: int) -> str:
    text = line.lstrip(" ")
    if _COMMAND_LINE.match(line):
        return _indent_text(text, len(line) - len(text), columns)
    line = " " * min(len(line) - len(text), columns * 2 // 5) + text
    column = _COLUMN.match(line)
    assert column is not None  # every line has it, if only empty
    max_indent = columns * 2 // 5
    last = column
    while later := _NEXT_COLUMN.match(line, last.end()):
        last = later
    column = last if last.end() <= max_indent else column
    indent = column.end() if column.end() <= max_indent else len(line) - len(text) + 2
    lines: list[str] = []
    start, end = 0, 0  # beginning of the current line, and end of its last word
    for word in _WORD.finditer(line):
        if word.end() - start + (indent if lines else 0) > columns and end > start:
            lines.append(line[start:end])
            start = word.start()
        end = word.end()
    lines.append(line[start:])
    return "\n".join([lines[0], *(_indent_text(later, indent, columns) for later in lines[1:])])


def _indent_text(text: str, indent: int, columns: int) -> str:
    """Indent, but less if the terminal would wrap the text: a URI should be copied whole."""
    return " " * min(indent, max(0, columns - len(text))) + text


def say(*values: object, end: str = "\n", error: bool = False, raw: bool = False) -> None:
    """Print cleaned text, on standard error if `error`; characters that the encoding lacks become
    ASCII marks.

    A notebook, which would show standard error in red, gets all on standard output. Lines are
    wrapped for a terminal, unless `raw`, for output that programs read, such as JSON.
    """
    import sys

    in_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    stream = sys.stderr if error and not in_notebook else sys.stdout
    text = clean(" ".join(map(str, values)))
    spinner.word()
    if not raw and end == "\n" and stream.isatty():
        text = wrap_text(text, room())
    plainly(stream)
    print(text, end=end, file=stream)


def room() -> int:
    """Columns of the terminal, or 80 without one."""
    import shutil

    return max(20, shutil.get_terminal_size().columns)


def plainly(stream: Any) -> None:
    """Let a stream whose encoding lacks our bars and frames (LC_ALL=C) write ASCII marks
    instead.
    """
    if stream is None or not hasattr(stream, "reconfigure") or stream.errors == _PLAINLY:
        return
    try:
        "█".encode(stream.encoding)
    except UnicodeEncodeError:
        codecs.register_error(_PLAINLY, _marks)
        stream.reconfigure(errors=_PLAINLY)


def _marks(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return (
        "".join(_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]),
        error.end,
    )
