"""Deduplication over a whole corpus: exact and near duplicates, of which the first is kept.

Hashes and signatures are appended to files too, so that a killed run can resume.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smtrain.worker.data.clean.cleaning import Cleaning, SeenDocuments
from smtrain.worker.data.clean.near import SeenSignatures
from smtrain.worker.data.prepare.resumable import Appender
from smtrain.worker.data.read.unread import EXAMPLES, Findings
from smtrain.worker.data.tokenize.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from smtrain.worker.data.prepare.pieces import Piece

EXAMPLE_TOKENS = 100
DUPLICATES, NEAR = "duplicates", "near duplicates"


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
        return [*(["hashes"] if self._seen is not None else []), *(["bands"] if self._near is not None else [])]

    def begin(self) -> None:
        self._files = {name: Appender(self._folder / name) for name in self._names()}

    def first(self, piece: Piece, findings: Findings) -> NDArray[np.bool_] | None:
        """A mask of the documents to keep, and the others counted; None without deduplication."""
        kept: NDArray[np.bool_] | None = None
        if self._seen is not None and piece.hashes is not None:
            self._seen = self._seen.with_room(len(piece.hashes))
            kept = self._seen.new(piece.hashes)
            self._files["hashes"].write(piece.hashes[kept].data)
            findings.dropped += Counter({DUPLICATES: len(kept) - int(kept.sum())})
        if self._near is not None and piece.near is not None:
            kept = np.ones(len(piece.lengths), bool) if kept is None else kept
            bands = piece.near.reshape(len(kept), self._near.bands)[kept]
            before = self._near.documents
            new = self._near.new(bands.ravel())
            self._files["bands"].write(bands[: self._near.documents - before].tobytes())
            self.compared += len(new)
            findings.dropped += Counter({NEAR: len(new) - int(new.sum())})
            self._keep(piece, np.flatnonzero(kept)[~new])
            kept[kept] = new
        return kept

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
            file = Appender.restored(self._folder / name, mark[name])
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
    cleaning: Cleaning, tokenizer: Path, left_out: int, compared: int, examples: list[tuple[str, list[int]]]
) -> dict[str, Any]:
    """The manifest's fields on near duplicates; `examples` are files and first tokens of some."""
    if cleaning.near is None:
        return {}
    decoder = load_tokenizer(tokenizer) if examples else None
    texts = [f"{file}: {decoder.decode(ids)}" for file, ids in examples] if decoder else []
    bands, rows = cleaning.near.shape
    return {
        "near_duplicates": {
            "similarity": cleaning.near.similarity, "bands": bands, "rows": rows, "compared": compared,
            "remembered": min(compared, cleaning.near.documents), "left_out": left_out,
            "rate": left_out / max(compared, 1), "examples": texts,
        }
    }  # fmt: skip
