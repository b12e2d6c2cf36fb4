"""Adapt tokenizers for gigatoken, and find the documents that it gets wrong.

Some characters are split or composed differently by `tokenizers`. Their table is small and almost
no text has one, so a look at the lead bytes avoids most searches.

A byte-level vocabulary may lack single bytes, which `tokenizers` drops from the text: they get
stand-ins here, and documents with such a byte go to `tokenizers`. A tokenizer that splits off every
digit before words (StarCoder, SmolLM) gets text cut at digits; then only pieces with such a
byte or character, or with a numeral other than an ASCII digit, go to `tokenizers`.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from smtrain.core.files import parse_json
from smtrain.worker.data.read.reading import buffers_of, rows_of, true_rows
from smtrain.worker.data.tokenize.gigatoken_characters import CHARACTERS

_SCAN_ALL_SHARE = 0.05
"""Share of lead bytes above which looking at each of them costs more than the search."""
DIGIT = re.compile("([0-9])")
"""Its `split` cuts a string as `cut_at_digits` cuts an array."""
_IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}


@dataclass(frozen=True)
class AdaptedTokenizer:
    """A tokenizer.json for gigatoken; documents with one of the bytes `missing_bytes` get wrong
    ids.

    With `digits` its text must be split before and after every digit. Unless `is_comparable`, its
    normalizer may give other ids that are not known.
    """

    content: bytes
    missing_bytes: bytes = b""
    digits: bool = False
    is_comparable: bool = True


def adapt_tokenizer(content: bytes) -> AdaptedTokenizer:
    """The tokenizer unchanged, or adapted."""
    config = parse_json(content)
    digits = _without_digits(config)
    missing_bytes = _with_all_bytes(config)
    if digits or missing_bytes:
        content = json.dumps(config).encode()
    return AdaptedTokenizer(
        content,
        bytes(b for b in missing_bytes if b in _IN_UTF8),
        digits,
        _covers_normalizer(config.get("normalizer")),
    )


def _without_digits(config: dict[str, Any]) -> bool:
    """Remove a step that splits off every digit, if only byte-level words follow; True if there was
    one.
    """
    pre_tokenizer = config.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers") or []
    if pre_tokenizer.get("type") != "Sequence" or [step.get("type") for step in steps] != [
        "Digits",
        "ByteLevel",
    ]:
        return False
    byte_level = steps[1]
    if not steps[0].get("individual_digits") or byte_level.get("add_prefix_space", True):
        return False
    if not byte_level.get("use_regex", True) or config.get("normalizer"):
        return False
    if any(
        character.isnumeric()
        for token in config.get("added_tokens") or []
        for character in token["content"]
    ):
        return False
    config["pre_tokenizer"] = byte_level
    return True


def _with_all_bytes(config: dict[str, Any]) -> bytes:
    """Add missing bytes to the vocabulary of a byte-level BPE; return them."""
    model = config.get("model") or {}
    vocabulary = model.get("vocab")
    if (
        model.get("type") != "BPE"
        or not isinstance(vocabulary, dict)
        or not _byte_level(config.get("pre_tokenizer"))
    ):
        return b""
    free = 1 + max(
        [*vocabulary.values(), *(token["id"] for token in config.get("added_tokens") or [])],
        default=-1,
    )
    missing_bytes = [
        byte for byte, spelling in enumerate(_byte_spellings()) if spelling not in vocabulary
    ]
    for number, byte in enumerate(missing_bytes):
        vocabulary[_byte_spellings()[byte]] = free + number
    return bytes(missing_bytes)


def _byte_level(step: dict[str, Any] | None) -> bool:
    if not step:
        return False
    return step.get("type") == "ByteLevel" or any(
        _byte_level(part) for part in step.get("pretokenizers") or []
    )


@lru_cache(maxsize=1)
def _byte_spellings() -> list[str]:
    """The spelling of each byte in GPT-2's vocabulary: printable ones as themselves, the rest from
    U+0100.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare_codes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare_codes)) for byte in range(256)]


