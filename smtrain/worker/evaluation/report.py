"""The report of an evaluation: rows of numbers before and after, as JSON, as a table and as
sentences.
"""

from __future__ import annotations

from typing import Any

from smtrain.core.text import align_columns
from smtrain.worker.evaluation import significance
from smtrain.worker.evaluation.harness import Measured, Score

FORMAT = 1
NAME = "evaluation.json"
_FIRST = ("acc", "exact_match", "acc_norm", "f1", "word_perplexity")
"""A group's main metric is the first of these that it has; a task's is the first that it lists."""
Row = dict[str, Any]


def rows(before: Measured | None, after: Measured) -> list[Row]:
    """One row for every metric of every task: value, standard error, number of questions, and the
    difference.
    """
    made = [
        _row(score, before.scores.get(key) if before else None, before, after)
        for key, score in after.scores.items()
    ]
    for row in made:
        if after.listed.get(row["task"]) == row["metric"]:
            row["listed_first"] = True
    return made


def _row(score: Score, other: Score | None, before: Measured | None, after: Measured) -> Row:
    row: Row = {
        "task": score.task,
        "metric": score.metric,
        "filter": score.filter,
        "n": score.n,
        "higher_is_better": score.higher_is_better,
        "after": {"value": score.value, "stderr": score.stderr},
    }
    if other is None or before is None:
        return row
    row["before"] = {"value": other.value, "stderr": other.stderr}
    row["difference"] = {"value": score.value - other.value}
    same = before.questions.get(score.task) == after.questions.get(score.task)
    if not (same and score.each and len(score.each) == len(other.each)):
        row["verdict"] = "not tested: its value is no mean over the questions"
        return row
    paired = significance.compare(other.each, score.each)
    won, lost = (
        (paired.gained, paired.lost) if score.higher_is_better else (paired.lost, paired.gained)
    )
    row["difference"] |= {
        "stderr": paired.stderr,
        "test": paired.test,
        "p": paired.p,
        "gained": won,
        "lost": lost,
    }
    good = (paired.value > 0) == score.higher_is_better
    row["verdict"] = "within the noise" if paired.noise else "better" if good else "worse"
    return row


def main_rows(report: dict[str, Any]) -> dict[str, Row]:
    """The row of the main metric of each requested task or group."""
    main: dict[str, Row] = {}
    for task in report["asked"]["tasks"]:
        own = [row for row in report["results"] if row["task"] == task]
        if own:
            main[task] = min(own, key=_place)
    return main


def _place(row: Row) -> int:
    if row.get("listed_first"):
        return -1
    return _FIRST.index(row["metric"]) if row["metric"] in _FIRST else len(_FIRST)


def table(report: dict[str, Any]) -> str:
    """Lay the rows out as text, one a line under a heading."""
    both = any("before" in row for row in report["results"])
    head = [
        "task",
        "metric",
        "n",
        *(["before", "after", "difference", "won:lost", "p", ""] if both else ["value"]),
    ]
    lines = [head]
    for row in report["results"]:
        cells = [row["task"], metric_of(row), f"{row['n']:,}"]
        if not both:
            lines.append([*cells, _with_error(row["after"])])
            continue
        between = row.get("difference", {})
        cells += [
            _with_error(row.get("before")),
            _with_error(row["after"]),
            _with_error(between, sign=True),
        ]
        tested = "p" in between
        cells += (
            [f"{between['gained']}:{between['lost']}", _odds(between["p"])] if tested else ["", ""]
        )
        lines.append([*cells, row.get("verdict", "").partition(":")[0]])
    return "\n".join(align_columns(lines))


def metric_of(row: Row) -> str:
    """The metric of a row, with its filter."""
    return str(row["metric"]) + ("" if row["filter"] in ("none", "") else f" ({row['filter']})")


def sentences(report: dict[str, Any]) -> list[str]:
    """Compare the two models on each requested task, in one sentence."""
    return [_sentence(task, row) for task, row in main_rows(report).items() if "before" in row]


def _sentence(task: str, row: Row) -> str:
    before, after, between = row["before"]["value"], row["after"]["value"], row["difference"]
    head = f"{task}: {row['metric']} {before:.4f} -> {after:.4f} over {row['n']:,} questions"
    if "p" not in between:
        return f"{head}; it was not tested whether chance explains it"
    how = "McNemar's exact test" if between["test"] == "mcnemar" else "a paired z test"
    odds = f"{between['gained']} won, {between['lost']} lost, p = {between['p']:.3g} by {how}"
    if row["verdict"] == "within the noise":
        return f"{head}; this is within the noise ({odds})"
    return f"{head}; the trained model is {row['verdict']} ({odds})"


def lines(report: dict[str, Any]) -> list[str]:
    """Lines for a job's log, from which CloudWatch reads: `evaluation mmlu=0.2534
    mmlu_base=0.2511`.
    """
    out = []
    for task, row in main_rows(report).items():
        base = f" {task}_base={row['before']['value']:.6f}" if "before" in row else ""
        out.append(
            f"evaluation {task}={row['after']['value']:.6f}{base} metric={row['metric']}"
            f" n={row['n']}"
        )
    return out


def _odds(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def _with_error(cell: dict[str, Any] | None, sign: bool = False) -> str:
    if not cell:
        return ""
    value = f"{cell['value']:+.4f}" if sign else f"{cell['value']:.4f}"
    return value + (f" ± {cell['stderr']:.4f}" if cell.get("stderr") is not None else "")
