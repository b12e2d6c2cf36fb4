"""A comparison as a figure, and as a self-contained page."""

from __future__ import annotations

import io
import itertools
import json
from array import array
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import DataError
from smtrain.core.extras import missing_module
from smtrain.core.files import only_writer, replacing_files
from smtrain.core.pages.page import image, render
from smtrain.core.text import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from smtrain.tools.compare.compare import Comparison, Curve

_COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")
_WIDTH = 9.0
_POINTS = 12_000
"""Most points of a line; the picture is some 1,400 pixels wide."""
_PAGE_WIDTHS = {"broad": _WIDTH, "narrow": 4.6}
"""Widths of the pictures of a page in inches; the page shows the one that fits the reader's screen.
"""
_FEW_POINTS = 40
"""Curves of so many points have a mark at each, as a single one has no line."""
_AXES = {"step": "step", "tokens": "tokens", "time": "seconds"}


def draw(comparison: Comparison, width: float = _WIDTH) -> Figure:
    """Loss over its relative difference, and gradient norm likewise if it is logged; raw pale,
    smoothed strong.

    `width` is in inches.

    Raises DataError if matplotlib is not installed.
    """
    try:
        from smtrain.client.follow.curve import figure_class

        Picture = figure_class()
    except ImportError:
        raise DataError(missing_module("matplotlib")) from None
    panes = _panes(comparison)
    figure = Picture(figsize=(width, 1.2 + 1.2 * sum(panes.values())), layout="constrained")
    drawn: Any = figure.subplots(
        len(panes), 1, sharex=True, squeeze=False, height_ratios=list(panes.values())
    )
    rows = list(drawn[:, 0])
    axes = dict(zip(panes, rows, strict=True))
    _rows(comparison, axes["loss"], axes.get("loss difference"), "loss", "loss (nats per token)")
    if "loss difference" in axes:
        axes["loss difference"].axhspan(
            -100 * comparison.tolerance, 100 * comparison.tolerance, color="#888888", alpha=0.15
        )
    if "grad_norm" in axes:
        _rows(
            comparison,
            axes["grad_norm"],
            axes.get("grad_norm difference"),
            "grad_norm",
            "grad norm",
        )
    if comparison.by == "step":
        steps = {step for pair in comparison.pairs for step in pair.loss.x}
        rows[-1].xaxis.get_major_locator().set_params(integer=True)
        if len(steps) == 1:
            rows[-1].set_xticks(list(steps))
    rows[-1].set_xlabel(_AXES[comparison.by])
    rows[0].legend(frameon=False)
    for axis in rows:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _panes(comparison: Comparison) -> dict[str, int]:
    """The panes from top to bottom, each with its share of the height; none that would be empty."""
    panes = {}
    for key, share in (("loss", 3), ("grad_norm", 2)):
        curves = [getattr(pair, key) for pair in comparison.pairs]
        if all(curves):
            panes[key] = share
            if any(isfinite(d) for curve in curves for d in curve.difference):
                panes[f"{key} difference"] = 1
    return panes


def _rows(
    comparison: Comparison, curve_axes: Any, difference_axes: Any | None, key: str, label: str
) -> None:
    """Draw a metric, and its differences if they have a pane."""
    base = max((getattr(pair, key) for pair in comparison.pairs), key=lambda curve: len(curve.x))
    base = thin(base)
    curve_axes.plot(base.x, base.baseline, color=_COLOURS[0], linewidth=0.7, alpha=0.3)
    # dashed and on top, so that a curve below it can be seen
    curve_axes.plot(
        base.x,
        base.smooth_baseline,
        color=_COLOURS[0],
        linewidth=1.6,
        linestyle=(0, (4, 3)),
        zorder=3,
        **_marker(base),
        label=clean(comparison.series[0].name),
    )
    for number, pair in enumerate(comparison.pairs, start=1):
        curve, colour = thin(getattr(pair, key)), _COLOURS[number % len(_COLOURS)]
        curve_axes.plot(curve.x, curve.values, color=colour, linewidth=0.7, alpha=0.3)
        curve_axes.plot(
            curve.x,
            curve.smooth,
            color=colour,
            linewidth=1.6,
            label=clean(pair.name),
            **_marker(curve),
        )
        if difference_axes is not None:
            difference_axes.plot(
                curve.x,
                [100 * d for d in curve.difference],
                color=colour,
                linewidth=1.2,
                **_marker(curve),
            )
        if key == "loss" and pair.left_at is not None:
            curve_axes.axvline(pair.left_at, color=colour, linestyle=":", linewidth=1)
    for number, training in enumerate(comparison.series):
        if not training.rate_changes:
            continue
        places = dict(
            zip(
                (record["step"] for record in training.records),
                training.along(comparison.by),
                strict=True,
            )
        )
        for step, old, new in training.rate_changes:
            curve_axes.axvline(
                places.get(step, step),
                color=_COLOURS[number % len(_COLOURS)],
                linestyle="--",
                linewidth=1,
                label=(
                    clean(f"{training.name}: learning rate {old} to {new}")
                    if key == "loss"
                    else None
                ),
            )
    curve_axes.set_ylabel(label)
    if difference_axes is not None:
        difference_axes.set_ylabel("difference, %")
        difference_axes.axhline(0, color="#555555", linewidth=0.8)