@lru_cache(maxsize=1)
def other_numerals() -> str:
    """Numerals other than ASCII digits, in ranges of hexadecimal code points."""
    ranges: list[list[int]] = []
    for code in range(0x80, sys.maxunicode + 1):
        if unicodedata.category(chr(code)).startswith("N"):
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return " ".join(f"{first:x}-{last:x}" for first, last in ranges)


def cut_at_digits(texts: Any) -> Any:
    """Texts (Arrow large_string) cut before and after every ASCII digit; no text is left of empty
    ones.
    """
    bounds, content = buffers_of(texts)
    digits = content[bounds[0] : bounds[-1]] - np.uint8(48) < 10
    cuts = np.append(digits, False)
    cuts[1:] |= digits
    cuts[bounds - bounds[0]] = True
    starts = np.flatnonzero(cuts) + bounds[0]
    return pa.LargeStringArray.from_buffers(
        len(starts) - 1, pa.py_buffer(starts), pa.py_buffer(content)
    )


def find_bytes(content: NDArray[np.uint8], searched_bytes: bytes) -> NDArray[np.int64]:
    """The places of any of these bytes."""
    return np.concatenate(
        [np.zeros(0, np.int64), *(np.flatnonzero(content == byte) for byte in searched_bytes)]
    )


# Characters


class Differences:
    """Finds documents that get other ids from gigatoken than from `tokenizers`.

    `extra_characters` are further characters, as ranges of code points; `missing_bytes` are bytes
    that gigatoken gets wrong.
    """

    def __init__(self, extra_characters: str = "", missing_bytes: bytes = b"") -> None:
        characters = f"{CHARACTERS} {extra_characters}"
        self._pattern, self._missing = _class(characters), missing_bytes
        # True for the first two bytes of any of the characters
        self._leads = np.zeros(1 << 16, bool)
        for first, last in _ranges(characters):
            for code in range(first, last + 1):
                lead, second = chr(code).encode()[:2]
                self._leads[lead << 8 | second] = True
        self._least = int(np.flatnonzero(self._leads)[0]) >> 8

    def find(self, texts: Any) -> NDArray[np.int64]:
        """Numbers of such documents in `texts` (Arrow large_string), ascending."""
        if not len(texts):
            return np.zeros(0, np.int64)
        candidates = self._candidates(texts)
        if len(candidates):
            candidate_texts = rows_of(texts, candidates) if len(candidates) < len(texts) else texts
            candidates = candidates[
                true_rows(pc.match_substring_regex(candidate_texts, self._pattern))
            ]
        return np.union1d(candidates, self._with_missing(texts)) if self._missing else candidates

    def _with_missing(self, texts: Any) -> NDArray[np.int64]:
        bounds, data = buffers_of(texts)
        places = find_bytes(data[bounds[0] : bounds[-1]], self._missing)
        return np.unique(np.searchsorted(bounds, places + bounds[0], "right") - 1)

    def _candidates(self, texts: Any) -> NDArray[np.int64]:
        """Documents with a character that has the same first two bytes as one of the characters."""
        bounds, data = buffers_of(texts)
        content = data[bounds[0] : bounds[-1]]
        places = np.flatnonzero(content >= self._least)
        if len(places) > _SCAN_ALL_SHARE * len(content):
            return np.arange(len(texts))
        places = places[places + 1 < len(content)]
        pairs = content[places].astype(np.uint16) << 8 | content[places + 1]
        places = places[self._leads[pairs]] + bounds[0]
        return np.unique(np.searchsorted(bounds, places, "right") - 1)


def _covers_normalizer(normalizer: dict[str, Any] | None) -> bool:
    """Whether the table covers the normalizer of a tokenizer.json."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(_covers_normalizer(part) for part in normalizer.get("normalizers", []))
    return normalizer.get("type") in ("NFC", "Replace", "Prepend", "Strip")


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split():
        first, _, last = part.partition("-")
        yield int(first, 16), int(last or first, 16)


def _class(text: str) -> str:
    return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in _ranges(text)) + "]"
