"""Refine documents in worker processes: quality filters, personal data, signatures for near duplicates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np
from numpy.typing import NDArray

from smtrain.core.errors import DataError
from smtrain.core.machine import cores_here
from smtrain.worker.data.clean import near, pii, quality
from smtrain.worker.data.clean.cleaning import Cleaning, require
from smtrain.worker.data.prepare.workers import spawned_pool
from smtrain.worker.data.read.blocks import BLOCK_BYTES

EXAMPLES = 10
_SHOWN = 300
_ONE_AT_A_TIME = threading.Lock()
"""datatrove keeps one spaCy tokenizer per process, which threads must not share."""


@dataclass
class Refined:
    """Refined documents: texts that stay, their `keys` for near duplicates, counts by reason and a few examples."""

    texts: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    keys: NDArray[np.uint64] | None = None


Refine = Callable[[Sequence[str]], Refined]


class Refiner:
    """Refines documents one by one. Raises DataError if a package is missing."""

    def __init__(self, cleaning: Cleaning) -> None:
        self._cleaning = cleaning
        self._filters = [(name, quality.judge(name)) for name in cleaning.filters]
        self._pii = pii.PersonalData(cleaning.phone_region) if cleaning.pii else None

    def refine(self, texts: Sequence[str]) -> Refined:
        refined = Refined()
        for text in texts:
            left = self._masked(self._filtered(text, refined), refined)
            if left is not None:
                refined.texts.append(left)
        if self._cleaning.near is not None:
            refined.keys = near.band_keys(refined.texts, self._cleaning.near)
        return refined

    def _filtered(self, text: str, refined: Refined) -> str | None:
        for name, judge in self._filters:
            left, reason = judge(text)
            if left is None:
                why = f"by {name}: {reason}" if reason else f"by {name}"
                count(refined.dropped, why)
                keep(refined.examples, why, text[:_SHOWN])
                return None
            if left != text:
                count(refined.noted, f"documents that {name} took lines from")
                text = left
        return text

    def _masked(self, text: str | None, refined: Refined) -> str | None:
        if text is None or self._pii is None:
            return text
        masked, counts = self._pii.mask(text)
        for kind, number in counts.items():
            count(refined.noted, kind, number)
            keep(refined.examples, kind, pii.shown(masked, kind))
        if counts and self._cleaning.pii == "drop":
            count(refined.dropped, "with personal data")
            return None
        return masked if self._cleaning.pii == "mask" else text


def count(counts: dict[str, int], reason: str, number: int = 1) -> None:
    if number:
        counts[reason] = counts.get(reason, 0) + number


def keep(examples: dict[str, list[str]], kind: str, *texts: str) -> None:
    """Keep at most EXAMPLES examples of a kind."""
    kept = examples.setdefault(kind, [])
    kept.extend(texts[: EXAMPLES - len(kept)])


def refine_versions(cleaning: Cleaning) -> list[str]:
    """Versions that the result depends on besides text and settings. Raises DataError if a package is missing."""
    versions: list[str] = []
    if cleaning.filters:
        require("data.filters", *quality.PACKAGES)
        versions += [f"{name} {metadata.version(name)}" for name in ("datatrove", "spacy")]
    if cleaning.pii:
        require("data.pii", "phonenumbers")
        versions.append(f"phonenumbers {metadata.version('phonenumbers')}")
    if cleaning.near is not None:
        versions.append(near.version())
    return versions


@contextmanager
def refining(cleaning: Cleaning, workers: int | None, size: int) -> Iterator[Refine | None]:
    """A function that refines documents, for `size` bytes of text; None if the cleaning refines nothing.

    It may be called from any thread.
    """
    if not cleaning.refines:
        yield None
        return
    processes = workers or cores_here()
    if processes == 1 or size <= BLOCK_BYTES:
        refiner = Refiner(cleaning)

        def here(texts: Sequence[str]) -> Refined:
            with _ONE_AT_A_TIME:
                return refiner.refine(texts)

        yield here
        return
    # processes, because all of it runs under Python's lock
    pool = spawned_pool(processes, _start_worker, cleaning)

    def elsewhere(texts: Sequence[str]) -> Refined:
        try:
            return pool.submit(_work, list(texts)).result()
        except BrokenProcessPool:
            raise DataError(
                "a process that filters text ended unexpectedly, probably for lack of memory; use fewer than "
                f"{processes} workers (data.workers)."
            ) from None

    try:
        yield elsewhere
    finally:
        pool.shutdown(cancel_futures=True)


_refiner: Refiner


def _start_worker(cleaning: Cleaning) -> None:
    global _refiner
    _refiner = Refiner(cleaning)


def _work(texts: list[str]) -> Refined:
    return _refiner.refine(texts)
