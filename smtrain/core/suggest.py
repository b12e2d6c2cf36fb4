"""Suggest the known word that an unknown command, option, key or value was probably meant to be."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_SHOWN = 12
"""Number of known words that a sentence lists."""


def nearest(
    word: str,
    known_words: Iterable[str],
    aliases: Mapping[str, Iterable[str]] | None = None,
    cutoff: float = 0.6,
) -> str | None:
    """The known word most similar to another; None if none is similar enough.

    Args:
        word: The unknown word; case, hyphens and underscores do not count.
        known_words: The valid words.
        aliases: Known word -> its names in other tools (core/facts/word_names.toml).
        cutoff: Least similarity, from 0 to 1.
    """
    words_by_spelling: dict[str, str] = {}
    for known_word in known_words:
        words_by_spelling.setdefault(_plain(known_word), known_word)
    for known_word, names in (aliases or {}).items():
        if known_word in words_by_spelling.values():
            for name in names:
                words_by_spelling.setdefault(_plain(name), known_word)
    plain = _plain(word)
    if plain in words_by_spelling:
        return words_by_spelling[plain]
    if close_matches := difflib.get_close_matches(plain, words_by_spelling, n=1, cutoff=cutoff):
        return words_by_spelling[close_matches[0]]
    beginning = plain[: max(4, len(plain) - 2)]  # `gophers` for gopher-quality
    loose = cutoff <= 0.6 and len(beginning) >= 4
    return next(
        (
            words_by_spelling[known_word]
            for known_word in words_by_spelling
            if loose and known_word.startswith(beginning)
        ),
        None,
    )


def list_words(known_words: Iterable[str]) -> str:
    """The first known words, and how many more there are."""
    words = list(known_words)
    omitted_count = len(words) - MOST_SHOWN
    return ", ".join(words[:MOST_SHOWN]) + (
        f" and {omitted_count} more" if omitted_count > 0 else ""
    )


def hint(
    word: str, known_words: Iterable[str], aliases: Mapping[str, Iterable[str]] | None = None
) -> str:
    """End of a sentence about an unknown word: `did you mean X? known: X, Y`, or only the known
    words.
    """
    words = list(known_words)
    suggestion = nearest(word, words, aliases)
    return (
        f"did you mean {suggestion}? known: {list_words(words)}"
        if suggestion
        else f"known: {list_words(words)}"
    )


_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def variable_fault(text: str) -> str:
    """`$HOME is not expanded here, so write its value; ` for a value that a shell would expand; else
    empty.
    """
    variable = _VARIABLE.search(text)
    return f"{variable[0]} is not expanded here, so write its value; " if variable else ""


def missing_fault(path: str | Path) -> str:
    """`does not exist; ` with the probable reason, or the kind of a path other than a file or a
    folder.
    """
    if os.path.exists(path):
        return "is a device, a pipe or a socket, not a regular file; "
    return f"does not exist; {near_path(path)}"


def _is_loop(link: Path) -> bool:
    try:
        link.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def near_path(path: str | Path) -> str:
    """The probable reason why a path does not exist, with a space at its end; else empty.

    It is a link to nothing or to itself, holds a variable of a shell, or its folder holds a similar
    name.
    """
    wrong = Path(path)
    if wrong.is_symlink() and not wrong.exists():
        if _is_loop(wrong):
            return "it is a link that leads back to itself; "
        return f"it is a link to {wrong.readlink()}, which is missing; "
    if os.path.lexists(wrong):  # it exists, but as another kind of file than the caller needs
        return ""
    if variable := variable_fault(str(wrong)):
        return variable
    try:
        names = [entry.name for entry in wrong.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in names}
    suggestion = stems.get(wrong.name) or nearest(wrong.name, names, cutoff=0.7)
    return f"did you mean {wrong.parent / suggestion}? " if suggestion else ""


def _plain(word: str) -> str:
    return word.strip().casefold().replace("_", "-").replace(" ", "-")
