"""A report on text as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape

from smtrain.core.config.units import spell_bytes
from smtrain.core.text import clean, span
from smtrain.core.web_page import document, wide
from smtrain.worker.data.clean.refiner import EXAMPLES
from smtrain.worker.data.report import LINE_LEAST, LINE_MOST, LOOKED_AT, SourceReport, TextReport

_STYLE = """
body{max-width:72rem} p{max-width:60rem}
th,td{text-align:right;padding:.25rem .6rem} th:first-child,td:first-child{text-align:left;overflow-wrap:anywhere}
.sources td{white-space:nowrap} .sources td:first-child{white-space:normal;min-width:9rem}
.bar{background:var(--line);height:1rem;border-radius:2px;min-width:2px}
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:.2rem .8rem;align-items:center}
.bars span:nth-child(3n){text-align:right} details{margin:.8rem 0} summary{cursor:pointer;font-weight:600}
.none{min-width:0}
"""


_COUNTS = ("files", "documents", "characters", "bytes", "tokens", "empty", "duplicates", "bad", "overlapping")


def page(about: TextReport) -> str:
    """The page. Whatever the text holds is shown as text."""
    whole = _sum(about.sources)
    parts = [
        "<h1>Text report</h1>",
        "" if about.whole else "<p>Only the beginning of the text was read.</p>",
        f"<h2>Sources</h2>{wide(_sources(about, whole))}",
        f"<p class=dim>{_legend(about)}</p>",
        "<h2>Lengths of documents</h2><p class=dim>Documents by how many characters they have.</p>",
        _bars(((_range(power), whole.lengths[power]) for power in _powers(whole.lengths)), whole.documents),
        f"<h2>Scripts</h2><p class=dim>Documents by the script of their first {LOOKED_AT} characters.</p>",
        _bars(whole.scripts.most_common(), whole.documents),
        f"<h2>Lines that come most often</h2><p class=dim>Of those with {LINE_LEAST} characters or more; the first "
        f"{LINE_MOST} characters of each.</p>",
        _repeated(about.repeated),
    ]
    if about.tested is not None:
        texts, hit, short = about.tested
        parts.append(
            f"<h2>Overlap with tests</h2><p>{hit:,} of {texts:,} tested texts share 13 words in a row with "
            f"{whole.overlapping:,} documents. Not compared, as they have fewer than 13 words: {short:,}.</p>"
        )
    if about.judged:
        parts += [
            f"<h2>What would be left out, of {about.judged:,} documents</h2>", _counted(about.dropped, about.judged),
            "<h2>What was found in those that stay</h2>" if about.noted else "",
            _counted(about.noted, 0) if about.noted else "",
        ]  # fmt: skip
    for name, texts_ in about.examples.items():
        if texts_:
            parts.append(f"<details><summary>Examples: {_text(name)} (at most {EXAMPLES}, cut short)</summary>")
            parts += [*(f"<pre dir=auto>{_text(text)}</pre>" for text in texts_), "</details>"]
    return document("Text report", "\n".join(parts), _STYLE, "smtrain data report")


def _sources(about: TextReport, whole: SourceReport) -> str:
    rows = [_row(source, about) for source in (*about.sources, *([whole] if len(about.sources) > 1 else []))]
    head = "".join(f"<th>{name}" for name in _columns(about))
    return f"<table class=sources><tr>{head}{''.join(rows)}</table>"


def _columns(about: TextReport) -> list[str]:
    names = ["source", "files", "documents", "size", "characters a document", "empty", "duplicates", "bad"]
    names += ["tokens", "bytes a token"] if about.tokenized_by else []
    return names + (["overlapping"] if about.tested is not None else [])


def _row(source: SourceReport, about: TextReport) -> str:
    documents = max(source.documents, 1)
    cells = [
        _text(source.name), f"{source.files:,}", f"{source.documents:,}", spell_bytes(source.bytes),
        f"{source.characters / documents:,.0f}", f"{source.empty:,}",
        f"{source.duplicates:,} ({source.duplicates / documents:.1%})", f"{source.bad:,}",
    ]  # fmt: skip
    if about.tokenized_by:
        cells += [f"{source.tokens:,}", f"{source.bytes / max(source.tokens, 1):.2f}"]
    if about.tested is not None:
        cells.append(f"{source.overlapping:,}")
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)


def _legend(about: TextReport) -> str:
    told = [
        "Size is that of the text in UTF-8. Duplicates are exactly like an earlier document of any source; bad are "
        "records that cannot be read, which are not among the documents."
    ]
    if about.tested is not None:
        told.append("Overlapping are documents that share 13 words in a row with a tested text.")
    if about.tokenized_by:
        told.append(f"Tokens by {_text(about.tokenized_by)}.")
    return " ".join(told)


def _powers(lengths: Counter[int]) -> range:
    """Also those of no document, or a gap between two bars could not be seen."""
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


def _bars(rows: Iterable[tuple[str, int]], whole: int) -> str:
    """A bar a row, with its count and its share of the whole."""
    kept = list(rows)
    most = max((count for _, count in kept), default=1) or 1
    cells = "".join(
        f"<span>{_text(name)}</span><div class='bar{'' if count else ' none'}' "
        f"style='width:{100 * count / most:.1f}%'></div><span>{count:,} ({count / max(whole, 1):.1%})</span>"
        for name, count in kept
    )
    return f"<div class=bars>{cells}</div>"


def _repeated(lines: list[tuple[str, int]]) -> str:
    if not lines:
        return "<p>None comes twice.</p>"
    rows = "".join(f"<tr><td dir=auto>{_text(line)}<td>{count:,}" for line, count in lines)
    return wide(f"<table><tr><th>line<th>times{rows}</table>")


def _counted(counts: dict[str, int], whole: int) -> str:
    if not counts:
        return "<p>Nothing.</p>"
    rows = "".join(
        f"<tr><td>{_text(what)}<td>{count:,}" + (f"<td>{count / whole:.2%}" if whole else "")
        for what, count in sorted(counts.items(), key=lambda row: -row[1])
    )
    return wide(f"<table><tr><th>what<th>how many{'<th>share' if whole else ''}{rows}</table>")


def _text(text: str) -> str:
    return escape(clean(text))