def _marker(curve: Curve) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3} if len(curve.x) <= _FEW_POINTS else {}


def thin(curve: Curve) -> Curve:
    """The curve at so many points as a picture can show: of each stretch the extremes and gaps of
    each line.
    """
    count = len(curve.x)
    if count <= _POINTS:
        return curve
    columns = [getattr(curve, field.name) for field in fields(curve)]
    width = -(-count * 3 * len(columns) // _POINTS)
    indices: list[int] = []
    for low in range(0, count, width):
        stretch = range(low, min(low + width, count))
        extremes: set[int] = set()
        for values in columns:
            finite = [i for i in stretch if isfinite(values[i])]
            extremes |= {choice(finite, key=values.__getitem__) for choice in (min, max) if finite}
            extremes |= set(
                itertools.islice((i for i in stretch if not isfinite(values[i])), 1)
            )  # a gap of the line
        indices += sorted(extremes)
    return type(curve)(*(array("d", (values[i] for i in indices)) for values in columns))


def page(comparison: Comparison, *, as_document: bool = True) -> str:
    """HTML with the verdict, the numbers and the picture: a document if `as_document`, else a part
    of one for a notebook.
    """
    summary = comparison.to_dict()
    rows = (summary["baseline"], *summary["compared"])
    columns = [
        column
        for column in (
            "name",
            "steps",
            "last_step",
            "last_loss",
            "tokens_per_s",
            "tokens_per_dollar",
        )
        if any(row[column] is not None for row in rows)
    ]
    table: dict[str, Any] = {
        "head": [column.replace("_", " ") for column in columns],
        "rows": [[_cell(row[column]) for column in columns] for row in rows],
    }
    if not as_document:
        picture = image(_svg(comparison, _WIDTH), "the curves and their difference", 900)
        return render("comparison.html", comparison=comparison, picture=picture, **table)
    title = " against ".join(training.name for training in comparison.series)
    pictures = [(css, _svg(comparison, width)) for css, width in _PAGE_WIDTHS.items()]
    generator = "smtrain compare"
    return render(
        "compare.html",
        title=title,
        generator=generator,
        comparison=comparison,
        pictures=pictures,
        **table,
    )


def _svg(comparison: Comparison, width: float) -> str:
    """The picture as an element, its words as text in the reader's font."""
    from matplotlib import rc_context

    svg = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        draw(comparison, width).savefig(svg, format="svg")
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def save(comparison: Comparison, folder: Path) -> list[Path]:
    """Replace compare.png, compare.html and compare.json in `folder`; returns their paths.

    Raises OSError as files do, and DataError if another process writes them.
    """
    png, html, summary = names = [f"compare.{end}" for end in ("png", "html", "json")]
    with only_writer(folder / png, DataError), replacing_files(folder, *names) as new:
        draw(comparison).savefig(new / png, dpi=150)
        (new / html).write_text(page(comparison), "utf-8")
        (new / summary).write_text(json.dumps(comparison.to_dict(), indent=2) + "\n", "utf-8")
    return [folder / name for name in names]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
