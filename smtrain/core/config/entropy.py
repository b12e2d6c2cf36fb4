"""Whether a run of characters was drawn by chance: it changes its class often, and its letters make no words."""

from __future__ import annotations

import itertools
import re

# The commonest pairs of letters in English and in names of code (this repository's, the standard library's): nine of
# ten pairs of a word are among them, one of four of a random string.
_PAIRS = (
    "erinreteonatesenlesttiorntcodesearedaletralimengrotaanritritecionenddimaexpelaloasgeacctisnsceeltovecapaprfiea"
    "siicunchilssllthnatsamolmprsouadheomncurrtimodpoemplutnooprrhaocabmoidckotaposmiepkeniigdascfospsublshefptsocl"
    "tyttieulaihovauscrageeumrmowirdoffxelsbarciabehiegipupqupiifsardtcivlygryptuevltcunfxtdsryoboogizevippcifeueib"
    "tlbuluizboldayslbinunvwafagsubwiauuirnrufrflddtpovdunnpurgmsogavfuokgh"
)
_COMMON = frozenset(_PAIRS[i : i + 2] for i in range(0, len(_PAIRS), 2))
_HEX = re.compile(r"[0-9a-f]+|[0-9A-F]+")
_RANDOM = 0.68
"""40 characters of random base64 have a score of 1.1 +- 0.13, 20 of them +- 0.18; names of words and numbers 0.3."""


def is_random(run: str) -> bool:
    """Whether chance made it; digests in hexadecimal and what has letters of one case only do not count."""
    if _HEX.fullmatch(run) or not {"a", "A"} <= {_kind(char) for char in run}:
        return False
    return score(run) >= _RANDOM


def drawn(value: str) -> bool:
    """Whether a whole value was: `is_random`, or a digest, or letters and digits in no order of words."""
    value = value.rstrip("=")
    if len(value) < 16 or not re.fullmatch(r"[A-Za-z0-9+/._~-]+", value):
        return False
    return bool(_HEX.fullmatch(value)) or (not value.isdigit() and score(value) >= _RANDOM)


def score(run: str) -> float:
    """Changes of class per character (not those at beginnings of words and at signs), and the share of rare pairs."""
    kinds = [_kind(char) for char in run]
    pairs = list(itertools.pairwise(kinds))
    changes = sum(one != other and "+" not in (one, other) and (one, other) != ("A", "a") for one, other in pairs)
    lower = run.lower()
    letters = [lower[i : i + 2] for i, (one, other) in enumerate(pairs) if one in "aA" and other in "aA"]
    rare = sum(pair not in _COMMON for pair in letters) / len(letters) if letters else 0.5
    return changes / len(run) + rare * min(1.0, len(letters) / 8)


def _kind(char: str) -> str:
    return "a" if char.islower() else "A" if char.isupper() else "0" if char.isdigit() else "+"
