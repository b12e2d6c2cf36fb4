"""A report on text before it is tokenized: lengths, duplicates, scripts, repeated lines, overlap
with tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import DataError
from smtrain.core.pages.page import render
from smtrain.core.text import span
from smtrain.worker.data.clean.cleaning import Cleaning, hashes
from smtrain.worker.data.clean.dedup import NEAR_DUPLICATES, SeenDocuments, SeenSignatures
from smtrain.worker.data.clean.overlap import finder_of, read_tests
from smtrain.worker.data.clean.refiner import Refiner, refine_versions
from smtrain.worker.data.read.ignored_fields import EXAMPLES, Findings, IgnoredText
from smtrain.worker.data.read.reading import Documents, read_block
from smtrain.worker.data.read.sources import Format, find_files
from smtrain.worker.data.read.split_files import cut_file

_LINES_KEPT = 200_000
_EXCERPT_CHARACTERS = 300
_SCRIPTS = {
    "Latin": r"[A-Za-z\u00c0-\u024f]",
    "Cyrillic": r"[\u0400-\u052f]",
    "Greek": r"[\u0370-\u03ff]",
    "Arabic": r"[\u0600-\u06ff]",
    "Hebrew": r"[\u0590-\u05ff]",
    "Devanagari": r"[\u0900-\u097f]",
    "Thai": r"[\u0e00-\u0e7f]",
    "Kana": r"[\u3040-\u30ff]",
    "Han": r"[\u4e00-\u9fff]",
    "Hangul": r"[\uac00-\ud7af]",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _SCRIPTS.items()}
LOOKED_AT = 400
"""Characters of a document that decide its script."""
LINE_LEAST, LINE_MOST = 20, 200
"""Characters that a line must have to be counted, and characters of it that are kept."""


@dataclass
class SourceReport:
    """Counts of one source.

    `lengths` counts documents by the bit length of their number of characters.
    """

    name: str
    files: int = 0
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    tokens: int = 0
    empty: int = 0
    duplicates: int = 0
    bad: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    overlapping: int = 0
    unread: IgnoredText = field(default_factory=IgnoredText)


@dataclass
class TextReport:
    """The results of `report`.

    `repeated` are lines of 20 characters or more with their counts, the most frequent first;
    `examples` holds up to EXAMPLES texts by topic; `tested` are (texts, hit, too short to compare).
    `dropped` counts what the cleaning would leave out of `judged` documents, by reason; `untested`
    counts text of the tests that was not compared.
    """

    sources: list[SourceReport]
    repeated: list[tuple[str, int]]
    examples: dict[str, list[str]]
    tested: tuple[int, int, int] | None
    tokenized_by: str
    whole: bool
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    judged: int = 0
    untested: IgnoredText = field(default_factory=IgnoredText)


def report(
    inputs: Sequence[Path | str],
    tokenizer: Path | None = None,
    against: Sequence[Path | str] = (),
    *,
    text_column: str = "text",
    format: Format = "auto",
    separator: str | None = None,
    encoding: str | None = None,
    most_bytes: int | None = None,
    cleaning: Cleaning | None = None,
) -> TextReport:
    """Read text once, up to `most_bytes` of it, and count; with a tokenizer folder also tokens.

    Duplicates, and the filters, personal data and near duplicates of `cleaning`, are counted across
    all inputs, exact duplicates up to 3 million documents. `against` are texts that a model will be
    tested on. Raises DataError if something cannot be read.
    """
    text_encoder = None
    if tokenizer is not None:
        from smtrain.worker.data.tokenize import encoder

        text_encoder, _ = encoder.choose(tokenizer)
    ignored_text = IgnoredText()
    overlap_finder = (
        finder_of(against, ignored_text, text_column, format, encoding) if against else None
    )
    seen_documents, lines, hit = SeenDocuments(1 << 22), Counter[str](), set[int]()
    cleaning = cleaning or Cleaning()
    refine_versions(cleaning)  # raises if a package is missing
    findings = Findings(examples={"duplicates": [], "bad records": [], "overlaps with tests": []})
    reports: list[SourceReport] = []
    remaining_bytes, is_complete = most_bytes or 1 << 62, True
    preview = _CleaningPreview(cleaning)
    for source in inputs:
        files = find_files(source, format, encoding=encoding)
        source_report = SourceReport(str(source), len(files))
        reports.append(source_report)
        for file in files:
            for block in cut_file(file, text_column, separator):
                if remaining_bytes <= 0:
                    is_complete = False
                    break
                documents = read_block(block, text_column, separator)
                remaining_bytes -= documents.texts.nbytes
                findings.keep("bad records", *map(str, documents.bad))
                source_report.bad += len(documents.bad)
                source_report.unread.count(documents.ignored_text)
                _count(source_report, documents, seen_documents, lines, findings)
                preview.add(documents.texts.to_pylist() if cleaning.refines else [])
                if text_encoder is not None:
                    source_report.tokens += len(
                        text_encoder.encode(documents.texts, block.first)[0]
                    )
                if overlap_finder is not None:
                    for text in documents.texts.to_pylist():
                        numbers, run = overlap_finder.in_text(text)
                        hit |= numbers
                        source_report.overlapping += bool(numbers)
                        findings.keep(
                            "overlaps with tests", *([f"{file.name}: {run}"] if numbers else [])
                        )
    if not any(source_report.documents for source_report in reports):
        reason = next(iter(findings.examples["bad records"]), "")
        reason = f": {reason}" if reason else "; give files with text"
        raise DataError(
            f"{', '.join(map(str, inputs))} holds no document{reason}.", code="data.not_found"
        )
    repeated_lines = [(line, count) for line, count in lines.most_common(20) if count > 1]
    about_tests = (
        (overlap_finder.texts, len(hit), overlap_finder.short)
        if overlap_finder is not None
        else None
    )
    return TextReport(
        reports,
        repeated_lines,
        findings.examples | preview.findings.examples,
        about_tests,
        text_encoder.name if text_encoder else "",
        is_complete,
        preview.findings.dropped,
        preview.findings.noted,
        preview.documents,
        ignored_text,
    )


def _count(
    source_report: SourceReport,
    documents: Documents,
    seen_documents: SeenDocuments,
    lines: Counter[str],
    findings: Findings,
) -> None:
    new = seen_documents.new(hashes(documents.texts))
    texts: list[str] = documents.texts.to_pylist()
    source_report.documents += len(texts)
    source_report.duplicates += len(texts) - int(new.sum())
    findings.keep(
        "duplicates",
        *(
            text[:_EXCERPT_CHARACTERS]
            for text, first in zip(texts, new, strict=True)
            if not first and text
        ),
    )
    for text in texts:
        source_report.characters += len(text)
        source_report.bytes += len(text.encode("utf-8", "surrogatepass"))
        source_report.empty += not text.strip()
        source_report.lengths[len(text).bit_length()] += 1
        source_report.scripts[_script(text)] += 1
        lines.update(
            line.strip()[:LINE_MOST]
            for line in text.splitlines()
            if len(line.strip()) >= LINE_LEAST
        )
    if len(lines) > _LINES_KEPT:  # lines that came once are the least likely to come again
        for line in [line for line, count in lines.items() if count == 1]:
            del lines[line]
        for line, _ in lines.most_common()[: _LINES_KEPT // 2 - 1 : -1]:
            del lines[line]


def _script(text: str) -> str:
    part = text[:LOOKED_AT]
    counts: dict[str, Any] = {
        name: sum(1 for _ in pattern.finditer(part)) for name, pattern in _PATTERNS.items()
    }
    if counts["Kana"]:
        return "Japanese"
    top_script = max(counts, key=lambda name: counts[name])
    return top_script if counts[top_script] else "none"


class _CleaningPreview:
    """Counts and examples of what cleaning would take out of documents, which stay as they are."""

    def __init__(self, cleaning: Cleaning) -> None:
        tests = read_tests(cleaning.tests) if cleaning.tests else None
        self._refiner = Refiner(cleaning, tests) if cleaning.refines else None
        self._seen = SeenSignatures(cleaning.near) if cleaning.near else None
        self.documents, self.findings = 0, Findings()

    def add(self, texts: Sequence[str]) -> None:
        if self._refiner is None:
            return
        self.documents += len(texts)
        result = self._refiner.refine(texts)
        self.findings.add(result.findings)
        if self._seen is None or result.keys is None:
            return
        new = self._seen.new(result.keys)
        near_texts = [
            text[:_EXCERPT_CHARACTERS]
            for text, first in zip(result.texts, new, strict=True)
            if not first
        ]
        self.findings.dropped += Counter({NEAR_DUPLICATES: len(near_texts)})
        self.findings.keep(NEAR_DUPLICATES, *near_texts)


def page(text_report: TextReport) -> str:
    """The HTML page, with all text escaped."""
    total = _sum(text_report.sources)
    sources = [*text_report.sources, *([total] if len(text_report.sources) > 1 else [])]
    by_count = [
        sorted(counts.items(), key=lambda row: -row[1])
        for counts in (text_report.dropped, text_report.noted)
    ]
    return render(
        "data_report.html",
        title="Text report",
        generator="smtrain data report",
        about=text_report,
        whole=total,
        columns=_columns(text_report),
        sources=[_row(source, text_report) for source in sources],
        lengths=[(_range(power), total.lengths[power]) for power in _powers(total.lengths)],
        repeated=[(line, f"{count:,}") for line, count in text_report.repeated],
        dropped=[
            (reason, f"{count:,}", f"{count / text_report.judged:.2%}")
            for reason, count in by_count[0]
        ],
        noted=[(reason, f"{count:,}") for reason, count in by_count[1]],
        looked_at=LOOKED_AT,
        line_least=LINE_LEAST,
        line_most=LINE_MOST,
        most_examples=EXAMPLES,
    )


def _columns(text_report: TextReport) -> list[str]:
    names = [
        "source",
        "files",
        "documents",
        "size",
        "characters a document",
        "empty",
        "duplicates",
        "bad",
    ]
    names += ["tokens", "bytes a token"] if text_report.tokenized_by else []
    return names + (["overlapping"] if text_report.tested is not None else [])


def _row(source: SourceReport, text_report: TextReport) -> list[str]:
    documents = max(source.documents, 1)
    cells = [
        source.name,
        f"{source.files:,}",
        f"{source.documents:,}",
        spell_bytes(source.bytes),
        f"{source.characters / documents:,.0f}",
        f"{source.empty:,}",
        f"{source.duplicates:,} ({source.duplicates / documents:.1%})",
        f"{source.bad:,}",
    ]
    if text_report.tokenized_by:
        cells += [f"{source.tokens:,}", f"{source.bytes / max(source.tokens, 1):.2f}"]
    if text_report.tested is not None:
        cells.append(f"{source.overlapping:,}")
    return cells


def _powers(lengths: Counter[int]) -> range:
    """The range of bit lengths; those without documents stay, so that a gap between two bars is
    visible.
    """
    return range(min(lengths), max(lengths) + 1) if lengths else range(0)


def _sum(sources: list[SourceReport]) -> SourceReport:
    total = SourceReport("all")
    for source in sources:
        for name, value in vars(source).items():
            if name not in ("name", "unread"):
                setattr(total, name, getattr(total, name) + value)
    return total


def _range(power: int) -> str:
    return "0" if not power else span(f"{1 << power - 1:,}", f"{(1 << power) - 1:,}")
