"""`smtrain evaluate MODEL --tasks ...`: lm-evaluation-harness over a model, and over the one before
it.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from smtrain.cli import options
from smtrain.cli.chat import TemplateOptions
from smtrain.cli.dispatch import register_flags
from smtrain.core.config.outputs import LONG_TASKS, Evaluate
from smtrain.core.errors import ConfigError, DataError
from smtrain.core.files import only_writer
from smtrain.core.model.chat_options import read_options
from smtrain.core.protocol.uris import not_here
from smtrain.core.text import json_text, say

if TYPE_CHECKING:
    from smtrain.tools.chat.resolve_model import FoundModel
    from smtrain.worker.evaluation.long_context import LongRequest

app = options.app()
FLAGS = {
    "tasks": "--tasks", "evaluate.data": "--data", "chat_template": "--apply-chat-template",
    "num_fewshot": "--num-fewshot",
    "evaluate.run_generated_code": "--run-generated-code",
    "evaluate.text": "--text", "evaluate.lengths": "--lengths",
}  # fmt: skip


@app.command(
    groups={
        "What is asked": "--tasks --data --text --lengths --limit",
        "How it is asked": (
            "--num-fewshot --apply-chat-template --chat-template-kwargs --batch-size"
            " --run-generated-code"
        ),
        "Which models": "--base --target",
        "Output": "--out --json --overwrite",
    },
)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder, run, job or s3:// URI of the model.", show_default=False
        ),
    ],
    tasks: Annotated[
        str, typer.Option(help="Tasks or groups, with commas between, e.g. mmlu,hellaswag.")
    ],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this model, question by question."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Task YAMLs with their data, or a benchmark's own files.",
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Worked examples before each question; default: the task's own.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Questions of each task; default: all.")
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", help="Put the questions in the tokenizer's chat template."
        ),
    ] = False,
    chat_template_kwargs: TemplateOptions = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Tokens of the texts of needle and loss_by_position; default: by the model.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Long documents for needle and loss_by_position."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Requests at a time.")] = 8,
    run_generated_code: Annotated[
        bool,
        typer.Option(
            "--run-generated-code",
            help="Run the code that the model writes for humaneval, confined.",
        ),
    ] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write evaluation.json there.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON in place of the table.")
    ] = False,
    overwrite: options.Overwrite = False,
    target: options.KnownJobTarget = None,
) -> None:
    """Evaluate a model by lm-evaluation-harness; with --base, before and after, with standard
    errors and a test.

    $ smtrain evaluate my-run --tasks hellaswag,arc_easy --limit 200  # a first look
    $ smtrain evaluate my-run --tasks mmlu --base demo://smollm2 --out scores  # before and after
    """
    from smtrain.client.backends.choose import backend_of_job
    from smtrain.worker.evaluation import evaluate
    from smtrain.worker.evaluation.harness import (
        EvaluationRequest,
        refuse_tasks,
        refuse_unknown_tasks,
        refuse_unreachable,
    )

    register_flags(FLAGS)
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise ConfigError(
            f"--tasks {tasks!r}: names no task; give some, such as mmlu,hellaswag",
            code="config.missing_key",
        )
    if data is not None and not data.strip():
        raise ConfigError("--data is an empty name; name a folder", code="config.wrong_value")
    options.folder_of("--out", out)
    report = None if out is None else Path(out) / "evaluation.json"
    if report is not None and not overwrite and report.exists():
        raise ConfigError(
            f"{report} would be replaced; give another --out, or --overwrite",
            code="config.wrong_value",
        )

    def progress(text: str) -> None:
        say(text, error=True)

    values = read_options("--chat-template-kwargs", chat_template_kwargs)
    if values and not apply_chat_template:
        raise ConfigError(
            "--chat-template-kwargs: has an effect only with --apply-chat-template; give it too",
            code="config.combination",
        )
    long = _long_request(names, lengths, text, limit)
    names = tuple(name for name in names if name not in LONG_TASKS)
    request = EvaluationRequest(
        names,
        Path(data).resolve() if data else None,
        num_fewshot,
        limit,
        apply_chat_template,
        batch_size,
        run_generated_code,
        values,
    )
    refuse_tasks(request)
    if names:
        refuse_unknown_tasks(request)
    models = [name for name in (model, base) if name is not None]
    local_models = {
        name: _find_model(name, target) for name in models if Path(name).is_dir() or not_here(name)
    }
    for name in models:
        if name not in local_models and "/" not in name:
            backend_of_job(name, options.name_of(target))  # raises if there is no target to ask
    if names:
        refuse_unreachable(request)  # before anything is fetched
    folder, *bases = (
        (local_models.get(name) or _find_model(name, target)).fetch(progress) for name in models
    )
    under = bases[0] if bases else None
    with nullcontext() if report is None else only_writer(report, DataError):
        evaluation = evaluate.evaluate(folder, under, request, progress, under, long)
        say(
            json_text(evaluation, indent=1) if as_json else evaluate.format_result(evaluation),
            raw=as_json,
        )
        if report is not None:
            say(evaluate.save(evaluation, report.parent, with_pictures=True), error=as_json)


def _long_request(
    names: tuple[str, ...], lengths: str | None, text: str | None, limit: int | None
) -> LongRequest | None:
    """The tasks for long texts. Raises `ConfigError` for what a config would refuse too."""
    from smtrain.client.config.checks.data import long_faults
    from smtrain.worker.evaluation.long_context import LongRequest

    tokens = [part.strip() for part in (lengths or "").split(",") if part.strip()]
    if not all(part.isdecimal() for part in tokens):
        raise ConfigError(
            f"--lengths {lengths!r}: numbers of tokens are needed, such as 2048,8192",
            code="config.wrong_value",
        )
    section = Evaluate(tasks=names, lengths=tuple(map(int, tokens)), text=text)
    if faults := [fault for _, fault in long_faults(section, "local")]:
        raise ConfigError(faults, code="config.combination")
    if not section.long_tasks:
        return None
    return LongRequest(
        section.long_tasks, section.lengths, options.resolve_folder(text) if text else None, limit
    )


def _find_model(name: str, target: options.TargetOption | None) -> FoundModel:
    """Find a model. Raises `CheckpointError` if this machine's memory does not hold it."""
    from smtrain.tools.chat.resolve_model import find
    from smtrain.worker.generation.memory_fit import refuse_too_large

    model = find(name, options.name_of(target))
    refuse_too_large([model.need], stage="evaluate")  # one model after the other
    return model
