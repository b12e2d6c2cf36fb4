"""Which documents share a run of words with texts that a model is to be tested on (n-grams of 13 words, as GPT-3's)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

WORDS = 13
_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _grams(text: str) -> tuple[list[str], NDArray[np.uint64]]:
    """The words of a text in small letters, and 64 bits of each run of WORDS of them."""
    words = _WORD.findall(text.lower())
    count = len(words) - WORDS + 1
    if count < 1:
        return words, np.zeros(0, np.uint64)
    encoded = [word.encode("utf-8", "surrogatepass") for word in words]
    ids = np.array([zlib.crc32(word) << 32 | zlib.adler32(word) for word in encoded], np.uint64)
    found = np.zeros(count, np.uint64)
    for place in range(WORDS):
        found = found * _FACTOR + ids[place : place + count]
    return words, found


class HeldTests:
    """The texts that a model is to be tested on. `short` of them have too few words to be compared."""

    def __init__(self, texts: Iterable[str]) -> None:
        grams: list[NDArray[np.uint64]] = []
        owners: list[NDArray[np.int64]] = []
        self.texts = self.short = 0
        for number, text in enumerate(texts):
            _, found = _grams(text)
            self.texts += 1
            self.short += not len(found)
            grams.append(found)
            owners.append(np.full(len(found), number))
        every = np.concatenate([np.zeros(0, np.uint64), *grams])
        order = np.argsort(every, kind="stable")
        self._grams = every[order]
        self._owners = np.concatenate([np.zeros(0, np.int64), *owners])[order]

    def in_text(self, text: str) -> tuple[set[int], str]:
        """Numbers of the tested texts that share a run of words with this one, and the first such run."""
        words, found = _grams(text)
        if not len(found) or not len(self._grams):
            return set(), ""
        first = np.searchsorted(self._grams, found, "left")
        last = np.searchsorted(self._grams, found, "right")
        hits = np.flatnonzero(last > first)
        numbers = {int(n) for hit in hits for n in self._owners[first[hit] : last[hit]]}
        return numbers, " ".join(words[hits[0] : hits[0] + WORDS]) if len(hits) else ""
