"""Deduplication over a whole corpus: exact and near duplicates, of which the first is kept.

Near duplicates are found by MinHash and locality-sensitive hashing: documents that agree in all
numbers of one band of their signatures count as such (`NearDuplicates`). An excluded document is
remembered too, so its own near duplicates are left out as well.

Hashes and signatures are appended to files too, so that a killed run can resume.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.clean.cleaning import Cleaning, NearDuplicates, require
from smtrain.worker.data.read.ignored_fields import EXAMPLES, Findings
from smtrain.worker.data.resumable import Appender
from smtrain.worker.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from smtrain.worker.data.piece import Piece

_SEED = 1
# scripts that put no spaces between words go by characters
_WITHOUT_SPACES = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ffff"
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\W{_WITHOUT_SPACES}]+")
EXAMPLE_TOKENS = 100
DUPLICATES, NEAR_DUPLICATES = "duplicates", "near duplicates"


class SeenDocuments:
    """The hashes seen so far, in a table of fixed size: 8 bytes per slot, at most three quarters of
    them filled.

    The default takes 256 MiB and remembers 25 million documents. Later ones are compared with those
    but not remembered; `forgotten` counts them.
    """

    def __init__(self, slots: int = 1 << 25) -> None:
        self._table = np.zeros(slots, np.uint64)
        self._room = slots * 3 // 4
        self.forgotten = 0

    def new(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """A mask of the hashes not seen before, the first of equal ones included; remembers
        them.
        """
        hashes = np.where(hashes == 0, np.uint64(1), hashes)  # 0 is an empty slot
        keep = np.zeros(len(hashes), bool)
        _, first = np.unique(hashes, return_index=True)
        first.sort()
        keep[first] = True
        pending, slots = first, (hashes[first] % np.uint64(len(self._table))).astype(np.int64)
        while len(pending):
            stored_hashes = self._table[slots]
            keep[pending[stored_hashes == hashes[pending]]] = False
            free = np.flatnonzero(stored_hashes == 0)
            if len(free) > self._room:
                self.forgotten += len(free) - max(self._room, 0)
                free = free[: max(self._room, 0)]
            # two of these may want one slot: the last to write gets it, the other tries the next
            self._table[slots[free]] = hashes[pending[free]]
            is_placed = np.zeros(len(pending), bool)
            is_placed[free] = self._table[slots[free]] == hashes[pending[free]]
            self._room -= int(is_placed.sum())
            on = ~is_placed & (stored_hashes != hashes[pending]) & (
                stored_hashes != 0
            ) | _lost_slots(is_placed, free, len(pending))
            pending, slots = pending[on], (slots[on] + 1) % len(self._table)
        return keep

    def contains(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """A mask of the hashes seen before; remembers none."""
        hashes = np.where(hashes == 0, np.uint64(1), hashes)
        keep = np.zeros(len(hashes), bool)
        pending = np.arange(len(hashes))
        slots = (hashes % np.uint64(len(self._table))).astype(np.int64)
        while len(pending):
            stored_hashes = self._table[slots]
            keep[pending[stored_hashes == hashes[pending]]] = True
            on = (stored_hashes != 0) & (stored_hashes != hashes[pending])
            pending, slots = pending[on], (slots[on] + 1) % len(self._table)
        return keep

    def with_room(self, count: int) -> SeenDocuments:
        """This table, or a larger one with the same hashes and room for `count` more."""
        slots = len(self._table)
        used = slots * 3 // 4 - self._room
        while slots * 3 // 4 - used < count:
            slots *= 2
        if slots == len(self._table):
            return self
        larger = SeenDocuments(slots)
        for start in range(0, len(self._table), 1 << 18):  # in pieces, to save memory
            stored_hashes = self._table[start : start + (1 << 18)]
            larger.new(stored_hashes[stored_hashes != 0])
        return larger


def _lost_slots(
    is_placed: NDArray[np.bool_], contenders: NDArray[np.int64], count: int
) -> NDArray[np.bool_]:
    """A mask of those that tried to take a slot and lost it to another."""
    is_lost = np.zeros(count, bool)
    is_lost[contenders] = ~is_placed[contenders]
    return is_lost


def near_version() -> str:
    """The version of the signatures' algorithm. Raises DataError if its package is missing."""
    require("data.near_duplicates", "rensa")
    from rensa import RMinHash

    return f"rensa {RMinHash.ALGORITHM_VERSION}"


def band_keys(texts: Sequence[str], near_duplicates: NearDuplicates) -> NDArray[np.uint64]:
    """64 bits of each band of each document, [documents * bands], grouped by document."""
    from rensa import RMinHash

    bands, rows = near_duplicates.shape
    matrix: Any = RMinHash.digest_matrix_from_token_sets(
        [shingles(text, near_duplicates.words) for text in texts],
        near_duplicates.permutations,
        _SEED,
    )
    signatures = np.array(matrix.to_rows(), "<u4").reshape(len(texts), near_duplicates.permutations)
    names = [band.to_bytes(2, "little") for band in range(bands)]
    keys = b"".join(
        hashlib.blake2b(
            signature[band * rows : (band + 1) * rows].tobytes(), digest_size=8, person=name
        ).digest()
        for signature in signatures
        for band, name in enumerate(names)
    )
    return np.frombuffer(keys, "<u8").astype(np.uint64)


