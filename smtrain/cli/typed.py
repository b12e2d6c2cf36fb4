"""Show errors with the flags of the command line: the library names keys."""

from __future__ import annotations

import re

_flags: dict[str, str] = {}
_ALWAYS = {" (overwrite=True)": ""}


def forget() -> None:
    """Forget the flags of an earlier command."""
    _flags.clear()


def typed(flags: dict[str, str]) -> None:
    """Name these keys in later errors by their flags."""
    _flags.update(flags)


def in_flags(text: str) -> str:
    """The sentence with flags in place of keys: dotted keys anywhere, plain words only at its beginning."""
    for key, flag in _flags.items():
        if re.search(r"[. ]", key):
            text = re.sub(rf"(?<![\w.-]){re.escape(key)}(?![\w-]|\.\w)", flag, text)
        elif text.startswith((f"{key}:", f"{key} ")):
            text = flag + text[len(key) :]
    for words, instead in _ALWAYS.items():
        text = text.replace(words, instead)
    return text
