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
from smtrain.worker.evaluation.harness import EvaluationRequest, Measured, Tasks, versions
from smtrain.worker.evaluation.libraries import HarnessProgress
from smtrain.worker.evaluation.long import LongRequest, grids, pictures
from smtrain.worker.evaluation.long import measure as measure_long


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
    whole, of_adapter = under if under and adapter else model, model if adapter else None
    pairs: list[tuple[Measured | None, Measured]] = []
    if request.tasks:
        tasks = Tasks(request)
        if tasks.not_read:
            say(f"{request.data}: {tasks.not_read}")
        try:
            judged = _measured(tasks, base, "the base model", say) if base else None
            name = "the trained model" if base else str(model)
            pairs.append((judged, _measured(tasks, whole, name, say, of_adapter)))
        finally:
            tasks.close()
    of_long = None
    if long is not None:
        long_after = measure_long(whole, of_adapter, long, say)
        asked = replace(long, lengths=tuple(long_after.lengths))  # the base is given the same texts
        long_before = measure_long(base, None, asked, say) if base else None
        pairs.append((long_before.measured if long_before else None, long_after.measured))
        of_long = {
            "after": long_after.as_json(),
            "before": long_before.as_json() if long_before else None,
        }
    after, before = (
        joined(after for _, after in pairs),
        joined(before for before, _ in pairs if before),
    )
    made: dict[str, Any] = {
        "format": report.FORMAT,
        "asked": request.as_json() | {"tasks": [*request.tasks, *(long.tasks if long else ())]},
        "models": {"after": str(model), "before": str(base) if base else None},
        "results": report.rows(before if base else None, after),
        "prompts": after.prompts,
        "cut_requests": {"after": after.cut, "before": before.cut if base else None},
        "versions": versions(),
        **({"long": of_long} if of_long else {}),
    }
    return made


def joined(parts: Iterable[Measured]) -> Measured:
    """The scores of several sets of tasks as one."""
    out = Measured({}, {})
    for part in parts:
        out = Measured(
            out.scores | part.scores,
            out.questions | part.questions,
            out.prompts | part.prompts,
            out.listed | part.listed,
            out.cut + part.cut,
        )
    return out


def _measured(
    tasks: Tasks, folder: Path, name: str, say: Callable[[str], None], adapter: Path | None = None
) -> Measured:
    say(f"evaluating {name} on {', '.join(tasks.request.tasks)}")
    measured = tasks.measure(folder, adapter, HarnessProgress(say))
    if measured.cut:
        say(
            f"{measured.cut} requests are longer than the model's positions and were cut at the"
            " beginning"
        )
    return measured


def save(made: dict[str, Any], folder: Path, *, drawn: bool = False) -> Path:
    """Replace the report in a folder, and the heat maps of long texts next to it; returns the
    report's path.

    With `drawn` it has heat maps. A job draws none: its image may have no templates.
    """
    with replacing_files(folder, report.NAME, f"{NEEDLE}-*.svg") as new:
        (new / report.NAME).write_text(
            json.dumps(made, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
        for name, picture in pictures(made).items() if drawn else ():
            (new / f"{name}.svg").write_text(picture, "utf-8")
    return folder / report.NAME


def shown(made: dict[str, Any]) -> str:
    """Lay out one prompt as the model read it, the table, and a sentence for each task."""
    parts = []
    for task, prompt in list(made["prompts"].items())[:1]:
        if prompt:
            bar = "-" * 20
            parts.append(
                f"the first question of {task}, as the model reads"
                f" it:\n{bar}\n{prompt['prompt']}\n{bar}\n(scored:"
                f" {prompt['first_continuation']!r}; right: {prompt['target']})"
            )
    return "\n".join([*parts, report.table(made), *grids(made), *report.sentences(made)])
