"""The live panel in a notebook: a block of HTML, updated in place."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from smtrain.client.follow.follower import Event
from smtrain.client.follow.html import block, curves
from smtrain.client.follow.panel import format_line_below_numbers
from smtrain.client.follow.progress import Progress

_EVERY_S = 0.5
_LINES = 8


def is_in_notebook() -> bool:
    """True if a notebook shows the output of this process. IPython is not imported for that."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def cell() -> int | None:
    """The number of the running cell; None outside a notebook."""
    return int(sys.modules["IPython"].get_ipython().execution_count) if is_in_notebook() else None


def bundle_of(progress: Progress) -> dict[str, str]:
    """The panel for a notebook's display: HTML, and a line of text for frontends without HTML."""
    lines = [
        format_line_below_numbers(line, progress.hosts) for line in list(progress.lines)[-_LINES:]
    ]
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "text/html": block(progress, lines, _hint(progress)),
        "text/plain": f"{progress.name}: {progress.summary(now)}",
    }


def _hint(progress: Progress) -> str:
    if progress.has_ended:
        return curves(progress)
    stop = f'smtrain.Job("{progress.name}").stop() stops it' + (
        ", after a checkpoint" if progress.last else ""
    )
    return f"interrupting the kernel leaves it running; the same cell comes back to it; {stop}"


@contextmanager
def notebook_panel(progress: Progress, keep: bool) -> Iterator[Callable[[Event], None]]:
    """Yield the function that takes the events; the panel is removed at the end unless `keep`."""
    from IPython import display

    make: Any = display  # IPython's types leave these out
    handle = make.display(bundle_of(progress), raw=True, display_id=True)
    drawn_at = time.monotonic()

    def take(event: Event) -> None:
        nonlocal drawn_at
        if time.monotonic() - drawn_at >= _EVERY_S:
            handle.update(bundle_of(progress), raw=True)
            drawn_at = time.monotonic()

    try:
        yield take
    finally:
        empty_bundle = {"text/html": "", "text/plain": ""}
        handle.update(bundle_of(progress) if keep else empty_bundle, raw=True)
