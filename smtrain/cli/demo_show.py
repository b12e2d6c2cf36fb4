"""Output of the demo: its stages, its loss curve, and the model's answers before and after
training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smtrain.client.config.load import Source
from smtrain.client.follow.curve import save_curve, sparkline
from smtrain.client.planner.resolve import load_config
from smtrain.client.runs.run import Run
from smtrain.core.config import JobConfig
from smtrain.core.config.units import spell
from smtrain.core.demo.inputs import HELP, materialise
from smtrain.core.errors import JobError
from smtrain.core.files import home, parse_json, parse_object
from smtrain.core.text import clean
from smtrain.stages.base import run_uri
from smtrain.tools.run import run


def show(
    run: Run,
    folder: Path,
    console: Console,
    *,
    overwrite: bool = False,
    texts: Callable[[], None] | None = None,
) -> None:
    """Print the run's table, sparkline and texts, and leave model and picture in `folder`.

    `texts` prints the texts instead. Raises `JobError`, after everything else is printed, if it
    would replace other files there, unless `overwrite`.
    """
    model, download_error = folder / "model", None
    try:
        run.download(model, overwrite=overwrite)
    except JobError as error:
        download_error = error
    metrics = run.records
    base = run_uri(run.config)
    table = Table(title=Text(f"run {run.config.name} in {base}"), title_justify="left")
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("output", overflow="fold")
    for result in run.results:
        took = "done before" if result.skipped else spell(result.seconds)
        table.add_row(result.stage, took, Text(result.output.removeprefix(base)))
    table.add_row("total", spell(sum(result.seconds for result in run.results)), "", style="bold")
    console.print(table)
    steps = [record for record in metrics if "loss" in record]
    losses = [record["loss"] for record in steps]
    if losses:
        console.print(
            f"loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f} over {len(losses)} steps"
        )
        last = steps[-1]
        console.print(
            f"last step: {last['tokens_per_s']:.0f} tokens/s, grad norm {last['grad_norm']:.3f}"
        )
    if line := held_out(metrics):
        console.print(line)
    if texts is not None:
        texts()
    else:
        for text in run.texts:
            console.print(
                clean(f"> {text['prompt']}"), style="bold", end="", markup=False, highlight=False
            )
            console.print(clean(text["completion"]), markup=False, highlight=False)
    if download_error:
        raise download_error
    try:
        curve = str(save_curve(metrics, folder / "loss.png", f"{run.config.name}: loss by step"))
    except JobError as error:  # without matplotlib
        curve = f"not drawn: {error}"
    files = (
        f"loss curve: {curve}\nmodel:      {model}  (AutoModelForCausalLM.from_pretrained reads it)"
    )
    console.print(files, markup=False)


def held_out(records: Sequence[dict[str, float]]) -> str:
    """The losses on held-out text as a line with a curve; empty without validations."""
    validations = [record for record in records if "val_loss" in record]
    if not validations:
        return ""
    first, last = validations[0], validations[-1]
    return (
        f"loss {first['val_loss']:.3f} {sparkline([record['val_loss'] for record in validations])}"
        f" {last['val_loss']:.3f} on what is held out: perplexity {first['val_ppl']:.1f} before,"
        f" {last['val_ppl']:.1f} after"
    )


QUESTION_COUNT = 3
_FUNCTION = re.compile(r"What is [a-z_]+\.[a-z_0-9]+ in")


@dataclass(frozen=True)
class Question:
    """A question of the documentation with its answer; `held_out` if the training never sees it."""

    question: str
    answer: str
    held_out: bool


def run_and_show(
    source: Source,
    folder: Path,
    console: Console,
    *,
    set_: Sequence[str] = (),
    again: bool = False,
    overwrite: bool = False,
) -> None:
    """Ask the model, run all stages, and show its answers to the same questions before and
    after.
    """
    questions = records(load_config(source, set_=set_, target="local"))
    prompts = (
        {"prompts": [record.question for record in select_questions(questions)]}
        if questions
        else {}
    )
    config = load_config(source, set_=set_, target="local", generate=prompts)
    console.print(f"what {config.model.path} answers before it is trained:", markup=False)
    first_answers = answers(config)
    for question, answer in first_answers.items():
        _say(console, question, [("", answer)])
    finished_run = run(source, target="local", set_=set_, again=again, generate=prompts)
    record_by_question = {record.question: record for record in questions}

    def compare() -> None:
        for text in finished_run.texts:
            question = text["prompt"]
            rows = [("before", first_answers.get(question, "")), ("after", text["completion"])]
            record = record_by_question.get(question)
            if record is not None:
                rows.append(("help()", record.answer))
            exposure = (
                "" if record is None else "  (held out)" if record.held_out else "  (trained on)"
            )
            _say(console, question, rows, exposure)

    show(finished_run, folder, console, overwrite=overwrite, texts=compare)


def answers(config: JobConfig) -> dict[str, str]:
    """The answers of the untrained model to the prompts of stage generate, sampled with its
    settings.

    They are kept in $SMTRAIN_HOME/demo, so that a second call generates only the missing ones.
    """
    from smtrain.tools.chat.generate import generate
    from smtrain.tools.chat.resolve_model import find

    section, chat = config.generate, config.train.objective != "pretrain"
    model = [config.model.path, find(config.model.path).identity()]
    key = json.dumps([model, section.prompts, chat, section.max_new_tokens, section.temperature])
    cache_file = home() / "demo" / f"answers-{sha256(key.encode()).hexdigest()[:12]}.jsonl"
    if cache_file.is_file():
        texts = [parse_object(line) for line in cache_file.read_text("utf-8").splitlines()]
    else:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        texts = generate(
            config.model.path,
            list(section.prompts),
            out=cache_file,
            chat=chat,
            max_new_tokens=section.max_new_tokens,
            temperature=section.temperature,
        )
    return {record["prompt"]: record["completion"] for record in texts}


def records(config: JobConfig) -> list[Question]:
    """The questions of the demo's data, split as stage prepare splits them; none if the config has
    other data.
    """
    held_out = config.train.validation
    if config.data.path != HELP:
        return []
    import numpy as np

    from smtrain.worker.data.clean.holdout import HOLDOUT, HoldOut, conversation_hash
    from smtrain.worker.data.tokenize.dialogue import conversation

    with (materialise(HELP) / "help.jsonl").open(encoding="utf-8") as lines:
        rows = [parse_json(line) for line in lines]
    hashes = np.array([conversation_hash(conversation(row).messages) for row in rows], np.uint64)
    sides = HoldOut(fraction=held_out.fraction if held_out else None).by_hash(hashes)
    is_held_out = np.zeros(len(rows), bool) if sides is None else sides == HOLDOUT
    return [
        Question(row["instruction"], row["output"], bool(side))
        for row, side in zip(rows, is_held_out, strict=True)
    ]


def select_questions(questions: Sequence[Question], count: int = QUESTION_COUNT) -> list[Question]:
    """Questions to ask: functions with short answers from all over the alphabet, held-out ones if
    possible.
    """
    candidates = [question for question in questions if question.held_out] or list(questions)
    functions = [
        question
        for question in candidates
        if len(question.answer) < 160 and _FUNCTION.match(question.question)
    ] or candidates
    return [functions[len(functions) * i // count] for i in range(min(count, len(functions)))]


def _say(console: Console, question: str, rows: Sequence[tuple[str, str]], note: str = "") -> None:
    """Print a question, and below it each answer, indented behind its name."""
    console.print(Text(f"\n{clean(question)}", style="bold"), Text(note, style="dim"), sep="")
    width = max(len(name) for name, _ in rows) + 2
    for name, answer in rows:
        lines = [
            part
            for line in clean(answer).strip().splitlines()
            for part in _wrap_line(line, console.width - width)
        ]
        for number, line in enumerate(lines or [""]):
            console.print(Text(f"  {name if number == 0 else '':{width}}{line}"), soft_wrap=True)


def _wrap_line(line: str, width: int) -> list[str]:
    """A line in parts that fit, each indented as it is."""
    indent = line[: len(line) - len(line.lstrip())]
    return wrap(line, max(20, width - 2), subsequent_indent=indent) or [""]
