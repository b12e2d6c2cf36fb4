"""Quality filters of the literature, from datatrove: Gopher's two, C4's, FineWeb's.

They split words with spaCy's blank English pipeline, which needs no download.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from smtrain.worker.data.clean.cleaning import require

FILTERS = {
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "c4": ("c4_filters", "C4QualityFilter"),
    "fineweb": ("fineweb_quality_filter", "FineWebQualityFilter"),
}
PACKAGES = ("datatrove", "spacy", "regex")
Judge = Callable[[str], tuple[str | None, str]]
"""Returns the text that a filter leaves, or None, and a reason."""


def judge(name: str) -> Judge:
    """The filter of that name, with datatrove's own settings.

    Raises DataError if it is not installed.
    """
    require("data.filters", *PACKAGES)
    from datatrove.data import Document

    module, kind = FILTERS[name]
    filter_: Any = getattr(importlib.import_module(f"datatrove.pipeline.filters.{module}"), kind)()

    def decide(text: str) -> tuple[str | None, str]:
        document = Document(text=text, id="")
        try:
            result = filter_.filter(document)
        except (
            ZeroDivisionError,
            ValueError,
            IndexError,
        ) as error:  # for texts that its author did not expect
            return None, type(error).__name__
        is_good, reason = result if isinstance(result, tuple) else (result, "")
        return (document.text if is_good else None), reason

    return decide
