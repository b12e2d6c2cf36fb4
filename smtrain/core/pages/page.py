"""Fill the templates of this folder.

Every value is cleaned and escaped; the pages fetch nothing.
"""

from __future__ import annotations

import base64
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smtrain.core.text import clean

if TYPE_CHECKING:
    from jinja2 import Environment

NO_MATH = "tex2jax_ignore mathjax_ignore"
"""Classes that keep Jupyter from typesetting text between two dollar signs as a formula."""


class Cell(NamedTuple):
    """A cell of a table with a CSS class: `n` for a number, `one` for text without line breaks."""

    text: str
    css: str = ""
    below: str = ""
    tone: str = ""
    """CSS class of the text alone: `good`, `bad` or `warn`."""


def number(text: str, below: str = "") -> Cell:
    """A right-aligned cell, with a smaller second line."""
    return Cell(text, "n", below)


def render(template: str, /, *, hide_secrets: bool = False, **values: Any) -> str:
    """Fill a template.

    Only `| safe` in a template inserts the result into another one without escaping it again.
    """
    return _environment(hide_secrets).get_template(f"{template}.j2").render(values, no_math=NO_MATH)


@cache
def _environment(hide_secrets: bool) -> Environment:
    from jinja2 import (
        Environment,
        FileSystemLoader,
        StrictUndefined,
    )  # not at import: it costs every command 50 ms

    from smtrain.core.config.secrets import hide

    def safe_text(value: object) -> object:
        if hasattr(value, "__html__"):
            return value
        text = clean(str(value))
        return hide(text) if hide_secrets else text

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=safe_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def image(svg: str, words: str, width: int) -> str:
    """An SVG as an image of at most `width` pixels: an untrusted notebook shows SVG only inside an
    image.
    """
    return render(
        "image.html", data=base64.b64encode(svg.encode()).decode(), words=words, width=width
    )
