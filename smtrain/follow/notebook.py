"""The live panel in a notebook: the terminal's, as HTML, drawn again in its place."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from smtrain.follow.follower import Event
from smtrain.follow.panel import LivePanel
from smtrain.follow.progress import Progress

_EVERY_S = 0.5
_WIDTH = 110  # characters
_BLOCK = '<pre style="line-height:1.25;white-space:pre;overflow-x:auto">{code}</pre>'


def here() -> bool:
    """Whether a notebook shows what this process prints. IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return hasattr(shell, "kernel")


def html_of(panel: LivePanel) -> str:
    """The panel as a block of HTML, with everything escaped that a job wrote."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
    console.print(panel)
    return console.export_html(inline_styles=True, code_format=_BLOCK)


@contextmanager
def notebook_panel(progress: Progress, keep: bool) -> Iterator[Callable[[Event], None]]:
    """Yields what takes the events; the panel goes at the end unless `keep`."""
    from IPython import display

    make: Any = display  # IPython's types leave these out
    panel = LivePanel(progress, way_out="interrupting the kernel leaves it running")
    handle = make.display(make.HTML(html_of(panel)), display_id=True)
    drawn = time.monotonic()

    def take(event: Event) -> None:
        nonlocal drawn
        if time.monotonic() - drawn >= _EVERY_S:
            handle.update(make.HTML(html_of(panel)))
            drawn = time.monotonic()

    try:
        yield take
    finally:
        handle.update(make.HTML(html_of(panel) if keep else ""))
