"""Refine documents in worker processes: encodings, languages, tests, filters, personal data,
signatures.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata

import numpy as np
from numpy.typing import NDArray

from smtrain.core.machine import cores_here
from smtrain.worker.data.clean import dedup, language, overlap, pii, quality
from smtrain.worker.data.clean.cleaning import TOO_SHORT, Cleaning, require
from smtrain.worker.data.clean.overlap import OverlapFinder
from smtrain.worker.data.read.blocks import BLOCK_BYTES
from smtrain.worker.data.read.ignored_fields import Findings
from smtrain.worker.data.read.reading import strings
from smtrain.worker.data.workers import dead_worker, spawned_pool

_EXCERPT_CHARACTERS = 300
_ONE_AT_A_TIME = threading.Lock()
"""datatrove keeps one spaCy tokenizer per process, which threads must not share."""


@dataclass
class Refined:
    """Refined documents: texts that stay, their `keys` for near duplicates, and what was found in
    all.
    """

    texts: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    keys: NDArray[np.uint64] | None = None


Refine = Callable[[Sequence[str]], Refined]


class Refiner:
    """Refines documents one by one, without those that share text with `tests`. Raises DataError if
    a package is missing.
    """

    def __init__(self, cleaning: Cleaning, tests: OverlapFinder | None = None) -> None:
        self._cleaning, self._tests = cleaning, tests
        self._language = language.LanguageJudge(cleaning.languages) if cleaning.languages else None
        self._filters = [(name, quality.judge(name)) for name in cleaning.filters]
        self._pii = pii.PersonalData(cleaning.phone_region) if cleaning.pii else None

    def refine(self, texts: Sequence[str]) -> Refined:
        result = Refined()
        findings = result.findings
        if self._cleaning.fix_mojibake:
            texts = [self._repair_mojibake(text, findings) for text in texts]
        long_texts, short = self._cleaning.apply(strings(texts))
        findings.dropped += Counter({TOO_SHORT: short})
        for text in long_texts.to_pylist():
            candidate = self._drop_test_overlap(self._drop_other_language(text, findings), findings)
            document = self._treat_pii(self._apply_filters(candidate, findings), findings)
            if document is not None:
                result.texts.append(document)
        if self._cleaning.near is not None:
            result.keys = dedup.band_keys(result.texts, self._cleaning.near)
        return result

    def _repair_mojibake(self, text: str, findings: Findings) -> str:
        repaired_text = language.repair_mojibake(text)
        if repaired_text != text:
            findings.noted["documents with mojibake put right"] += 1
            findings.keep("mojibake put right", repaired_text[:_EXCERPT_CHARACTERS])
        return repaired_text

    def _drop_other_language(self, text: str, findings: Findings) -> str | None:
        other_language = self._language.unwanted_language(text) if self._language else None
        if other_language is None:
            return text
        findings.dropped[f"by language: {other_language}"] += 1
        findings.keep("by language", text[:_EXCERPT_CHARACTERS])
        return None

    def _drop_test_overlap(self, text: str | None, findings: Findings) -> str | None:
        if text is None or self._tests is None:
            return text
        numbers, run = self._tests.in_text(text)
        if not numbers:
            return text
        findings.dropped["overlapping with tests"] += 1
        findings.keep("overlapping with tests", run)
        return None

    def _apply_filters(self, text: str | None, findings: Findings) -> str | None:
        if text is None:
            return None
        for name, judge in self._filters:
            filtered_text, reason = judge(text)
            if filtered_text is None:
                label = f"by {name}: {reason}" if reason else f"by {name}"
                findings.dropped[label] += 1
                findings.keep(label, text[:_EXCERPT_CHARACTERS])
                return None
            if filtered_text != text:
                findings.noted[f"documents that {name} took lines from"] += 1
                text = filtered_text
        return text

    def _treat_pii(self, text: str | None, findings: Findings) -> str | None:
        if text is None or self._pii is None:
            return text
        masked_text, counts = self._pii.mask(text)
        for kind, number in counts.items():
            findings.noted[kind] += number
            findings.keep(kind, pii.excerpt(masked_text, kind))
        if counts and self._cleaning.pii == "drop":
            findings.dropped["with personal data"] += 1
            return None
        return masked_text if self._cleaning.pii == "mask" else text


def refine_versions(cleaning: Cleaning) -> list[str]:
    """Versions that the result depends on besides text and settings.

    Raises DataError if a package is missing.
    """
    versions: list[str] = []
    if cleaning.fix_mojibake:
        versions.append(language.mojibake_version())
    if cleaning.languages:
        versions.append(language.language_version(cleaning.languages))
    if cleaning.tests:
        versions.append(overlap.read_tests(cleaning.tests).digest)
    if cleaning.filters:
        require("data.filters", *quality.PACKAGES)
        versions += [f"{name} {metadata.version(name)}" for name in ("datatrove", "spacy")]
    if cleaning.pii:
        require("data.pii", "phonenumbers")
        versions.append(f"phonenumbers {metadata.version('phonenumbers')}")
    if cleaning.near is not None:
        versions.append(dedup.near_version())
    return versions


@contextmanager
def open_refiner(cleaning: Cleaning, workers: int | None, size: int) -> Iterator[Refine | None]:
    """A function that refines documents, for `size` bytes of text; None if the cleaning refines
    nothing.

    It may be called from any thread.
    """
    if not cleaning.refines:
        yield None
        return
    processes = workers or cores_here()
    tests = overlap.read_tests(cleaning.tests) if cleaning.tests else None
    if processes == 1 or size <= BLOCK_BYTES:
        refiner = Refiner(cleaning, tests)

        def refine_in_process(texts: Sequence[str]) -> Refined:
            with _ONE_AT_A_TIME:
                return refiner.refine(texts)

        yield refine_in_process
        return
    # processes, because all of it runs under Python's lock
    pool = spawned_pool(processes, _start_worker, cleaning, tests)

    def refine_in_worker(texts: Sequence[str]) -> Refined:
        try:
            return pool.submit(_work, list(texts)).result()
        except BrokenProcessPool:
            raise dead_worker(processes) from None

    try:
        yield refine_in_worker
    finally:
        pool.shutdown(cancel_futures=True)


_refiner: Refiner


def _start_worker(cleaning: Cleaning, tests: OverlapFinder | None) -> None:
    global _refiner
    _refiner = Refiner(cleaning, tests)


def _work(texts: list[str]) -> Refined:
    return _refiner.refine(texts)