def shingles(text: str, words: int) -> list[str]:
    """The runs of `words` words of a text, in lower case; the text itself if it has no word."""
    all_words = _WORD.findall(text.lower())
    if not all_words:
        return [text]
    return [" ".join(all_words[i : i + words]) for i in range(max(1, len(all_words) - words + 1))]


class SeenSignatures:
    """The bands of the first `near_duplicates.documents` documents, in a table that grows with
    them.
    """

    def __init__(self, near_duplicates: NearDuplicates) -> None:
        self._near, self.bands = near_duplicates, near_duplicates.shape[0]
        self._table = SeenDocuments(1 << 16)
        self.documents = 0

    def new(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """A mask of the documents (given by `band_keys`) unlike all earlier ones; remembers
        them.
        """
        count = len(keys) // self.bands
        remembered_count = min(count, self._near.documents - self.documents)
        self.documents += remembered_count
        at = remembered_count * self.bands
        self._table = self._table.with_room(at)
        fresh = np.concatenate([self._table.new(keys[:at]), ~self._table.contains(keys[at:])])
        return np.asarray(fresh.reshape(count, self.bands).all(axis=1))


class Deduplicator:
    """Finds documents that repeat an earlier one, as far as the cleaning asks for it."""

    def __init__(self, folder: Path, cleaning: Cleaning) -> None:
        self._folder = folder
        self._seen = SeenDocuments() if cleaning.deduplicate else None
        self._near = SeenSignatures(cleaning.near) if cleaning.near else None
        self._files: dict[str, Appender] = {}
        self.compared = 0
        self.examples: list[tuple[str, list[int]]] = []
        """File and first tokens of some near duplicates."""

    def _names(self) -> list[str]:
        return [
            *(["hashes"] if self._seen is not None else []),
            *(["bands"] if self._near is not None else []),
        ]

    def begin(self) -> None:
        self._files = {name: Appender(self._folder / name) for name in self._names()}

    def first(self, piece: Piece, findings: Findings) -> NDArray[np.bool_] | None:
        """A mask of the documents to keep, and duplicates counted; None without deduplication."""
        keep_mask: NDArray[np.bool_] | None = None
        if self._seen is not None and piece.hashes is not None:
            self._seen = self._seen.with_room(len(piece.hashes))
            keep_mask = self._seen.new(piece.hashes)
            self._files["hashes"].write(piece.hashes[keep_mask].data)
            findings.dropped += Counter({DUPLICATES: len(keep_mask) - int(keep_mask.sum())})
        if self._near is not None and piece.band_keys is not None:
            keep_mask = np.ones(len(piece.lengths), bool) if keep_mask is None else keep_mask
            bands = piece.band_keys.reshape(len(keep_mask), self._near.bands)[keep_mask]
            earlier_documents = self._near.documents
            new = self._near.new(bands.ravel())
            self._files["bands"].write(bands[: self._near.documents - earlier_documents].tobytes())
            self.compared += len(new)
            findings.dropped += Counter({NEAR_DUPLICATES: len(new) - int(new.sum())})
            self._keep(piece, np.flatnonzero(keep_mask)[~new])
            keep_mask[keep_mask] = new
        return keep_mask

    def _keep(self, piece: Piece, left_out: NDArray[np.int64]) -> None:
        ends = np.cumsum(piece.lengths, dtype=np.int64)
        for at in left_out[: EXAMPLES - len(self.examples)].tolist():
            start = int(ends[at] - piece.lengths[at])
            ids = piece.tokens[start : min(int(ends[at]), start + EXAMPLE_TOKENS)].tolist()
            self.examples.append((piece.block.file.name, ids))

    def mark(self) -> dict[str, Any]:
        marks = {name: file.mark() for name, file in self._files.items()}
        return {**marks, "compared": self.compared, "examples": self.examples}

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        return {name: mark[name]["bytes"] for name in self._names()}

    def restore(self, mark: dict[str, Any]) -> bool:
        for name in self._names():
            file = Appender.restore(self._folder / name, mark[name])
            if file is None:
                return False
            self._files[name] = file
            self._replay(name)
        self.compared = mark["compared"]
        self.examples = [(file, ids) for file, ids in mark["examples"]]
        return True

    def _replay(self, name: str) -> None:
        bands = self._near.bands if self._near is not None else 1
        with (self._folder / name).open("rb") as file:
            while len(keys := np.fromfile(file, "<u8", bands << 18)):
                if name == "hashes" and self._seen is not None:
                    self._seen = self._seen.with_room(len(keys))
                    self._seen.new(keys)
                elif self._near is not None:
                    self._near.new(keys)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def near_facts(
    cleaning: Cleaning,
    tokenizer: Path,
    left_out: int,
    compared_count: int,
    examples: list[tuple[str, list[int]]],
) -> dict[str, Any]:
    """The manifest's fields on near duplicates; `examples` are files and first tokens of some."""
    if cleaning.near is None:
        return {}
    decoder = load_tokenizer(tokenizer) if examples else None
    texts = [f"{file}: {decoder.decode(ids)}" for file, ids in examples] if decoder else []
    bands, rows = cleaning.near.shape
    return {
        "near_duplicates": {
            "similarity": cleaning.near.similarity,
            "bands": bands,
            "rows": rows,
            "compared": compared_count,
            "remembered": min(compared_count, cleaning.near.documents),
            "left_out": left_out,
            "rate": left_out / max(compared_count, 1),
            "examples": texts,
        }
    }
