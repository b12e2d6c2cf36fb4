"""A training's numbers by step, under common names."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smtrain.core.errors import DataError
from smtrain.tools.compare.columns import StepColumns

NAMES = {
    "step": ("step", "iteration", "iter", "global_step", "optimizer_step", "_step"),
    "loss": (
        "loss",
        "lm loss",
        "lm_loss",
        "train_loss",
        "reduced_train_loss",
        "train/loss",
        "training loss",
        "lm-loss",
        "train/lm_loss",
        "lm-loss-training/lm loss",
    ),
    "grad_norm": (
        "grad_norm",
        "grad norm",
        "gradient_norm",
        "grad-norm",
        "train/grad_norm",
        "gradient norm",
        "global_grad_norm",
    ),
    "lr": (
        "lr",
        "learning rate",
        "learning_rate",
        "learning-rate",
        "train/lr",
        "train/learning_rate",
    ),
    **{
        f"rewards/{name}": (f"rewards/{name}", f"train/rewards/{name}")
        for name in ("chosen", "rejected", "margins", "accuracies")
    },
    "tokens_per_s": ("tokens_per_s", "tokens/s", "tokens_per_second", "train/tokens_per_s"),
    "samples": ("consumed samples", "consumed_samples"),
    "step_s": (
        "step_s",
        "iteration_time",
        "elapsed time per iteration (ms)",
        "train_step_timing in s",
        "iteration-time",
    ),
    "time": ("time", "wall_time", "timestamp"),
}
"""Our names of the numbers, and those of other tools."""
_OUR_NAMES = {name: our_name for our_name, names in NAMES.items() for name in names}
_EXACT = 2.0**53
"""From here on a float does not hold every whole number."""
_IN_MILLISECONDS = {"elapsed time per iteration (ms)"}


@dataclass(frozen=True)
class Series:
    """A training: `records` hold a step each, in order, by our names; `of` names their source.

    `tokens_per_step` and `dollars_per_hour` are None if unknown.
    """

    name: str
    of: str
    records: Sequence[dict[str, float]]
    tokens_per_step: float | None = None
    dollars_per_hour: float | None = None
    rate_changes: tuple[tuple[float, str, str], ...] = ()
    """(first step, rate before, rate from there on) of every resume that changed the learning rate.
    """
    objective: str = ""
    """`train.objective` of the run, or by its numbers; "" if unknown."""
    beginnings: int = 1
    """Number of times that the log begins with its first step: more than 1 if it holds several
    runs.
    """

    def tokens_per_s(self) -> float | None:
        """The median over all steps; computed from step times if the log has no rates."""
        rates = [record["tokens_per_s"] for record in self.records if "tokens_per_s" in record]
        if not rates and self.tokens_per_step:
            rates = [
                self.tokens_per_step / record["step_s"]
                for record in self.records
                if record.get("step_s")
            ]
        return sorted(rates)[len(rates) // 2] if rates else None

    def tokens_per_dollar(self) -> float | None:
        """At that rate and the machines' price."""
        rate = self.tokens_per_s()
        return rate * 3600 / self.dollars_per_hour if rate and self.dollars_per_hour else None

    def along(self, by: str) -> Sequence[float]:
        """The x of each record: its step, its tokens so far, or its seconds since the first.

        Raises DataError if the log does not say.
        """
        if by == "step":
            return array("q", (int(record["step"]) for record in self.records))
        if by == "tokens":
            if not self.tokens_per_step:
                raise DataError(
                    f"{self.name}: nothing says how many tokens a step has; give --tokens-per-step"
                    " (global batch size times sequence length), or compare by step"
                )
            return array("d", (record["step"] * self.tokens_per_step for record in self.records))
        if all("time" in record for record in self.records):
            began = self.records[0]["time"]
            return array("d", (record["time"] - began for record in self.records))
        seconds, total, previous_step = array("d"), 0.0, self.records[0]["step"]
        for record in self.records:
            took = record.get("step_s")
            if took is None and self.tokens_per_step and record.get("tokens_per_s"):
                took = self.tokens_per_step / record["tokens_per_s"]
            if took is None:
                raise DataError(
                    f"{self.name}: nothing says how long a step took; give --tokens-per-step if it"
                    " logs tokens a second, or compare by step"
                )
            total += took * (record["step"] - previous_step)
            previous_step = record["step"]
            seconds.append(total)
        return seconds


def series(
    name: str,
    of: str,
    rows: Iterable[Mapping[str, Any]],
    tokens_per_step: float | None = None,
    dollars_per_hour: float | None = None,
    rate_changes: Iterable[tuple[float, str, str]] = (),
    objective: str = "",
) -> Series:
    """A series of rows with any tool's names.

    The last row of a step counts; rows without a step or loss are skipped.

    Raises DataError if no row has both.
    """
    records = StepColumns()
    column_names: set[str] = set()
    first = previous_step = None
    beginnings = 1
    for row in rows:
        record: dict[str, float] = {}
        for key, value in row.items():
            column_names.add(str(key))
            normalized_key = str(key).strip().lower()
            number = _number(value)
            if (
                number is not None
                and (our_name := _OUR_NAMES.get(normalized_key))
                and our_name not in record
            ):
                record[our_name] = number / 1000 if normalized_key in _IN_MILLISECONDS else number
        if "step" in record and "loss" in record and abs(record["step"]) < _EXACT:
            step = int(record["step"])
            first = step if first is None else first
            beginnings += previous_step is not None and step <= first < previous_step
            previous_step = step
            objective = objective or ("dpo" if "rewards/margins" in record else "")
            records.append(record | {"step": step})
    if not records:
        columns = ", ".join(sorted(column_names)[:12]) or "nothing"
        raise DataError(
            f"{of} has no steps with a loss: it has {columns}; needed are a step"
            f" ({', '.join(NAMES['step'][:4])}) and a loss ({', '.join(NAMES['loss'][:4])})"
        )
    records.sort()
    return Series(
        name,
        of,
        records,
        tokens_per_step,
        dollars_per_hour,
        tuple(rate_changes),
        objective,
        beginnings,
    )


def with_tokens(training: Series, tokens_per_step: float | None) -> Series:
    """The series with the tokens of a step, unless it has them already."""
    return replace(training, tokens_per_step=training.tokens_per_step or tokens_per_step)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
