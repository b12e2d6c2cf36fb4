"""Compare trainings with the first one: differences over windows, the point of divergence, a
verdict.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, get_args

from smtrain.core.errors import ConfigError, DataError
from smtrain.core.public_api import public
from smtrain.core.suggest import hint
from smtrain.core.targets import TargetName
from smtrain.tools.compare.series import Series, with_tokens
from smtrain.tools.compare.sources import read

By = Literal["step", "tokens", "time"]
USUAL = 0.02
"""Windowed losses of two seeds of one training differ less if a step has many tokens: with 4,096 of
them they were up to 3.1 % apart in windows of 20 steps, 1 % in the mean (a 2-layer Llama, 400
steps, `smtrain compare`).
"""
_X_UNITS = {"step": "step", "tokens": "tokens", "time": "s"}


@dataclass(frozen=True)
class Curve:
    """A metric at the points that a training shares with the baseline: `x`, and both values, raw
    and smoothed.

    `difference` is (smoothed - baseline's smoothed) / |baseline's smoothed| at each `x`.
    """

    x: Sequence[float]
    values: Sequence[float]
    baseline: Sequence[float]
    smooth: Sequence[float]
    smooth_baseline: Sequence[float]
    difference: Sequence[float]

    def mean(self) -> float:
        """Mean size of the differences over all full windows."""
        sizes = array("d", (abs(d) for d in self.difference if isfinite(d)))
        return sum(sizes) / len(sizes) if sizes else nan

    def largest(self) -> tuple[float, float]:
        """The difference of the greatest size, and its x."""
        pairs = ((d, x) for d, x in zip(self.difference, self.x, strict=True) if isfinite(d))
        return max(pairs, key=lambda pair: abs(pair[0]), default=(nan, nan))

    def leaves(self, tolerance: float, window: int) -> float | None:
        """The x at which the difference, smoothed over `window` points, exceeds `tolerance`; None
        if it never does.

        The window that first exceeds it contains the place itself; the unsmoothed differences jump
        there.
        """
        pairs = enumerate(zip(self.difference, self.values, self.baseline, strict=True))
        at = next(
            (i for i, (d, a, b) in pairs if abs(d) > tolerance or isfinite(a) != isfinite(b)), None
        )
        if at is None:
            return None
        low = max(0, at - (window - 1) // 2)
        neighbours = slice(low, at + window // 2 + window)
        pairs_near = list(zip(self.values[neighbours], self.baseline[neighbours], strict=True))
        if not all(isfinite(a) and isfinite(b) and b for a, b in pairs_near):
            return self.x[at]
        split = _turn([(a - b) / abs(b) for a, b in pairs_near], tolerance)
        return self.x[at if split is None else low + split]


@dataclass(frozen=True)
class Pair:
    """A training and the baseline; `grad_norm` is None if one of them does not log it."""

    name: str
    loss: Curve
    grad_norm: Curve | None
    left_at: float | None
    """The x at which the loss first exceeds the tolerance."""
    verdict: str

    @property
    def result(self) -> Literal["agree", "differ", "cannot be compared"]:
        """The verdict in a word or three."""
        if not isfinite(self.loss.largest()[0]):
            return "cannot be compared"
        return "agree" if self.left_at is None else "differ"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. `within` is False if a loss exceeds the tolerance."""

    by: By
    window: int
    tolerance: float
    series: tuple[Series, ...]
    pairs: tuple[Pair, ...]

    @property
    def within(self) -> bool:
        return all(pair.left_at is None for pair in self.pairs)

    @property
    def verdict(self) -> str:
        """The remarks, then a sentence for each training but the first and each resume that changed
        a learning rate.
        """
        return "\n".join([*self.remarks, *(pair.verdict for pair in self.pairs), *self.changes])

    @property
    def remarks(self) -> list[str]:
        """A sentence for each log that holds several runs, and for each training compared with
        itself.
        """
        first, *compared_series = self.series
        several = [
            f"{training.name} holds {training.beginnings} runs, as its steps begin again; the last"
            " numbers of each step are compared, so give each run a separate file."
            for training in self.series
            if training.beginnings > 1
        ]
        self_comparisons = [
            f"{training.name} is compared with itself ({training.of})."
            for training in compared_series
            if _is_same(first, training)
        ]
        return several + self_comparisons

    @property
    def changes(self) -> list[str]:
        """A sentence for each resume that changed a learning rate."""
        return [
            f"{training.name} was resumed at step {step:,.0f} with another learning rate: {new} in"
            f" place of {old}."
            for training in self.series
            for step, old, new in training.rate_changes
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: numbers of both and the point of divergence, without the
        curves.
        """
        first = self.series[0]
        return {
            "by": self.by,
            "window": self.window,
            "tolerance": self.tolerance,
            "within": self.within,
            "remarks": self.remarks,
            "baseline": _summary(first),
            "compared": [
                {
                    **_summary(training),
                    "verdict": pair.verdict,
                    "left_at": pair.left_at,
                    "points": len(pair.loss.x),
                    "loss_difference_mean": _plain(pair.loss.mean()),
                    "loss_difference_largest": _plain(pair.loss.largest()[0]),
                    "loss_difference_largest_at": _plain(pair.loss.largest()[1]),
                    "grad_norm_difference_mean": (
                        _plain(pair.grad_norm.mean()) if pair.grad_norm else None
                    ),
                }
                for training, pair in zip(self.series[1:], self.pairs, strict=True)
            ],
        }

    def plot(self) -> Any:
        """Loss and gradient norm on one picture, the differences below them, as a matplotlib
        Figure.
        """
        from smtrain.tools.compare.picture import draw

        return draw(self)

    def _repr_html_(self) -> str:
        from smtrain.tools.compare.picture import page

        return page(self, as_document=False)


@public
def compare(
    *trainings: Any,
    by: By = "step",
    window: int = 20,
    tolerance: float | None = None,
    tokens_per_step: float | None = None,
    target: TargetName | None = None,
) -> Comparison:
    """Compare each training with the first one: do they learn alike?

    Args:
        *trainings: Two or more, each a `Run`, a `Job`, the name of either, a `metrics.jsonl`, a
            folder of TensorBoard's files, a CSV file, a log of Megatron-LM, GPT-NeoX or NeMo
            (neuronx-nemo-megatron), a DataFrame or a list of records; `NAME=PATH` gives a file a
            name.
        by: The x axis: `step`, `tokens` or `time` (seconds since the first step).
        window: Points in the moving mean of the smoothed curves; at most half of the points that
            both have.
        tolerance: Allowed difference of the smoothed loss, as a share of the first one's; None:
            0.02.
        tokens_per_step: Global batch size times sequence length, for logs that do not say.
        target: The target of named jobs: `local` or `aws`.

    Returns:
        The comparison; a notebook shows it, `verdict` says it, `plot()` draws it.

    Raises:
        ConfigError: The arguments are wrong.
        DataError: A file has no steps, or two trainings have none in common.
        JobError: A name is no file, run or job.

    Examples:
        >>> falling = [{"step": step, "loss": 8 - step / 50} for step in range(1, 101)]
        >>> smtrain.compare(falling, falling).within
        True
    """
    if len(trainings) < 2:
        raise ConfigError(
            "compare: give two or more trainings; the first is the one to compare with",
            code="config.missing_key",
        )
    if by not in get_args(By):
        raise ConfigError(
            f"by: got {by!r}; {hint(str(by), get_args(By))}", code="config.wrong_value"
        )
    if window < 1 or (tolerance is not None and not 0 < tolerance < float("inf")):
        raise ConfigError(
            f"window and tolerance must be above 0; they are {window} and {tolerance}",
            code="config.wrong_value",
        )
    all_series = tuple(
        with_tokens(read(training, target), tokens_per_step) for training in trainings
    )
    for compared_series in all_series[1:]:
        _refuse_another_objective(all_series[0], compared_series)
    limit = USUAL if tolerance is None else tolerance
    return Comparison(
        by,
        window,
        limit,
        all_series,
        tuple(
            _pair(all_series[0], compared_series, by, window, limit)
            for compared_series in all_series[1:]
        ),
    )


def _refuse_another_objective(base: Series, candidate: Series) -> None:
    """Raise DataError if the losses measure different things: an answer's against a pair's, for
    example.
    """
    both_known = base.objective and candidate.objective
    if base.objective != candidate.objective and (
        both_known or "dpo" in (base.objective, candidate.objective)
    ):
        descriptions = [
            f"{training.name} is of train.objective {training.objective or 'pretrain or sft'}"
            for training in (base, candidate)
        ]
        raise DataError(
            f"{' and '.join(descriptions)}, whose losses measure different things; compare runs of"
            " one objective, or their models by `smtrain evaluate`"
        )


def _is_same(base: Series, candidate: Series) -> bool:
    """Whether both were read from the same file, run or job; tables in memory have no name."""
    if candidate.of in ("the list", "the table"):
        return False
    return base.of == candidate.of or Path(base.of).resolve() == Path(candidate.of).resolve()


def _pair(base: Series, candidate: Series, by: By, window: int, tolerance: float) -> Pair:
    loss = _curve(base, candidate, "loss", by, window)
    if loss is None:
        a, b = ((s.along(by)[0], s.along(by)[-1]) for s in (base, candidate))
        raise DataError(
            f"{candidate.name} and {base.name} have no {by} in common: {candidate.name} goes from"
            f" {b[0]:,.0f} to {b[1]:,.0f}, {base.name} from {a[0]:,.0f} to {a[1]:,.0f}"
        )
    window = _fit_window(window, len(loss.x))
    left_at = loss.leaves(tolerance, window)
    return Pair(
        candidate.name,
        loss,
        _curve(base, candidate, "grad_norm", by, window),
        left_at,
        _verdict(base.name, candidate.name, loss, left_at, by, window, tolerance),
    )


def _curve(base: Series, candidate: Series, key: str, by: By, window: int) -> Curve | None:
    """Both at common points: at the steps that both have, else at the other's x within the
    baseline's range.
    """
    base_points, candidate_points = _points(base, key, by), _points(candidate, key, by)
    x: array[Any] = array("q" if by == "step" else "d")  # a step is printed as a whole number
    a, b = array("d"), array("d")
    for at, base_value, value in (
        _at_common_x(base_points, candidate_points)
        if by == "step"
        else _at_candidate_x(base_points, candidate_points)
    ):
        x.append(at)
        a.append(base_value)
        b.append(value)
    if not x:
        return None
    window = _fit_window(window, len(x))
    smooth_a, smooth_b = _smooth(a, window), _smooth(b, window)
    points_before, points_after = (window - 1) // 2, window // 2
    full_windows = range(points_before, len(x) - points_after)
    pairs = enumerate(zip(smooth_a, smooth_b, strict=True))
    difference = array(
        "d", ((q - p) / abs(p) if p and i in full_windows else nan for i, (p, q) in pairs)
    )
    return Curve(x, b, a, smooth_b, smooth_a, difference)


def _fit_window(window: int, points: int) -> int:
    """The window, or half of the points if there are fewer than two windows: a wider one would draw
    a flat line, and no difference.
    """
    return window if 2 * window <= points else max(1, points // 2)


Points = tuple["array[Any]", "array[float]"]
"""The x and the values of a metric, x ascending."""


def _points(training: Series, key: str, by: By) -> Points:
    xs: array[Any] = array("q" if by == "step" else "d")
    values = array("d")
    for x, record in zip(training.along(by), training.records, strict=True):
        if key in record:
            xs.append(x)
            values.append(record[key])
    return xs, values


def _at_common_x(
    base_points: Points, candidate_points: Points
) -> Iterator[tuple[float, float, float]]:
    """(x, our value, their value) at each x that both have."""
    at = 0
    for x, value in zip(*base_points, strict=True):
        while at < len(candidate_points[0]) and candidate_points[0][at] < x:
            at += 1
        if at < len(candidate_points[0]) and candidate_points[0][at] == x:
            yield x, value, candidate_points[1][at]


def _at_candidate_x(
    base_points: Points, candidate_points: Points
) -> Iterator[tuple[float, float, float]]:
    """(x, our value, their value) at each of their x within ours."""
    for x, value in zip(*candidate_points, strict=True):
        if (base_value := _between(base_points, x)) is not None:
            yield x, base_value, value


def _between(points: Points, x: float) -> float | None:
    """The value at `x`, interpolated linearly; None outside the points."""
    xs, values = points
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    i = bisect_left(xs, x)
    (x1, y1), (x0, y0) = ((xs[j], values[j]) for j in (i, max(0, i - 1)))
    return y1 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _turn(values: Sequence[float], tolerance: float) -> int | None:
    """The index at which the values change most (the split with the largest sum of squares between
    its two parts); None if the values before it exceed the tolerance as well.
    """
    best, at, total, sum_before = 0.0, None, sum(values), 0.0
    for k in range(1, len(values)):
        sum_before += values[k - 1]
        a, b = sum_before / k, (total - sum_before) / (len(values) - k)
        between = k * (len(values) - k) * (b - a) ** 2
        if abs(a) <= tolerance and between > best:
            best, at = between, k
    return at


def _smooth(values: Sequence[float], window: int) -> array[float]:
    """The mean of the `window` values around each point; of fewer at the ends."""
    points_before, points_after = (window - 1) // 2, window // 2
    parts = (values[max(0, i - points_before) : i + points_after + 1] for i in range(len(values)))
    return array("d", (sum(part) / len(part) for part in parts))


def _verdict(
    base: str,
    candidate: str,
    loss: Curve,
    left_at: float | None,
    by: By,
    window: int,
    tolerance: float,
) -> str:
    largest, at_x = loss.largest()
    x_range = f"{_place(loss.x[0], by)} to {_place(loss.x[-1], by)}"
    deviation = (
        f"the loss differs by {loss.mean():.2%} in the mean over windows of {window}"
        f" point{'s' * (window > 1)} from {x_range}, at most by {largest:+.2%} at {_place(at_x, by)}"
    )
    if not isfinite(largest):
        at = f" from {_place(left_at, by)}" if left_at is not None else ""
        return (
            f"{candidate} and {base} cannot be compared{at}: a loss is not a finite number wherever"
            " both have one."
        )
    if left_at is None:
        return f"{candidate} follows {base}: {deviation}, within the tolerance of {tolerance:.2%}."
    return (
        f"{candidate} leaves {base} at {_place(left_at, by)}, beyond the tolerance of"
        f" {tolerance:.2%}: {deviation}."
    )


def _place(x: float, by: By) -> str:
    return f"step {x:,.0f}" if by == "step" else f"{x:,.0f} {_X_UNITS[by]}"


def _summary(training: Series) -> dict[str, Any]:
    last = training.records[-1]
    return {
        "name": training.name,
        "from": training.of,
        "steps": len(training.records),
        "last_step": int(last["step"]),
        "last_loss": _plain(last["loss"]),
        "tokens_per_s": _plain(training.tokens_per_s()),
        "tokens_per_dollar": _plain(training.tokens_per_dollar()),
        "learning_rate_changes": [
            {"step": int(step), "from": old, "to": new} for step, old, new in training.rate_changes
        ],
    }


def _plain(value: float | None) -> float | None:
    """The value; None for NaN and infinity, which JSON does not have."""
    return value if value is not None and isfinite(value) else None
