"""Errors in the words that the user typed: the library names keys, a command line has flags."""

from __future__ import annotations

import re

_flags: dict[str, str] = {}
_ALWAYS = {" (overwrite=True)": ""}


def forget() -> None:
    """A command begins: nothing is known of its flags."""
    _flags.clear()


def typed(flags: dict[str, str]) -> None:
    """From here on, errors name these keys by the flags that stand for them on this command line."""
    _flags.update(flags)


def in_flags(text: str) -> str:
    """The sentence with flags in place of keys: of dotted ones anywhere, of plain words where the sentence begins."""
    for key, flag in _flags.items():
        if re.search(r"[. ]", key):
            text = re.sub(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", flag, text)
        elif text.startswith((f"{key}:", f"{key} ")):
            text = flag + text[len(key) :]
    for words, instead in _ALWAYS.items():
        text = text.replace(words, instead)
    return text
