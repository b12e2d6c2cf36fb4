"""Evaluate a model, and the model that it was trained from, on the same questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from smtrain.core.config.outputs import NEEDLE
from smtrain.core.errors import DataError
from smtrain.core.files import replacing_files
from smtrain.core.model.hf_folder import is_adapter
from smtrain.worker.checkpoint.huggingface.damage import refuse_damaged
from smtrain.worker.checkpoint.huggingface.folder import refuse_renamed
from smtrain.worker.checkpoint.merge import refuse_other_base
from smtrain.worker.evaluation import report
from smtrain.worker.evaluation.harness import EvaluationRequest, Measurement, Tasks, versions
from smtrain.worker.evaluation.libraries import HarnessProgress
from smtrain.worker.evaluation.long_context import LongRequest, grids, pictures
from smtrain.worker.evaluation.long_context import measure as measure_long


def evaluate(
    model: Path,
    base: Path | None,
    request: EvaluationRequest,
    say: Callable[[str], None] = print,
    under: Path | None = None,
    long: LongRequest | None = None,
) -> dict[str, Any]:
    """Evaluate, and return the report (`evaluation.json`): numbers with errors, differences,
    prompts, versions.

    `model` and `base` are Hugging Face folders; `model` may be a PEFT adapter for the model
    `under`. `request` names tasks of lm-evaluation-harness, or none, `long` those that are our own.
    Raises `ConfigError` for an unknown task, `DataError` if a model or a task's data cannot be
    read, `CheckpointError` for an adapter of another model.
    """
    adapter = is_adapter(path.name for path in model.iterdir()) if model.is_dir() else False
    if adapter and under is None:
        raise DataError(
            f"{model} is an adapter; name the model that it was trained on (--base), or merge it"
            " first."
        )
    for folder in (*([under] if under and adapter else [model]), *([base] if base else [])):
        if not (folder / "config.json").is_file():
            raise DataError(
                f"{folder} holds no config.json; give a Hugging Face folder, as the export stage"
                " writes it.",
                code="checkpoint.missing",
            )
        refuse_renamed(folder)
    for folder in filter(None, (model, base, under)):
        refuse_damaged(folder)
    if adapter and under:
        refuse_other_base(model, under)
    model_folder, of_adapter = under if under and adapter else model, model if adapter else None
    pairs: list[tuple[Measurement | None, Measurement]] = []
    if request.tasks:
        tasks = Tasks(request)
        if tasks.not_read:
            say(f"{request.data}: {tasks.not_read}")
        try:
            base_measurement = _measure(tasks, base, "the base model", say) if base else None
            name = "the trained model" if base else str(model)
            pairs.append((base_measurement, _measure(tasks, model_folder, name, say, of_adapter)))
        finally:
            tasks.close()
    of_long = None
    if long is not None:
        long_after = measure_long(model_folder, of_adapter, long, say)
        base_request = replace(
            long, lengths=tuple(long_after.lengths)
        )  # the base is given the same texts
        long_before = measure_long(base, None, base_request, say) if base else None
        pairs.append((long_before.measurement if long_before else None, long_after.measurement))
        of_long = {
            "after": long_after.as_json(),
            "before": long_before.as_json() if long_before else None,
        }
    model_scores, base_scores = (
        merge_measurements(model_scores for _, model_scores in pairs),
        merge_measurements(base_scores for base_scores, _ in pairs if base_scores),
    )
    result: dict[str, Any] = {
        "format": report.FORMAT,
        "asked": request.as_json() | {"tasks": [*request.tasks, *(long.tasks if long else ())]},
        "models": {"after": str(model), "before": str(base) if base else None},
        "results": report.rows(base_scores if base else None, model_scores),
        "prompts": model_scores.prompts,
        "cut_requests": {"after": model_scores.cut, "before": base_scores.cut if base else None},
        "versions": versions(),
        **({"long": of_long} if of_long else {}),
    }
    return result


def merge_measurements(parts: Iterable[Measurement]) -> Measurement:
    """The scores of several sets of tasks as one."""
    out = Measurement({}, {})
    for part in parts:
        out = Measurement(
            out.scores | part.scores,
            out.questions | part.questions,
            out.prompts | part.prompts,
            out.first_metrics | part.first_metrics,
            out.cut + part.cut,
        )
    return out


def _measure(
    tasks: Tasks, folder: Path, name: str, say: Callable[[str], None], adapter: Path | None = None
) -> Measurement:
    say(f"evaluating {name} on {', '.join(tasks.request.tasks)}")
    measurement = tasks.measure(folder, adapter, HarnessProgress(say))
    if measurement.cut:
        say(
            f"{measurement.cut} requests are longer than the model's positions and were cut at the"
            " beginning"
        )
    return measurement


def save(result: dict[str, Any], folder: Path, *, with_pictures: bool = False) -> Path:
    """Replace the report in a folder, and the heat maps of long texts next to it; returns the
    report's path.

    With `with_pictures` it has heat maps. A job draws none: its image may have no templates.
    """
    with replacing_files(folder, report.NAME, f"{NEEDLE}-*.svg") as new:
        (new / report.NAME).write_text(
            json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
        for name, picture in pictures(result).items() if with_pictures else ():
            (new / f"{name}.svg").write_text(picture, "utf-8")
    return folder / report.NAME


def format_result(result: dict[str, Any]) -> str:
    """Lay out one prompt as the model read it, the table, and a sentence for each task."""
    parts = []
    for task, prompt in list(result["prompts"].items())[:1]:
        if prompt:
            bar = "-" * 20
            parts.append(
                f"the first question of {task}, as the model reads"
                f" it:\n{bar}\n{prompt['prompt']}\n{bar}\n(scored:"
                f" {prompt['first_continuation']!r}; right: {prompt['target']})"
            )
    return "\n".join([*parts, report.table(result), *grids(result), *report.sentences(result)])
