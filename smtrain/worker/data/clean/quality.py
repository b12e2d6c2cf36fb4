"""The quality filters that papers cite, as datatrove has them: Gopher's two, C4's, FineWeb's.

Their words are those of spaCy's blank English pipeline, which needs no download; with it they run offline.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from smtrain.core.errors import DataError
from smtrain.core.extras import missing, present

FILTERS = {
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "c4": ("c4_filters", "C4QualityFilter"),
    "fineweb": ("fineweb_quality_filter", "FineWebQualityFilter"),
}
PACKAGES = ("datatrove", "spacy", "regex")
Judge = Callable[[str], tuple[str | None, str]]
"""What a filter leaves of a text, None for nothing, and why."""


def lacking() -> str:
    """What to install before filters can run; "" for nothing."""
    package = next((name for name in PACKAGES if not present(name)), None)
    return missing(package) if package else ""


def judge(name: str) -> Judge:
    """The filter of that name, with datatrove's own settings. Raises DataError where it is not installed."""
    if sentence := lacking():
        raise DataError(f"data.filters: {sentence}.")
    from datatrove.data import Document

    module, kind = FILTERS[name]
    filter_: Any = getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), kind)()

    def decide(text: str) -> tuple[str | None, str]:
        document = Document(text=text, id="")
        try:
            said = filter_.filter(document)
        except (ZeroDivisionError, ValueError, IndexError) as error:  # of texts that its author did not think of
            return None, type(error).__name__
        kept, reason = said if isinstance(said, tuple) else (said, "")
        return (document.text if kept else None), reason

    return decide
