"""The loss curve: as a matplotlib figure, as a picture file, and as SVG without any library."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from smtrain.core.errors import JobError
from smtrain.core.extras import missing
from smtrain.core.web_page import image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[dict[str, float]]
_NAN = float("nan")
_HELD_OUT = "#d1663d"


def draw(records: Records, title: str) -> Figure:
    """Loss, that on held-out text, and gradient norm by step. Raises `JobError` where matplotlib is not installed."""
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
        loss_axis.plot(*zip(*judged, strict=True), color=_HELD_OUT, marker="o", markersize=3.5, linewidth=1.2)
        loss_axis.legend(["training", "held out"], frameon=False)
    loss_axis.set(ylabel="loss (nats per token)", title=title)
    norm_axis.plot(steps, [record.get("grad_norm", _NAN) for record in records], color="#888888", linewidth=1.0)
    norm_axis.set(ylabel="grad norm", xlabel="step")
    for axis in (loss_axis, norm_axis):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def save_curve(records: Records, path: Path, title: str) -> Path:
    """`draw` into `path` (PNG, or whatever its suffix says); returns it."""
    figure = draw(records, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def svg(
    losses: Sequence[tuple[float, float]], width: int = 720, height: int = 110, points: int = 400,
    validated: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """(step, loss) pairs as an SVG of at most `points` points; empty where there are not two.

    `validated` are those on held-out text, drawn as dots. `width` and `height` are pixels. Its grey can be read on
    light and dark pages.
    """
    pairs = [(step, loss) for step, loss in losses if isfinite(loss)]
    if len(pairs) > points:
        pairs = [pairs[i * (len(pairs) - 1) // (points - 1)] for i in range(points)]
    if len(pairs) < 2:
        return ""
    dots = [(step, loss) for step, loss in validated if isfinite(loss)][-points:]
    every = [*pairs, *dots]
    (x0, x1), low, high = (min(every)[0], max(every)[0]), min(y for _, y in every), max(y for _, y in every)
    left, top, right, bottom = 48, 8, width - 8, height - 20

    def at(x: float, y: float) -> str:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
        up = (y - low) / (high - low) if high > low else 0.5
        return f"{left + across * (right - left):.1f},{bottom - up * (bottom - top):.1f}"

    judged = "".join(
        '<circle cx="{}" cy="{}" r="2.6" fill="{}"/>'.format(*at(x, y).split(","), _HELD_OUT) for x, y in dots
    )
    what = "loss by step, dots: held out," if dots else "loss by step,"
    line = " ".join(at(x, y) for x, y in pairs)
    label = 'font-size="11" font-family="sans-serif" fill="#7a7a7a"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">'
        f'<path d="M{left},{top}V{bottom}H{right}" fill="none" stroke="#888"/>'
        f'<polyline points="{line}" fill="none" stroke="#3d8fd1" stroke-width="1.6"/>{judged}'
        f'<text x="{left - 4}" y="{top + 8}" text-anchor="end" {label}>{high:.3g}</text>'
        f'<text x="{left - 4}" y="{bottom}" text-anchor="end" {label}>{low:.3g}</text>'
        f'<text x="{left}" y="{height - 5}" {label}>{what} {x0:.0f}</text>'
        f'<text x="{right}" y="{height - 5}" text-anchor="end" {label}>{x1:.0f}</text></svg>'
    )


def picture(
    losses: Sequence[tuple[float, float]], width: int = 720, height: int = 110,
    validated: Sequence[tuple[float, float]] = (),
) -> str:  # fmt: skip
    """`svg` as an HTML image, which shrinks with its place."""
    drawn = svg(losses, width, height, validated=validated)
    if not drawn:
        return ""
    return image(drawn, "loss by step", width)
