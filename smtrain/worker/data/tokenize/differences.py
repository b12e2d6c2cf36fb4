"""Documents that gigatoken must not encode, because `tokenizers` splits or composes their characters differently.

The table of characters is small and almost no text has one, so a look at the lead bytes avoids most searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.tokenize.gigatoken_adapt import holding
from smtrain.worker.data.tokenize.gigatoken_characters import CHARACTERS

_MANY = 0.05
"""Share of lead bytes above which looking at each of them costs more than the search."""


class Differences:
    """Finds documents that get other ids from gigatoken than from `tokenizers`.

    `others` are further characters, as ranges of code points; `missing` are bytes that gigatoken gets wrong.
    """

    def __init__(self, others: str = "", missing: bytes = b"") -> None:
        characters = f"{CHARACTERS} {others}"
        self._pattern, self._missing = _class(characters), missing
        # True for the first two bytes of any of the characters
        self._leads = np.zeros(1 << 16, bool)
        for first, last in _ranges(characters):
            for code in range(first, last + 1):
                lead, second = chr(code).encode()[:2]
                self._leads[lead << 8 | second] = True
        self._least = int(np.flatnonzero(self._leads)[0]) >> 8

    def find(self, texts: Any) -> NDArray[np.int64]:
        """Numbers of such documents in `texts` (Arrow large_string), ascending."""
        import pyarrow as pa
        import pyarrow.compute as pc

        near = self._near(texts)
        if len(near):
            some = texts.take(pa.array(near)) if len(near) < len(texts) else texts
            near = near[np.asarray(pc.match_substring_regex(some, self._pattern))]
        return np.union1d(near, self._with_missing(texts)) if self._missing else near

    def _with_missing(self, texts: Any) -> NDArray[np.int64]:
        _, offsets, data = texts.buffers()
        if data is None or not len(texts):
            return np.zeros(0, np.int64)
        bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        places = holding(np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]], self._missing)
        return np.unique(np.searchsorted(bounds, places + bounds[0], "right") - 1)

    def _near(self, texts: Any) -> NDArray[np.int64]:
        """Documents with a character that has the same first two bytes as one of the characters."""
        _, offsets, data = texts.buffers()
        if data is None or not len(texts):
            return np.zeros(0, np.int64)
        bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        content = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
        places = np.flatnonzero(content >= self._least)
        if len(places) > _MANY * len(content):
            return np.arange(len(texts))
        places = places[places + 1 < len(content)]
        pairs = content[places].astype(np.uint16) << 8 | content[places + 1]
        places = places[self._leads[pairs]] + bounds[0]
        return np.unique(np.searchsorted(bounds, places, "right") - 1)


def compared(normalizer: dict[str, Any] | None) -> bool:
    """Whether the table covers the normalizer of a tokenizer.json."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(compared(part) for part in normalizer.get("normalizers", []))
    return normalizer.get("type") in ("NFC", "Replace", "Prepend", "Strip")


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split():
        first, _, last = part.partition("-")
        yield int(first, 16), int(last or first, 16)


def _class(text: str) -> str:
    return "[" + "".join(f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in _ranges(text)) + "]"
