"""Filters, personal data and signatures over documents, in their order, by as many processes as there are cores."""

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
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.prepare.workers import spawned_pool
from smtrain.worker.data.read.blocks import BLOCK_BYTES

EXAMPLES = 10
_SHOWN = 300
_ONE_AT_A_TIME = threading.Lock()
"""datatrove keeps one tokenizer of spaCy's a process, which threads must not share."""


@dataclass
class Refined:
    """What is left of some documents: their texts, `keys` for near duplicates, what was left out and noted by reason,
    and a few examples of it."""

    texts: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    keys: NDArray[np.uint64] | None = None


Refine = Callable[[Sequence[str]], Refined]


class Refiner:
    """What a process needs to refine documents."""

    def __init__(self, cleaning: Cleaning) -> None:
        """Raises DataError where a package is missing."""
        self._cleaning = cleaning
        self._filters = [(name, quality.judge(name)) for name in cleaning.filters]
        self._pii = pii.PersonalData(cleaning.phone_region) if cleaning.pii else None

    def refine(self, texts: Sequence[str]) -> Refined:
        made = Refined()
        for text in texts:
            left = self._masked(self._filtered(text, made), made)
            if left is not None:
                made.texts.append(left)
        if self._cleaning.near is not None:
            made.keys = near.band_keys(made.texts, self._cleaning.near)
        return made

    def _filtered(self, text: str, made: Refined) -> str | None:
        for name, judge in self._filters:
            left, reason = judge(text)
            if left is None:
                why = f"by {name}: {reason}" if reason else f"by {name}"
                count(made.dropped, why)
                keep(made.examples, why, text[:_SHOWN])
                return None
            if left != text:
                count(made.noted, f"documents that {name} took lines from")
                text = left
        return text

    def _masked(self, text: str | None, made: Refined) -> str | None:
        if text is None or self._pii is None:
            return text
        masked, counts = self._pii.mask(text)
        for kind, number in counts.items():
            count(made.noted, kind, number)
            keep(made.examples, kind, pii.shown(masked, kind))
        if counts and self._cleaning.pii == "drop":
            count(made.dropped, "with personal data")
            return None
        return masked if self._cleaning.pii == "mask" else text


def count(counts: dict[str, int], what: str, number: int = 1) -> None:
    if number:
        counts[what] = counts.get(what, 0) + number


def keep(examples: dict[str, list[str]], what: str, *found: str) -> None:
    """Take examples while there are fewer than EXAMPLES of a kind."""
    kept = examples.setdefault(what, [])
    kept.extend(found[: EXAMPLES - len(kept)])


def refine_versions(cleaning: Cleaning) -> list[str]:
    """What the result depends on beside text and settings. Raises DataError where a package is missing."""
    found: list[str] = []
    if cleaning.filters:
        if sentence := quality.lacking():
            raise DataError(f"data.filters: {sentence}.")
        found += [f"{name} {metadata.version(name)}" for name in ("datatrove", "spacy")]
    if cleaning.pii:
        if sentence := pii.lacking():
            raise DataError(f"data.pii: {sentence}.")
        found.append(f"phonenumbers {metadata.version('phonenumbers')}")
    if cleaning.near is not None:
        found.append(near.version())
    return found


@contextmanager
def refining(cleaning: Cleaning, workers: int | None, size: int) -> Iterator[Refine | None]:
    """How `size` bytes of text are refined; None where nothing is asked for. It may be called from any thread."""
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
