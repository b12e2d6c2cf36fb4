"""What filters, patterns and near duplicates would take out of documents, without taking it."""

from __future__ import annotations

from collections.abc import Sequence

from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.near import SeenSignatures
from smtrain.worker.data.clean.refiner import Refiner, count, keep

_SHOWN = 300


class JudgedTexts:
    """Counts and examples over documents given in their order."""

    def __init__(self, cleaning: Cleaning) -> None:
        """Raises DataError where a package is missing."""
        self._refiner = Refiner(cleaning) if cleaning.refines else None
        self._seen = SeenSignatures(cleaning.near) if cleaning.near else None
        self.documents = 0
        self.dropped: dict[str, int] = {}
        self.noted: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}

    def add(self, texts: Sequence[str]) -> None:
        """Judge some more."""
        if self._refiner is None:
            return
        self.documents += len(texts)
        found = self._refiner.refine(texts)
        for counts, more in ((self.dropped, found.dropped), (self.noted, found.noted)):
            for what, number in more.items():
                count(counts, what, number)
        for what, some in found.examples.items():
            keep(self.examples, what, *some)
        if self._seen is None or found.keys is None:
            return
        new = self._seen.new(found.keys)
        near = [text[:_SHOWN] for text, first in zip(found.texts, new, strict=True) if not first]
        count(self.dropped, "near duplicates", len(near))
        keep(self.examples, "near duplicates", *near)
