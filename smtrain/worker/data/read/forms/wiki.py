"""Wikipedia: MediaWiki's XML dumps, whose wikitext becomes plain text, and what WikiExtractor writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

from smtrain.core.errors import DataError
from smtrain.worker.data.read.forms.wikitext import plain
from smtrain.worker.data.read.reading import BadLine
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.read.unread import UnreadText

_OPEN = re.compile(rb"<doc\s[^>\n]*>\s*")


def dump_documents(file: SourceFile, stream: Any, _text_column: str) -> Iterator[object]:
    """The title and the text of every article (namespace 0, no redirect) of a dump, and counts of the other pages.

    Templates, tables, references, files and categories are left out, links keep their words. Raises DataError without
    mwparserfromhell, or where the file is no dump.
    """
    try:
        import mwparserfromhell
    except ImportError:
        raise DataError(
            f"{file.path} is a MediaWiki dump, which needs the package mwparserfromhell; run `pip install "
            "smtrain[wiki]`, or give WikiExtractor's output."
        ) from None
    dropped = {"file", "image", "category"}
    number = 0
    try:
        events = ElementTree.iterparse(_Stream(stream), events=("start", "end"))  # noqa: S314  # expat bounds expansion
        root: Any = None
        for event, element in events:
            name = element.tag.rpartition("}")[2]
            if root is None:
                root = element
                if name != "mediawiki":
                    raise DataError(f"{file.path} is XML but not a MediaWiki dump (<{name}>); give its text instead.")
            if event == "start":
                continue
            if name == "namespace" and element.get("key") in ("6", "14"):
                dropped.add((element.text or "").strip().lower())
            if name != "page":
                continue
            number += 1
            found = {child.tag.rpartition("}")[2]: child for child in element.iter()}
            if _said(found, "ns") not in ("", "0") or "redirect" in found:
                yield UnreadText(
                    {"redirects" if "redirect" in found else f"pages of namespace {_said(found, 'ns')}": 1}
                )
            elif _said(found, "text"):
                revisions = sum(child.tag.rpartition("}")[2] == "revision" for child in element)
                if revisions > 1:  # of a dump of whole histories, the last one is read
                    yield UnreadText({"earlier revisions": revisions - 1})
                try:
                    text = plain(_said(found, "text"), dropped)
                except (ValueError, RecursionError, mwparserfromhell.parser.ParserError) as error:
                    yield BadLine(file.name, number, f"wikitext that cannot be parsed ({error})")
                else:
                    yield f"{_said(found, 'title')}\n\n{text}" if text else ""
            root.clear()
    except ElementTree.ParseError as error:
        raise DataError(f"{file.path} is not a whole XML file ({error}); download it again.") from None


def _said(found: dict[str, Any], name: str) -> str:
    return (found[name].text or "").strip() if name in found else ""


def extracted_documents(file: SourceFile, stream: Any, _text_column: str) -> Iterator[object]:
    """What stands between `<doc id=...>` and `</doc>`, as WikiExtractor writes it into wiki_00, wiki_01..."""
    held, number, inside = b"", 0, False
    while True:
        read = stream.read(1 << 20)
        held += read
        while True:
            if not inside:
                match = _OPEN.search(held)
                if match is None or (read and match.end() == len(held)):
                    break
                if held[: match.start()].strip():
                    raise _not_extracted(file, number)
                held, inside = held[match.end() :], True
                number += 1
            body, end, rest = held.partition(b"\n</doc>")
            if not end:
                break
            held, inside = rest, False
            try:
                yield body.decode().strip("\n")
            except UnicodeDecodeError as error:
                yield BadLine(file.name, number, f"not UTF-8 at byte {error.start + 1} of the document")
        if not read:
            if inside or held.strip():
                raise _not_extracted(file, number)
            return


def _not_extracted(file: SourceFile, number: int) -> DataError:
    return DataError(
        f"{file.path} is not what WikiExtractor writes (<doc ...> to </doc>; document {number}); set data.format to "
        "what it is."
    )


class _Stream:
    """What ElementTree reads of."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, count: int = -1) -> bytes:
        return bytes(self._stream.read(count if count > 0 else 1 << 16))
