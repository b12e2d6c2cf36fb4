"""The demo with a real model: what it answers before and after it has learned, and what was to be learned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from smtrain.cli.demo_show import show
from smtrain.client.planner.resolve import load_config
from smtrain.core.config import JobConfig
from smtrain.core.config.load import Source
from smtrain.core.demo.inputs import HELP, materialise
from smtrain.core.files import home
from smtrain.core.text import clean
from smtrain.tools.run import run

ASKED = 3
_FUNCTION = re.compile(r"What is [a-z_]+\.[a-z_0-9]+ in")


@dataclass(frozen=True)
class Question:
    """A question of the documentation with its answer, and whether the training never sees it."""

    question: str
    answer: str
    held_out: bool


def run_and_show(
    source: Source, folder: Path, console: Console, *, set_: Sequence[str] = (), again: bool = False,
    overwrite: bool = False,
) -> None:  # fmt: skip
    """Ask the model, take it through all stages, and show its answers to the same questions side by side."""
    known = records(load_config(source, set_=set_, target="local"))
    asked = {"prompts": [record.question for record in chosen(known)]} if known else {}
    config = load_config(source, set_=set_, target="local", generate=asked)
    console.print(f"what {config.model.path} answers before it is trained:", markup=False)
    before = answers(config)
    for question, answer in before.items():
        _say(console, question, [("", answer)])
    done = run(source, target="local", set_=set_, again=again, generate=asked)
    documented = {record.question: record for record in known}

    def compare() -> None:
        for text in done.texts:
            question = text["prompt"]
            rows = [("before", before.get(question, "")), ("after", text["completion"])]
            record = documented.get(question)
            if record is not None:
                rows.append(("help()", record.answer))
            seen = "" if record is None else "  (held out)" if record.held_out else "  (trained on)"
            _say(console, question, rows, seen)

    show(done, folder, console, overwrite=overwrite, texts=compare)


def answers(config: JobConfig) -> dict[str, str]:
    """What the model that training starts from says to the prompts of stage generate, by prompt; sampled as there.

    Kept in $SMTRAIN_HOME/demo, so that a second call asks for nothing, and an interrupted one for what is missing.
    """
    from smtrain.tools.chat.batch import generate

    asked, chat = config.generate, config.train.objective == "sft"
    key = json.dumps([config.model.path, asked.prompts, chat, asked.max_new_tokens, asked.temperature])
    kept = home() / "demo" / f"answers-{sha256(key.encode()).hexdigest()[:12]}.jsonl"
    if kept.is_file():
        found = [json.loads(line) for line in kept.read_text("utf-8").splitlines()]
    else:
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = generate(
            config.model.path, list(asked.prompts), out=kept, chat=chat, max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
        )  # fmt: skip
    return {record["prompt"]: record["completion"] for record in found}


def records(config: JobConfig) -> list[Question]:
    """The questions that the run learns from or holds out, as stage prepare divides them; none where it has its own."""
    held_out = config.train.validation
    if config.data.path != HELP:
        return []
    import numpy as np

    from smtrain.worker.data.clean.holdout import HELD, HoldOut, conversation_hash
    from smtrain.worker.data.tokenize.chat import conversation

    with (materialise(HELP) / "help.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    hashes = np.array([conversation_hash(conversation(row).messages) for row in rows], np.uint64)
    sides = HoldOut(fraction=held_out.fraction if held_out else None).by_hash(hashes)
    apart = np.zeros(len(rows), bool) if sides is None else sides == HELD
    return [Question(row["instruction"], row["output"], bool(side)) for row, side in zip(rows, apart, strict=True)]


def chosen(known: Sequence[Question], count: int = ASKED) -> list[Question]:
    """Questions to ask: functions with short answers from all over the alphabet, held-out ones where there are any."""
    kept = [one for one in known if one.held_out] or list(known)
    functions = [one for one in kept if len(one.answer) < 160 and _FUNCTION.match(one.question)] or kept
    return [functions[len(functions) * i // count] for i in range(min(count, len(functions)))]


def _say(console: Console, question: str, rows: Sequence[tuple[str, str]], note: str = "") -> None:
    """A question, and below it each answer, indented behind its name."""
    console.print(Text(f"\n{clean(question)}", style="bold"), Text(note, style="dim"), sep="")
    width = max(len(name) for name, _ in rows) + 2
    for name, answer in rows:
        lines = [part for line in clean(answer).strip().splitlines() for part in _wrapped(line, console.width - width)]
        for number, line in enumerate(lines or [""]):
            console.print(Text(f"  {name if number == 0 else '':{width}}{line}"), soft_wrap=True)


def _wrapped(line: str, width: int) -> list[str]:
    """A line in parts that fit, each indented as it is."""
    indent = line[: len(line) - len(line.lstrip())]
    return wrap(line, max(20, width - 2), subsequent_indent=indent) or [""]
