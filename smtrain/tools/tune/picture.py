"""A tuning to look at: the objective over each key, and the curves of all trials."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smtrain.core.errors import ConfigError
from smtrain.core.extras import missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from smtrain.tools.tune.trials import Tuning

_FINISHED, _OTHER, _BEST = "#1f77b4", "#999999", "#d95f02"


def draw(tuning: Tuning) -> Figure:
    """One panel a key, and one with the curves where they are known. Raises `ConfigError` without matplotlib."""
    try:
        from smtrain.client.follow.curve import figure_class

        Picture = figure_class()
    except ImportError:
        raise ConfigError([missing("matplotlib")]) from None
    curves = [trial for trial in tuning.trials if len(trial.curve) > 1]
    panels = len(tuning.axes) + bool(curves)
    figure = Picture(figsize=(4.2 * panels, 3.6), layout="constrained")
    row: Any = figure.subplots(1, panels, squeeze=False)[0]
    best = tuning.best
    for panel, axis in zip(row, tuning.axes, strict=False):
        for trial in tuning.trials:
            if trial.value is None:
                continue
            text = trial.values[axis.key]
            at = float(text) if axis.ranged else axis.values.index(text)
            chosen = best is not None and trial.number == best.number
            colour = _BEST if chosen else _FINISHED if trial.status == "finished" else _OTHER
            panel.plot(at, trial.value, "o", color=colour, markersize=8 if chosen else 5, zorder=3 if chosen else 2)
        if axis.log:
            panel.set_xscale("log")
        if not axis.ranged:
            panel.set_xticks(range(len(axis.values)), axis.values)
        panel.set_xlabel(axis.key)
        panel.set_ylabel(tuning.objective)
    for trial in curves:
        chosen = best is not None and trial.number == best.number
        colour = _BEST if chosen else _FINISHED if trial.status == "finished" else _OTHER
        steps, values = zip(*trial.curve, strict=True)
        row[-1].plot(steps, values, color=colour, linewidth=2 if chosen else 1, zorder=3 if chosen else 2)
    if curves:
        row[-1].set_xlabel("step")
    for panel in row:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure
