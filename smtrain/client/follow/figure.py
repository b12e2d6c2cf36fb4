"""A figure that a notebook shows, whether or not the kernel has switched matplotlib's inline drawing on."""

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
