"""The loss curve as a matplotlib figure and as a picture file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import JobError
from smtrain.core.extras import missing_module
from smtrain.core.files import replacing
from smtrain.core.pages.charts import HELD_OUT

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

Records = Sequence[dict[str, float]]
_NAN = float("nan")
_REWARDS = {
    "rewards/chosen": "#1f77b4",
    "rewards/rejected": "#d95f02",
    "rewards/margins": "#555555",
}


def figure_class() -> type[Figure]:
    """A matplotlib `Figure` that a notebook shows, with or without its inline mode.

    Raises `ImportError`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    class Picture(Figure):
        """IPython can only draw a plain `Figure` without pyplot after `%matplotlib inline`."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            canvas: Any = FigureCanvasAgg(self)  # matplotlib's canvases are not typed
            canvas.print_png(buffer)
            return buffer.getvalue()

    return Picture


def draw(records: Records, title: str) -> Figure:
    """Loss, held-out loss and gradient norm by step, and the rewards of a training on pairs. Raises
    `JobError` if matplotlib is not installed.
    """
    pair_records = [record for record in records if "rewards/chosen" in record]
    try:
        figure = figure_class()(figsize=(8, 6.5 if pair_records else 4.5), layout="constrained")
    except ImportError:
        raise JobError(missing_module("matplotlib")) from None
    steps = [record["step"] for record in records]
    axes: Any = figure.subplots(
        2 + bool(pair_records), 1, sharex=True, height_ratios=(3, *([2] * bool(pair_records)), 1)
    )
    loss_axis, norm_axis = axes[0], axes[-1]
    loss_axis.plot(
        steps, [record.get("loss", _NAN) for record in records], color="#1f77b4", linewidth=1.6
    )
    held_out = [(record["step"], record["val_loss"]) for record in records if "val_loss" in record]
    if held_out:
        loss_axis.plot(
            *zip(*held_out, strict=True), color=HELD_OUT, marker="o", markersize=3.5, linewidth=1.2
        )
        loss_axis.legend(["training", "held out"], frameon=False)
    loss_axis.set(
        ylabel="loss (per pair)" if pair_records else "loss (nats per token)", title=title
    )
    for key, colour in _REWARDS.items() if pair_records else ():
        values = [(record["step"], record[key]) for record in pair_records if key in record]
        axes[1].plot(
            *zip(*values, strict=True), color=colour, linewidth=1.2, label=key.partition("/")[2]
        )
    if pair_records:
        axes[1].legend(frameon=False)
        axes[1].set(ylabel="rewards")
    norm_axis.plot(
        steps, [record.get("grad_norm", _NAN) for record in records], color="#888888", linewidth=1.0
    )
    norm_axis.set(ylabel="grad norm", xlabel="step")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def save_curve(records: Records, path: Path, title: str) -> Path:
    """`draw` into `path` (PNG, or the format of its suffix); returns it."""
    figure = draw(records, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:] or "png")
    return path


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """`values` as at most `width` bars between the smallest and the largest; each bar is the mean
    of its values.
    """
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    bins = min(width, len(finite))
    cuts = [len(finite) * i // bins for i in range(bins + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(
        _BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means
    )


COLUMNS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu")


def frame(records: Sequence[dict[str, float]]) -> DataFrame:
    """One row a step (the index), the standard columns first.

    Raises `JobError` if pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise JobError(missing_module("pandas")) from None
    extra_columns = sorted({key for record in records for key in record} - {*COLUMNS, "step", "of"})
    rows = [[record.get(column) for column in (*COLUMNS, *extra_columns)] for record in records]
    steps = pandas.Index([int(record["step"]) for record in records], name="step", dtype="int64")
    return pandas.DataFrame(rows, index=steps, columns=[*COLUMNS, *extra_columns], dtype="float64")
