"""The report of an evaluation: rows of numbers before and after, as JSON, as a table and as
sentences.
"""

from __future__ import annotations

from typing import Any

from smtrain.core.text import align_columns
from smtrain.worker.evaluation import significance
from smtrain.worker.evaluation.harness import Measurement, Score

FORMAT = 1
NAME = "evaluation.json"
_FIRST = ("acc", "exact_match", "acc_norm", "f1", "word_perplexity")
"""A group's main metric is the first of these that it has; a task's is the first that it lists."""
Row = dict[str, Any]


def rows(base: Measurement | None, model: Measurement) -> list[Row]:
    """One row for every metric of every task: value, standard error, number of questions, and the
    difference.
    """
    report_rows = [
        _row(score, base.scores.get(key) if base else None, base, model)
        for key, score in model.scores.items()
    ]
    for row in report_rows:
        if model.first_metrics.get(row["task"]) == row["metric"]:
            row["listed_first"] = True
    return report_rows


def _row(
    score: Score, base_score: Score | None, base: Measurement | None, model: Measurement
) -> Row:
    row: Row = {
        "task": score.task,
        "metric": score.metric,
        "filter": score.filter,
        "n": score.n,
        "higher_is_better": score.higher_is_better,
        "after": {"value": score.value, "stderr": score.stderr},
    }
    if base_score is None or base is None:
        return row
    row["before"] = {"value": base_score.value, "stderr": base_score.stderr}
    row["difference"] = {"value": score.value - base_score.value}
    has_same_questions = base.questions.get(score.task) == model.questions.get(score.task)
    if not (
        has_same_questions
        and score.question_scores
        and len(score.question_scores) == len(base_score.question_scores)
    ):
        row["verdict"] = "not tested: its value is no mean over the questions"
        return row
    comparison = significance.compare(base_score.question_scores, score.question_scores)
    win_count, loss_count = (
        (comparison.increases, comparison.decreases)
        if score.higher_is_better
        else (comparison.decreases, comparison.increases)
    )
    row["difference"] |= {
        "stderr": comparison.stderr,
        "test": comparison.test,
        "p": comparison.p,
        "gained": win_count,
        "lost": loss_count,
    }
    good = (comparison.value > 0) == score.higher_is_better
    row["verdict"] = "within the noise" if comparison.noise else "better" if good else "worse"
    return row


def main_rows(report: dict[str, Any]) -> dict[str, Row]:
    """The row of the main metric of each requested task or group."""
    main: dict[str, Row] = {}
    for task in report["asked"]["tasks"]:
        task_rows = [row for row in report["results"] if row["task"] == task]
        if task_rows:
            main[task] = min(task_rows, key=_place)
    return main


def _place(row: Row) -> int:
    if row.get("listed_first"):
        return -1
    return _FIRST.index(row["metric"]) if row["metric"] in _FIRST else len(_FIRST)


def table(report: dict[str, Any]) -> str:
    """Lay the rows out as text, one a line under a heading."""
    has_base = any("before" in row for row in report["results"])
    head = [
        "task",
        "metric",
        "n",
        *(["before", "after", "difference", "won:lost", "p", ""] if has_base else ["value"]),
    ]
    lines = [head]
    for row in report["results"]:
        cells = [row["task"], metric_of(row), f"{row['n']:,}"]
        if not has_base:
            lines.append([*cells, _with_error(row["after"])])
            continue
        between = row.get("difference", {})
        cells += [
            _with_error(row.get("before")),
            _with_error(row["after"]),
            _with_error(between, sign=True),
        ]
        is_tested = "p" in between
        cells += (
            [f"{between['gained']}:{between['lost']}", _odds(between["p"])]
            if is_tested
            else ["", ""]
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
    base_value, model_value, between = (
        row["before"]["value"],
        row["after"]["value"],
        row["difference"],
    )
    head = (
        f"{task}: {row['metric']} {base_value:.4f} -> {model_value:.4f} over {row['n']:,} questions"
    )
    if "p" not in between:
        return f"{head}; it was not tested whether chance explains it"
    test_name = "McNemar's exact test" if between["test"] == "mcnemar" else "a paired z test"
    odds = f"{between['gained']} won, {between['lost']} lost, p = {between['p']:.3g} by {test_name}"
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
