"""What is done to documents between reading and tokenizing, when asked for: repair, a least length, no duplicates.

What looks at documents one by one (filters, personal data, signatures) is in `refining`.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# C0 but tab, line feed and carriage return; DEL, C1, zero-width space, word joiner, byte-order mark
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x{80}-\x{9f}\x{200b}\x{2060}\x{feff}]"
_FOUND = 0.9  # of the pairs of just the similarity that is asked for


@dataclass(frozen=True)
class NearDuplicates:
    """Which documents are near duplicates of an earlier one, and how many of those are remembered.

    A document is the set of its runs of `words` words. Of its signature of `permutations` numbers, cut into bands, two
    documents must agree in all numbers of one band: 1 - (1 - s^rows)^bands of the pairs of Jaccard similarity s do.
    """

    similarity: float = 0.8
    words: int = 5
    permutations: int = 128
    documents: int = 20_000_000

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(bands, rows): as many rows as still find a pair of just this similarity in nine of ten cases."""
        for rows in range(self.permutations, 1, -1):
            bands = self.permutations // rows
            if 1 - (1 - self.similarity**rows) ** bands >= _FOUND:
                return bands, rows
        return self.permutations, 1

    def probability(self, similarity: float) -> float:
        """That a pair of this similarity is found."""
        bands, rows = self.shape
        return float(1 - (1 - similarity**rows) ** bands)

    @property
    def bytes_a_document(self) -> int:
        """Most memory that a remembered document takes: 8 bytes a band, in a table that is three eighths full when it
        has just grown, beside the one before it."""
        return self.shape[0] * 32


@dataclass(frozen=True)
class Cleaning:
    """Which cleaning: `unicode` normalization, control characters, texts of fewer characters, exact duplicates; quality
    `filters` by name, personal data (`pii`), near duplicates."""

    unicode: Literal["none", "nfc", "nfkc"] = "none"
    strip_control: bool = False
    min_characters: int = 0
    deduplicate: bool = False
    filters: tuple[str, ...] = ()
    pii: Literal["mask", "drop", "count"] | None = None
    phone_region: str | None = None
    near: NearDuplicates | None = None

    @property
    def refines(self) -> bool:
        """Whether documents are looked at one by one."""
        return bool(self.filters or self.pii or self.near)

    def apply(self, texts: Any) -> tuple[Any, int]:
        """The texts (large_string) repaired, without those that are too short, and how many those were."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.unicode != "none":
            form: Any = self.unicode.upper()
            # not pyarrow's utf8_normalize: its NFC does not compose (seen in 25.0)
            texts = pa.array([unicodedata.normalize(form, text) for text in texts.to_pylist()], pa.large_string())
        if self.strip_control:
            texts = pc.replace_substring(texts, "\r\n", "\n")
            texts = pc.replace_substring_regex(texts, _CONTROL, "")
        if not self.min_characters:
            return texts, 0
        kept = texts.filter(pc.greater_equal(pc.utf8_length(texts), pa.scalar(self.min_characters)))
        return kept, len(texts) - len(kept)


def hashes(texts: Any) -> NDArray[np.uint64]:
    """64 bits of BLAKE2 of each text (large_string): two of n texts share one by chance with n^2 / 2^65."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1].tolist()
    view = memoryview(data) if data is not None else memoryview(b"")
    found = b"".join(hashlib.blake2b(view[a:b], digest_size=8).digest() for a, b in pairwise(bounds))
    return np.frombuffer(found, np.uint64)


def hashes_of(ids: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.uint64]:
    """64 bits of BLAKE2 of each document of tokens, ids end to end and a length each, whatever the ids' type."""
    wide = ids.astype("<i8")
    bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    found = b"".join(hashlib.blake2b(wide[a:b].tobytes(), digest_size=8).digest() for a, b in pairwise(bounds))
    return np.frombuffer(found, np.uint64)


class SeenDocuments:
    """The hashes met so far, in a table of fixed size: 8 bytes a slot, three quarters of which are filled at most.

    The default takes 256 MiB and remembers 25 million documents. Later ones are compared with those and not
    remembered; `forgotten` counts them.
    """

    def __init__(self, slots: int = 1 << 25) -> None:
        self._table = np.zeros(slots, np.uint64)
        self._room = slots * 3 // 4
        self.forgotten = 0

    def new(self, found: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these were not met before, the first of equals counting as new; they are met from now on."""
        found = np.where(found == 0, np.uint64(1), found)  # 0 is an empty slot
        keep = np.zeros(len(found), bool)
        _, first = np.unique(found, return_index=True)
        first.sort()
        keep[first] = True
        pending, slots = first, (found[first] % np.uint64(len(self._table))).astype(np.int64)
        while len(pending):
            there = self._table[slots]
            keep[pending[there == found[pending]]] = False
            free = np.flatnonzero(there == 0)
            if len(free) > self._room:
                self.forgotten += len(free) - max(self._room, 0)
                free = free[: max(self._room, 0)]
            # two of these may want one slot: the last to write has it, the other goes on
            self._table[slots[free]] = found[pending[free]]
            placed = np.zeros(len(pending), bool)
            placed[free] = self._table[slots[free]] == found[pending[free]]
            self._room -= int(placed.sum())
            on = ~placed & (there != found[pending]) & (there != 0) | _lost(placed, free, len(pending))
            pending, slots = pending[on], (slots[on] + 1) % len(self._table)
        return keep

    def known(self, found: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of these were met before; they are not met by it."""
        found = np.where(found == 0, np.uint64(1), found)
        keep = np.zeros(len(found), bool)
        pending = np.arange(len(found))
        slots = (found % np.uint64(len(self._table))).astype(np.int64)
        while len(pending):
            there = self._table[slots]
            keep[pending[there == found[pending]]] = True
            on = (there != 0) & (there != found[pending])
            pending, slots = pending[on], (slots[on] + 1) % len(self._table)
        return keep

    def with_room(self, count: int) -> SeenDocuments:
        """This table, or a larger one with the same hashes, in which so many more are remembered."""
        slots = len(self._table)
        used = slots * 3 // 4 - self._room
        while slots * 3 // 4 - used < count:
            slots *= 2
        if slots == len(self._table):
            return self
        larger = SeenDocuments(slots)
        for start in range(0, len(self._table), 1 << 18):  # in pieces that take little memory
            there = self._table[start : start + (1 << 18)]
            larger.new(there[there != 0])
        return larger


def _lost(placed: NDArray[np.bool_], tried: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Which tried to take a slot and found another there."""
    lost = np.zeros(count, bool)
    lost[tried] = ~placed[tried]
    return lost
