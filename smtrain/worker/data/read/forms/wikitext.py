"""Wikitext as plain text: what a reader of the article sees as sentences, without templates, tables, references."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_LEFT_OUT = (
    "ref", "gallery", "math", "timeline", "references", "table", "imagemap", "score", "syntaxhighlight", "source",
    "chem", "templatestyles", "graph", "mapframe",
)  # fmt: skip
# by themselves before anything is parsed: one quotation mark too many elsewhere hides them from a parser
_TAGS = re.compile(
    rf"<!--.*?-->|<({'|'.join(_LEFT_OUT)})(?=[\s/>])(?:[^<>]*/>|[^<>]*>.*?</\1\s*>)", re.DOTALL | re.IGNORECASE
)
_TABLE = re.compile(r"^[ \t:*#]*(?:(\{\|)|(\|\})(?!\}))", re.MULTILINE)
_SWITCH = re.compile(r"__[A-Z]+__")
_SPACES = re.compile(r"[ \t\xa0]+")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?:")
_BREAKS = {"br", "hr", "li", "dd", "dt"}
# what a template leaves of the brackets and commas around it
_EMPTY = re.compile(r"(?: |^)\([\s,;:]*\)", re.MULTILINE)
_FIRST = re.compile(r"\(\s*(?:[,;]\s*)+")
_COMMA = re.compile(r" +,(?=\s|$)")
_QUOTES = re.compile(r"'{2,}")
_LEFT_TAG = re.compile(r"</?(?:ref|small|big|div|span|sub|sup|center|font|p|u|i|b)(?:\s[^<>]*)?/?>", re.IGNORECASE)
_LEFT_LINK = re.compile(r"\[\[(?:[^][|]*\|)?|\]\]")


def plain(wikitext: str, dropped: set[str]) -> str:
    """The text; links into the namespaces `dropped` go. Raises what mwparserfromhell does."""
    import mwparserfromhell

    # the second time for what the first one uncovers: a comment in a reference
    without = _TAGS.sub("", _TAGS.sub("", wikitext))
    code = mwparserfromhell.parse("".join(_without_tables(without)))
    text = "".join(_said(code, dropped))
    text = _SWITCH.sub("", _LEFT_LINK.sub("", _QUOTES.sub("", text)))
    text = _COMMA.sub(",", _FIRST.sub("(", _EMPTY.sub("", text)))
    lines = [_SPACES.sub(" ", line).strip() for line in text.split("\n")]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line for line in lines if not line.startswith(("|", "{|")))).strip()


def _without_tables(text: str) -> Iterator[str]:
    """What stands outside of {| and |}, which nest; of a table without an end, its first line goes with the rows."""
    opened: list[int] = []
    cuts: list[tuple[int, int]] = []
    for mark in _TABLE.finditer(text):
        if mark[1]:
            opened.append(mark.start())
        elif opened:
            start = opened.pop()
            cuts = [cut for cut in cuts if cut[0] < start]  # those within
            cuts.append((start, mark.end()))
    at = 0
    for start, stop in cuts:
        yield text[at:start]
        at = stop
    yield text[at:]


def _said(code: Any, dropped: set[str]) -> Iterator[str]:
    """The words of parsed wikitext. Links within descriptions of pictures go with the pictures."""
    for node in code.nodes:
        kind = type(node).__name__
        if kind == "Text":
            yield _LEFT_TAG.sub("", str(node))
        elif kind == "Wikilink":
            yield from _link(node, dropped)
        elif kind == "ExternalLink":
            yield from _said(node.title, dropped) if node.title else ("" if node.brackets else str(node.url),)
        elif kind == "Heading":
            yield from _said(node.title, dropped)
        elif kind == "HTMLEntity":
            yield str(node.normalize())
        elif kind == "Argument":
            yield from _said(node.default, dropped) if node.default else ()
        elif kind == "Tag":
            tag = str(node.tag).strip().lower()
            if tag in _BREAKS and not node.wiki_markup:
                yield "\n"
            if node.contents and tag not in _LEFT_OUT:
                yield from _said(node.contents, dropped)


def _link(node: Any, dropped: set[str]) -> Iterator[str]:
    title = str(node.title).strip()
    namespace = title.partition(":")[0].strip().lower() if ":" in title else ""
    if namespace in dropped or (node.text is None and _LANGUAGE.match(title)):
        return
    if node.text is not None:
        yield from _said(node.text, dropped)
    else:
        yield title.removeprefix(":")
