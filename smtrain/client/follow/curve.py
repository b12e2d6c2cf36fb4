"""The loss curve as a matplotlib figure and as a picture file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from smtrain.core.errors import JobError
from smtrain.core.extras import missing
from smtrain.core.pages.charts import HELD_OUT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[dict[str, float]]
_NAN = float("nan")


def draw(records: Records, title: str) -> Figure:
    """Loss, held-out loss and gradient norm by step. Raises `JobError` if matplotlib is not installed."""
    try:
        from smtrain.client.follow.figure import Picture
    except ImportError:
        raise JobError(missing("matplotlib")) from None
    steps = [record["step"] for record in records]
    figure = Picture(figsize=(8, 4.5), layout="constrained")
    loss_axis, norm_axis = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    loss_axis.plot(steps, [record.get("loss", _NAN) for record in records], color="#1f77b4", linewidth=1.6)
    judged = [(record["step"], record["val_loss"]) for record in records if "val_loss" in record]
    if judged:
        loss_axis.plot(*zip(*judged, strict=True), color=HELD_OUT, marker="o", markersize=3.5, linewidth=1.2)
        loss_axis.legend(["training", "held out"], frameon=False)
    loss_axis.set(ylabel="loss (nats per token)", title=title)
    norm_axis.plot(steps, [record.get("grad_norm", _NAN) for record in records], color="#888888", linewidth=1.0)
    norm_axis.set(ylabel="grad norm", xlabel="step")
    for axis in (loss_axis, norm_axis):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def save_curve(records: Records, path: Path, title: str) -> Path:
    """`draw` into `path` (PNG, or the format of its suffix); returns it."""
    figure = draw(records, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
