"""Text that others wrote, made safe to show: a job, a log and a service may hold what would steer a terminal.

`clean` is the one cleaner. It is applied where such text comes in (every answer of AWS, `aws/target.py`; every message
of our own errors, `errors.py`) and where it goes out (`say`, which every command prints with).
"""

from __future__ import annotations

import re
from collections.abc import Callable

Say = Callable[[str], None]
"""Whoever shows a sentence to the user."""

# A string sequence (OSC: titles, links, the clipboard; DCS, SOS, PM, APC) with what it holds; without an end in its
# line only its beginning goes, so that nothing can be hidden behind one. CSI; any other escape. In both codings.
_SEQUENCE = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]?"
)
# Controls but tab and line feed; what changes the direction of writing; halves of surrogate pairs, which have no UTF-8.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ENDS = re.compile(r"\r+\n|[\u2028\u2029]")


def clean(text: str) -> str:
    """The text without what steers a terminal or turns the direction of writing; tabs and line ends are kept.

    Of a line that was drawn again and again (`\\r`) what was drawn last is left.
    """
    if text.isprintable():
        return text  # what is printable is no control, nor does it turn the direction
    text = _SEQUENCE.sub("", _ENDS.sub("\n", text))
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _CONTROL.sub("", text)


def clean_values(value: object) -> object:
    """`clean` for every text in mappings and lists of an answer, which are changed in place; gives the value."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (str, dict, list)):
                value[key] = clean_values(item)
    elif isinstance(value, list):
        value[:] = [clean_values(item) for item in value]
    return value


def say(*values: object, end: str = "\n", error: bool = False) -> None:
    """Print, cleaned: on standard error if `error`. Where the encoding lacks a character, there is a mark for it."""
    import sys

    stream = sys.stderr if error else sys.stdout
    text = clean(" ".join(map(str, values)))
    try:
        print(text, end=end, file=stream)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), end=end, file=stream)
