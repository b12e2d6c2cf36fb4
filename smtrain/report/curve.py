"""The loss curve as a picture file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_curve(records: Sequence[dict[str, float]], path: Path, title: str) -> Path:
    """Draw loss and gradient norm by step into `path` (PNG, or whatever its suffix says); returns it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record["step"] for record in records]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axis, norm_axis = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss_axis.plot(steps, [record["loss"] for record in records], color="#1f77b4", linewidth=1.6)
    loss_axis.set(ylabel="loss (nats per token)", title=title)
    norm_axis.plot(steps, [record["grad_norm"] for record in records], color="#888888", linewidth=1.0)
    norm_axis.set(ylabel="grad norm", xlabel="step")
    for axis in (loss_axis, norm_axis):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
