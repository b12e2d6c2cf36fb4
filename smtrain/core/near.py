"""Suggest the known word that an unknown command, option, key or value was probably meant to be."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_SHOWN = 12
"""Number of known words that a sentence lists."""


def nearest(
    word: str,
    known: Iterable[str],
    others: Mapping[str, Iterable[str]] | None = None,
    cutoff: float = 0.6,
) -> str | None:
    """The known word most similar to another; None if none is similar enough.

    Args:
        word: The unknown word; case, hyphens and underscores do not count.
        known: The valid words.
        others: Known word -> its names in other tools (core/facts/word_names.toml).
        cutoff: Least similarity, from 0 to 1.
    """
    spelled: dict[str, str] = {}
    for one in known:
        spelled.setdefault(_plain(one), one)
    for one, names in (others or {}).items():
        if one in spelled.values():
            for name in names:
                spelled.setdefault(_plain(name), one)
    plain = _plain(word)
    if plain in spelled:
        return spelled[plain]
    if near := difflib.get_close_matches(plain, spelled, n=1, cutoff=cutoff):
        return spelled[near[0]]
    begun = plain[: max(4, len(plain) - 2)]  # `gophers` for gopher-quality
    loose = cutoff <= 0.6 and len(begun) >= 4
    return next((spelled[one] for one in spelled if loose and one.startswith(begun)), None)


def listed(known: Iterable[str]) -> str:
    """The first known words, and how many more there are."""
    words = list(known)
    more = len(words) - MOST_SHOWN
    return ", ".join(words[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def hint(word: str, known: Iterable[str], others: Mapping[str, Iterable[str]] | None = None) -> str:
    """End of a sentence about an unknown word: `did you mean X? known: X, Y`, or only the known
    words.
    """
    words = list(known)
    near = nearest(word, words, others)
    return f"did you mean {near}? known: {listed(words)}" if near else f"known: {listed(words)}"


def near_path(path: str | Path) -> str:
    """`did you mean X?

    ` for a path that does not exist, if its folder holds a similar name; else empty.
    """
    wrong = Path(path)
    if os.path.lexists(wrong):  # it exists, but as another kind of file than the caller needs
        return ""
    try:
        names = [entry.name for entry in wrong.parent.iterdir() if not entry.name.startswith(".")]
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in names}
    near = stems.get(wrong.name) or nearest(wrong.name, names, cutoff=0.7)
    return f"did you mean {wrong.parent / near}? " if near else ""


def _plain(word: str) -> str:
    return word.strip().casefold().replace("_", "-").replace(" ", "-")
