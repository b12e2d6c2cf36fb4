"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """`values` as at most `width` bars between the smallest and the largest; each bar is the mean of its values."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    bins = min(width, len(finite))
    cuts = [len(finite) * i // bins for i in range(bins + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1)) if span else 0] for mean in means)
