"""The files that the preparation of instructions appends to, and the counts beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.worker.data.clean.holdout import HELD, TRAIN, HoldOut
from smtrain.worker.data.manifest import MASK, PREFIX, VALIDATION, VALIDATION_MASK
from smtrain.worker.data.prepare.dataset_writer import TallyPart
from smtrain.worker.data.read.bad_lines import Bad
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText
from smtrain.worker.data.tokenize.samples import SamplePiece


class SampleTally:
    """Tokens and mask of all samples, in the order of the records."""

    def __init__(
        self, folder: Path, files: list[SourceFile], dtype: np.dtype, holdout: HoldOut | None = None, others: int = 0
    ) -> None:
        """The last `others` of `files` are held out whole."""
        names = [(PREFIX, MASK), *([(VALIDATION, VALIDATION_MASK)] if holdout else [])]
        kinds = (np.dtype(dtype), np.dtype(np.uint8))
        self._parts = {n: TallyPart(folder, n, kind) for pair in names for n, kind in zip(pair, kinds, strict=True)}
        self._held_out = set(files[len(files) - others :]) if others else set()
        self._files, self._number = files, {file: number for number, file in enumerate(files)}
        self.blocks = self.done_bytes = 0
        self.bad = Bad("record", "data")
        self.told: Counter[str] = Counter()
        self.unread = UnreadText()
        self._samples, self._lines = [0] * len(files), [0] * len(files)

    @property
    def samples(self) -> int:
        return self._parts[PREFIX].documents

    @property
    def tokens(self) -> int:
        return self._parts[PREFIX].tokens

    @property
    def held_out(self) -> TallyPart | None:
        """The samples for validation."""
        return self._parts.get(VALIDATION)

    def begin(self) -> None:
        """Start with empty files."""
        for part in self._parts.values():
            part.begin()

    def add(self, piece: SamplePiece, max_bad: int) -> None:
        """Append a piece. Raises DataError beyond `max_bad` bad records."""
        number = self._number[piece.block.file]
        if piece.block.first:
            self._lines[number] = 0
        self.bad.add(piece.bad, self._lines[number], max_bad)
        self._lines[number] += piece.lines
        self._samples[number] += len(piece.lengths)
        sides = piece.sides
        if sides is None:
            sides = np.full(len(piece.lengths), HELD if piece.block.file in self._held_out else TRAIN, np.int8)
        of_token = np.repeat(sides, piece.lengths)
        for side, name, mask in ((TRAIN, PREFIX, MASK), (HELD, VALIDATION, VALIDATION_MASK)):
            if name in self._parts:
                self._parts[name].add(piece.tokens[of_token == side], piece.lengths[sides == side])
                self._parts[mask].add(piece.mask[of_token == side], piece.lengths[sides == side])
        self.told += piece.told
        self.unread.count(piece.unread)
        self.done_bytes += piece.block.size
        self.blocks += 1

    def mark(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {
            "blocks": self.blocks,
            "done_bytes": self.done_bytes,
            "lines": self._lines,
            "samples": self._samples,
            "bad_count": self.bad.count,
            "bad": self.bad.kept,
            "told": dict(self.told),
            "unread": self.unread,
            "parts": {name: part.mark() for name, part in self._parts.items()},
        }

    def sizes(self, mark: dict[str, Any]) -> dict[str, int]:
        """Bytes of each file at a mark, by its name in the folder."""
        return {
            f"{name}{end}": about["bytes"]
            for name, marked in mark["parts"].items()
            for end, about in marked["files"].items()
        }

    def restore(self, mark: dict[str, Any]) -> bool:
        """Go back to a mark; False where the files are not what it says."""
        if not all(part.restore(mark["parts"][name]) for name, part in self._parts.items()):
            return False
        self.blocks, self.done_bytes, self.told = mark["blocks"], mark["done_bytes"], Counter(mark["told"])
        self._lines, self._samples = mark["lines"], mark["samples"]
        self.bad.count, self.bad.kept = mark["bad_count"], mark["bad"]
        self.unread = UnreadText(mark.get("unread", {}))
        return True

    def source_rows(self) -> list[dict[str, Any]]:
        """A row per file, for the manifest."""
        return [
            {"name": file.name, "bytes": file.bytes, "documents": count}
            for file, count in zip(self._files, self._samples, strict=True)
        ]

    def finish(self) -> dict[str, dict[str, Any]]:
        """Close everything and write the indexes; the files of the data set."""
        return {name: about for part in self._parts.values() for name, about in part.finish().items()}

    def close(self) -> None:
        """Close everything as it is."""
        for part in self._parts.values():
            part.close()
