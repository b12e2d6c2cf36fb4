"""Wikipedia: MediaWiki's XML dumps, whose wikitext becomes plain text, and WikiExtractor's
output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from smtrain.core.errors import DataError
from smtrain.worker.data.read.ignored_fields import IgnoredText
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile

_OPEN = re.compile(rb"<doc\s[^>\n]*>\s*")
_LEFT_OUT = (
    "ref",
    "gallery",
    "math",
    "timeline",
    "references",
    "table",
    "imagemap",
    "score",
    "syntaxhighlight",
    "source",
    "chem",
    "templatestyles",
    "graph",
    "mapframe",
)
# removed before parsing: a stray quotation mark elsewhere can hide them from the parser
_TAGS = re.compile(
    rf"<!--.*?-->|<({'|'.join(_LEFT_OUT)})(?=[\s/>])(?:[^<>]*/>|[^<>]*>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_TABLE = re.compile(r"^[ \t:*#]*(?:(\{\|)|(\|\})(?!\}))", re.MULTILINE)
_SWITCH = re.compile(r"__[A-Z]+__")
_SPACES = re.compile(r"[ \t\xa0]+")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?:")
_BREAKS = {"br", "hr", "li", "dd", "dt"}
# brackets and commas left over around a removed template
_EMPTY = re.compile(r"(?: |^)\([\s,;:]*\)", re.MULTILINE)
_FIRST = re.compile(r"\(\s*(?:[,;]\s*)+")
_COMMA = re.compile(r" +,(?=\s|$)")
_QUOTES = re.compile(r"'{2,}")
_LEFT_TAG = re.compile(
    r"</?(?:ref|small|big|div|span|sub|sup|center|font|p|u|i|b)(?:\s[^<>]*)?/?>", re.IGNORECASE
)
_LEFT_LINK = re.compile(r"\[\[(?:[^][|]*\|)?|\]\]")


def dump_documents(file: SourceFile, stream: Any, _text_column: str) -> Iterator[object]:
    """The title and text of each article (namespace 0, no redirect) of a dump, and counts of the
    other pages.

    Templates, tables, references, files and categories are dropped, links keep their words. Raises
    DataError without mwparserfromhell, or if the file is not a dump.
    """
    try:
        import mwparserfromhell
    except ImportError:
        raise DataError(
            f"{file.path} is a MediaWiki dump, which needs the package mwparserfromhell; run `pip"
            " install smtrain[wiki]`, or give WikiExtractor's output.",
            code="package.missing",
        ) from None
    skipped_namespaces = {"file", "image", "category"}
    number = 0
    try:
        events = ElementTree.iterparse(stream, events=("start", "end"))  # noqa: S314  # expat bounds expansion
        root: Any = None
        for event, element in events:
            name = element.tag.rpartition("}")[2]
            if root is None:
                root = element
                if name != "mediawiki":
                    raise DataError(
                        f"{file.path} is XML but not a MediaWiki dump (<{name}>); give its text"
                        " instead."
                    )
            if event == "start":
                continue
            if name == "namespace" and element.get("key") in ("6", "14"):
                skipped_namespaces.add((element.text or "").strip().lower())
            if name != "page":
                continue
            number += 1
            fields = {child.tag.rpartition("}")[2]: child for child in element.iter()}
            if _field(fields, "ns") not in ("", "0") or "redirect" in fields:
                yield IgnoredText(
                    {
                        (
                            "redirects"
                            if "redirect" in fields
                            else f"pages of namespace {_field(fields, 'ns')}"
                        ): 1
                    }
                )
            elif _field(fields, "text"):
                revisions = sum(child.tag.rpartition("}")[2] == "revision" for child in element)
                if revisions > 1:  # in a dump with histories only the last one is read
                    yield IgnoredText({"earlier revisions": revisions - 1})
                try:
                    text = plain(_field(fields, "text"), skipped_namespaces)
                except (ValueError, RecursionError, mwparserfromhell.parser.ParserError) as error:
                    yield BadLine(file.name, number, f"wikitext that cannot be parsed ({error})")
                else:
                    yield f"{_field(fields, 'title')}\n\n{text}" if text else ""
            root.clear()
    except ElementTree.ParseError as error:
        raise DataError(
            f"{file.path} is not a whole XML file ({error}); download it again."
        ) from None


def _field(fields: dict[str, Any], name: str) -> str:
    return (fields[name].text or "").strip() if name in fields else ""


def extracted_documents(file: SourceFile, stream: Any, _text_column: str) -> Iterator[object]:
    """The documents between `<doc id=...>` and `</doc>` that WikiExtractor writes into wiki_00,
    wiki_01...
    """
    buffer, number, in_document = b"", 0, False
    while True:
        read = stream.read(1 << 20)
        buffer += read
        while True:
            if not in_document:
                match = _OPEN.search(buffer)
                if match is None or (read and match.end() == len(buffer)):
                    break
                if buffer[: match.start()].strip():
                    raise _not_extracted(file, number)
                buffer, in_document = buffer[match.end() :], True
                number += 1
            body, end, tail = buffer.partition(b"\n</doc>")
            if not end:
                break
            buffer, in_document = tail, False
            try:
                yield body.decode().strip("\n")
            except UnicodeDecodeError as error:
                yield BadLine(
                    file.name, number, f"not UTF-8 at byte {error.start + 1} of the document"
                )
        if not read:
            if in_document or buffer.strip():
                raise _not_extracted(file, number)
            return


def _not_extracted(file: SourceFile, number: int) -> DataError:
    return DataError(
        f"{file.path} is not what WikiExtractor writes (<doc ...> to </doc>; document {number});"
        " set data.format to its format."
    )


def plain(wikitext: str, skipped_namespaces: set[str]) -> str:
    """Wikitext as plain text, without links into the `skipped_namespaces`.

    Raises errors of mwparserfromhell.
    """
    import mwparserfromhell

    # twice, because the first pass can uncover more: a comment in a reference
    clean_text = _TAGS.sub("", _TAGS.sub("", wikitext))
    code = mwparserfromhell.parse("".join(_without_tables(clean_text)))
    text = "".join(_words(code, skipped_namespaces))
    text = _SWITCH.sub("", _LEFT_LINK.sub("", _QUOTES.sub("", text)))
    text = _COMMA.sub(",", _FIRST.sub("(", _EMPTY.sub("", text)))
    lines = [_SPACES.sub(" ", line).strip() for line in text.split("\n")]
    return re.sub(
        r"\n{3,}", "\n\n", "\n".join(line for line in lines if not line.startswith(("|", "{|")))
    ).strip()


def _without_tables(text: str) -> Iterator[str]:
    """The text outside of {| and |}, which nest. A table without an end loses only its rows."""
    open_starts: list[int] = []
    cuts: list[tuple[int, int]] = []
    for mark in _TABLE.finditer(text):
        if mark[1]:
            open_starts.append(mark.start())
        elif open_starts:
            start = open_starts.pop()
            cuts = [cut for cut in cuts if cut[0] < start]  # nested ones
            cuts.append((start, mark.end()))
    at = 0
    for start, stop in cuts:
        yield text[at:start]
        at = stop
    yield text[at:]


def _words(code: Any, skipped_namespaces: set[str]) -> Iterator[str]:
    """The words of parsed wikitext. Links in captions are dropped with their pictures."""
    for node in code.nodes:
        kind = type(node).__name__
        if kind == "Text":
            yield _LEFT_TAG.sub("", str(node))
        elif kind == "Wikilink":
            yield from _link(node, skipped_namespaces)
        elif kind == "ExternalLink":
            yield from (
                _words(node.title, skipped_namespaces)
                if node.title
                else ("" if node.brackets else str(node.url),)
            )
        elif kind == "Heading":
            yield from _words(node.title, skipped_namespaces)
        elif kind == "HTMLEntity":
            yield str(node.normalize())
        elif kind == "Argument":
            yield from _words(node.default, skipped_namespaces) if node.default else ()
        elif kind == "Tag":
            tag = str(node.tag).strip().lower()
            if tag in _BREAKS and not node.wiki_markup:
                yield "\n"
            if node.contents and tag not in _LEFT_OUT:
                yield from _words(node.contents, skipped_namespaces)


def _link(node: Any, skipped_namespaces: set[str]) -> Iterator[str]:
    title = str(node.title).strip()
    namespace = title.partition(":")[0].strip().lower() if ":" in title else ""
    if namespace in skipped_namespaces or (node.text is None and _LANGUAGE.match(title)):
        return
    if node.text is not None:
        yield from _words(node.text, skipped_namespaces)
    else:
        yield title.removeprefix(":")
