"""A report on text as one self-contained HTML page."""

from __future__ import annotations

from collections import Counter

from smtrain.core.config.units import spell_bytes
from smtrain.core.pages.page import render
from smtrain.core.text import span
from smtrain.worker.data.read.unread import EXAMPLES
from smtrain.worker.data.report import LINE_LEAST, LINE_MOST, LOOKED_AT, SourceReport, TextReport

_COUNTS = ("files", "documents", "characters", "bytes", "tokens", "empty", "duplicates", "bad", "overlapping")


def page(about: TextReport) -> str:
    """The HTML page, with all text escaped."""
    whole = _sum(about.sources)
    sources = [*about.sources, *([whole] if len(about.sources) > 1 else [])]
    by_count = [sorted(counts.items(), key=lambda row: -row[1]) for counts in (about.dropped, about.noted)]
    return render(
        "data_report.html",
        title="Text report",
        generator="smtrain data report",
        about=about,
        whole=whole,
        columns=_columns(about),
        sources=[_row(source, about) for source in sources],
        lengths=[(_range(power), whole.lengths[power]) for power in _powers(whole.lengths)],
        repeated=[(line, f"{count:,}") for line, count in about.repeated],
        dropped=[(reason, f"{count:,}", f"{count / about.judged:.2%}") for reason, count in by_count[0]],
        noted=[(reason, f"{count:,}") for reason, count in by_count[1]],
        looked_at=LOOKED_AT,
        line_least=LINE_LEAST,
        line_most=LINE_MOST,
        most_examples=EXAMPLES,
    )


def _columns(about: TextReport) -> list[str]:
    names = ["source", "files", "documents", "size", "characters a document", "empty", "duplicates", "bad"]
    names += ["tokens", "bytes a token"] if about.tokenized_by else []
    return names + (["overlapping"] if about.tested is not None else [])


def _row(source: SourceReport, about: TextReport) -> list[str]:
    documents = max(source.documents, 1)
    cells = [
        source.name, f"{source.files:,}", f"{source.documents:,}", spell_bytes(source.bytes),
        f"{source.characters / documents:,.0f}", f"{source.empty:,}",
        f"{source.duplicates:,} ({source.duplicates / documents:.1%})", f"{source.bad:,}",
    ]  # fmt: skip
    if about.tokenized_by:
        cells += [f"{source.tokens:,}", f"{source.bytes / max(source.tokens, 1):.2f}"]
    if about.tested is not None:
        cells.append(f"{source.overlapping:,}")
    return cells


def _powers(lengths: Counter[int]) -> range:
    """The range of bit lengths; those without documents stay, so that a gap between two bars is visible."""
    return range(min(lengths), max(lengths) + 1) if lengths else range(0)


def _sum(sources: list[SourceReport]) -> SourceReport:
    whole = SourceReport("all", lengths=Counter(), scripts=Counter())
    for source in sources:
        for name in _COUNTS:
            setattr(whole, name, getattr(whole, name) + getattr(source, name))
        whole.lengths += source.lengths
        whole.scripts += source.scripts
    return whole


def _range(power: int) -> str:
    return "0" if not power else span(f"{1 << power - 1:,}", f"{(1 << power) - 1:,}")
