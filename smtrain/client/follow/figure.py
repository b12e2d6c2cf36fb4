"""A figure that a notebook shows, with or without matplotlib's inline mode."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A `Figure` without pyplot: IPython knows how to draw those only after `%matplotlib inline`."""

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        canvas: Any = FigureCanvasAgg(self)  # matplotlib's canvases are not typed
        canvas.print_png(drawn)
        return drawn.getvalue()
