"""Overlap of documents with texts of a test, by n-grams of 13 words as in GPT-3's paper."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import EvaluationTexts
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.data.read.reading import read_block
from smtrain.worker.data.read.sources import Format, find_files
from smtrain.worker.data.read.split_files import cut_file

WORDS = 13
_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def _grams(text: str) -> tuple[list[str], NDArray[np.uint64]]:
    """The words of a text in lower case, and 64 bits of each run of WORDS words."""
    words = _WORD.findall(text.lower())
    count = len(words) - WORDS + 1
    if count < 1:
        return words, np.zeros(0, np.uint64)
    word_bytes = [word.encode("utf-8", "surrogatepass") for word in words]
    ids = np.array([zlib.crc32(word) << 32 | zlib.adler32(word) for word in word_bytes], np.uint64)
    grams = np.zeros(count, np.uint64)
    for place in range(WORDS):
        grams = grams * _FACTOR + ids[place : place + count]
    return words, grams


class OverlapFinder:
    """The texts of a test; `short` of them have too few words to be compared."""

    def __init__(self, texts: Iterable[str]) -> None:
        grams: list[NDArray[np.uint64]] = []
        owners: list[NDArray[np.int64]] = []
        self.texts = self.short = 0
        for number, text in enumerate(texts):
            _, text_grams = _grams(text)
            self.texts += 1
            self.short += not len(text_grams)
            grams.append(text_grams)
            owners.append(np.full(len(text_grams), number))
        all_grams = np.concatenate([np.zeros(0, np.uint64), *grams])
        order = np.argsort(all_grams, kind="stable")
        self._grams = all_grams[order]
        self._owners = np.concatenate([np.zeros(0, np.int64), *owners])[order]

    @property
    def digest(self) -> str:
        """Equal for tests with the same runs of words."""
        return f"tests {hashlib.sha256(self._grams.tobytes()).hexdigest()[:16]}"

    def in_text(self, text: str) -> tuple[set[int], str]:
        """Numbers of the test's texts that share a run of words with this text, and the first such
        run.
        """
        words, grams = _grams(text)
        if not len(grams) or not len(self._grams):
            return set(), ""
        first = np.searchsorted(self._grams, grams, "left")
        last = np.searchsorted(self._grams, grams, "right")
        hits = np.flatnonzero(last > first)
        numbers = {int(n) for hit in hits for n in self._owners[first[hit] : last[hit]]}
        return numbers, " ".join(words[hits[0] : hits[0] + WORDS]) if len(hits) else ""


@lru_cache(maxsize=4)
def read_tests(tests: EvaluationTexts) -> OverlapFinder:
    """The texts of a test.

    Raises DataError if one cannot be read or all are too short to compare.
    """
    try:
        return finder_of([tests.path], IgnoredText(), tests.text_column)
    except DataError as error:
        message = str(error).replace("data.text_column", "data.decontaminate.text_column")
        raise DataError(message, code=error.code) from None


def finder_of(
    sources: Sequence[Path | str],
    ignored_text: IgnoredText,
    text_column: str = "text",
    format: Format = "auto",
    encoding: str | None = None,
) -> OverlapFinder:
    """The texts of several sources; `ignored_text` counts text of their records outside the
    comparison.

    Raises DataError if one cannot be read, as its text would stay in what is trained on unnoticed,
    or if all are too short to compare.
    """
    finder = OverlapFinder(_texts(sources, text_column, format, encoding, ignored_text))
    if finder.texts == finder.short:
        raise DataError(
            f"{sources[0]}: no text of {finder.texts} has {WORDS} words; give longer ones to"
            " compare with."
        )
    return finder


def _texts(
    sources: Sequence[Path | str],
    text_column: str,
    format: Format,
    encoding: str | None,
    ignored_text: IgnoredText,
) -> Iterator[str]:
    for source in sources:
        for file in find_files(source, format, encoding=encoding):
            for block in cut_file(file, text_column):
                documents = read_block(block, text_column)
                ignored_text.count(documents.ignored_text)
                if documents.bad:
                    raise DataError(
                        f"{documents.bad[0]}; correct it, as every text of a test is compared."
                    )
                yield from documents.texts.to_pylist()
