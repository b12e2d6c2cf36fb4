"""Check from its text that an HTML page works on a phone."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = {"meta", "br", "img", "link", "hr", "input"}
_OPTIONAL = {"tr", "td", "th", "p", "li", "tbody", "thead"}


class Boxes(HTMLParser):
    """Tables outside of a box that scrolls, and what the page says of its width."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.tables, self.loose, self.viewport = 0, 0, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "meta" and attributes.get("name") == "viewport":
            self.viewport = attributes.get("content") or ""
        if tag == "table":
            self.tables += 1
            self.loose += not any(kind == "wide" for _, kind in self.open)
        if tag not in _VOID | _OPTIONAL:
            self.open.append((tag, attributes.get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while tag not in _VOID | _OPTIONAL and self.open and self.open.pop()[0] != tag:
            pass


def assert_fits_a_phone(page: str) -> None:
    """The page takes the screen's width; tables scroll in a separate box, whose shadow shows
    it.
    """
    boxes = Boxes(page)
    assert "width=device-width" in boxes.viewport
    assert boxes.tables, "a page without a table shows nothing of how they behave"
    assert not boxes.loose, "a table that widens the whole page"
    style = page.partition("<style>")[2].partition("</style>")[0]
    wide = style.partition(".wide{")[2].partition("}")[0]
    assert "overflow-x:auto" in wide
    assert wide.count("var(--shade)") == 2, "a shadow at both ends"
    assert "svg{max-width:100%" in style
