"""lm-evaluation-harness on one model: its numbers, each question's score, and the prompts that the model was given."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smtrain.core.doing import doing
from smtrain.core.errors import ConfigError, DataError, SmtrainError, first_line
from smtrain.core.extras import collector_paused, missing, present
from smtrain.core.near import nearest
from smtrain.worker.evaluation.libraries import (
    endpoint,
    holds_data_sets,
    hub_answers,
    no_repository,
    quiet,
    settled,
    within,
)
from smtrain.worker.evaluation.mmlu import subjects_in
from smtrain.worker.evaluation.progress import HarnessProgress
from smtrain.worker.evaluation.request import Asked

_NAMED = re.compile(r"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([\w.-]+)["']?[ \t]*$""", re.MULTILINE)
VERSIONS = ("lm_eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class Score:
    """A metric of a task, as the harness gives it."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    n: int
    higher_is_better: bool
    each: tuple[float, ...] = ()
    """One a question, in the order of the questions; none where the metric is no mean of such."""


@dataclass(frozen=True)
class Measured:
    """A model's scores, by task and metric."""

    scores: dict[tuple[str, str, str], Score]
    questions: dict[str, list[str]]
    """By task, a digest of each question, to pair by."""
    prompts: dict[str, dict[str, str]] = field(default_factory=dict)
    """By task, the first question exactly as the model read it, and the answer that is scored."""
    listed: dict[str, str] = field(default_factory=dict)
    """By task, the metric that it lists first."""
    cut: int = 0
    """How many requests were longer than the model has positions for, and lost their beginning."""


def reachable(asked: Asked) -> bool:
    """Whether the data of tasks that are not all in `asked.data` can come from the hub; else it is what is kept here.

    Takes seconds and loads nothing, so it comes before models are fetched. Raises `ConfigError` if the harness is not
    installed, `DataError` if the hub does not answer and no data set is kept here.
    """
    if lacking := next((name for name in ("lm_eval", "accelerate") if not present(name)), None):
        raise ConfigError([missing(lacking)])
    if hub_answers():
        return True
    if holds_data_sets():
        return False
    folders = [folder for folder in (asked.data, _own_tasks()) if folder is not None]
    known = {name for folder in folders for name in _named_in(folder)}
    if set(asked.tasks) <= known:  # else the harness tells which task there is not
        raise DataError(
            f"tasks: the data of {', '.join(asked.tasks)} cannot be read (it is not on this machine, and {endpoint()} "
            "does not answer); give a folder that has it (evaluate.data; for mmlu a copy of the hub's cais/mmlu), or "
            "let the machine reach the hub."
        )
    return False


_TOKEN = re.compile(rb"[\w.\-+]{2,}")
_NO_TASKS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".pyc")


def refuse_unheard(asked: Asked) -> None:
    """Raise `ConfigError` for a task whose name stands nowhere among the harness's own.

    Importing the harness, which reads all of them, takes ten seconds; this takes one. A name that stands somewhere and
    is no task's is refused by the harness itself.
    """
    names = [name for name in asked.tasks if _TOKEN.fullmatch(name.encode())]
    own = _own_tasks()
    if asked.data is not None or not names or own is None:
        return
    heard: set[bytes] = set()
    for folder, _, files in os.walk(own):
        heard |= {Path(folder).name.encode(), *(Path(file).stem.encode() for file in files)}
        for file in files:
            if not file.endswith(_NO_TASKS):
                heard.update(_TOKEN.findall(Path(folder, file).read_bytes()))
    for name in names:
        if name.encode() not in heard:
            raise _no_task(name, _named_in(own))


def _own_tasks() -> Path | None:
    """The folder of the harness's own tasks; None if it is not installed."""
    package = find_spec("lm_eval")
    return Path(package.origin).with_name("tasks") if package and package.origin else None


def _no_task(name: str, known: Iterable[str]) -> ConfigError:
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else "`lm-eval ls tasks` lists those of the harness"
    return ConfigError([f"tasks: there is no task {name!r}; {hint}"])


def refuse_unreachable(asked: Asked) -> None:
    """Raise what `reachable` does for tasks that the folder of data has not all; its own faults are told later."""
    folder = asked.data
    if folder is None or (folder.is_dir() and not subjects_in(folder) and not _named_in(folder) >= set(asked.tasks)):
        reachable(asked)


def _named_in(folder: Path) -> set[str]:
    return set(_names(folder.rglob("*.yaml")))


class Tasks:
    """The tasks that are asked for, found and with their data read; the folder of what was made of it goes at the end.

    Raises `ConfigError` where the harness is not installed or there is no such task, `DataError` where a task's data is
    not there.
    """

    def __init__(self, asked: Asked) -> None:
        if lacking := next((name for name in ("lm_eval", "accelerate") if not present(name)), None):
            raise ConfigError([missing(lacking)])
        self.asked = asked
        self.not_read = ""
        """The columns and files of MMLU that no task has, in words."""
        self._work = tempfile.TemporaryDirectory(prefix="smtrain-evaluation-")
        work = Path(self._work.name)
        try:
            self._load(work)
        except BaseException:
            self._work.cleanup()
            raise

    def _load(self, work: Path) -> None:
        from smtrain.worker.data.read.unread import UnreadText, unread_sentence
        from smtrain.worker.evaluation.mmlu import write_tasks

        asked, folders = self.asked, []
        local = False
        if asked.data is not None:
            if not asked.data.is_dir():
                raise DataError(f"{asked.data} is not a folder; give one of task YAMLs, or of MMLU's files.")
            unread = UnreadText()
            made = write_tasks(asked.data, work, unread)
            self.not_read = unread_sentence(unread)
            yamls = list(asked.data.rglob("*.yaml"))
            if not made and not yamls:
                raise DataError(
                    f"{asked.data} holds neither a task's .yaml nor MMLU (SUBJECT/test-*.parquet, or "
                    "test/SUBJECT_test.csv); give the folder that does."
                )
            folders = [*([str(work / "mmlu")] if made else []), *([str(asked.data.resolve())] if yamls else [])]
            local = set(asked.tasks) <= {*made, *_names(yamls)}
        offline = local or not reachable(asked)
        with doing("importing lm-evaluation-harness"), collector_paused():
            from lm_eval.tasks import TaskManager

        # Without a hub its libraries take what is kept here, in place of asking it again and again.
        self._settled = partial(settled, work / "cache", offline=offline)
        with doing("reading the tasks"), quiet(), self._settled(), within(asked.data):
            self.manager = TaskManager(include_path=folders or None, include_defaults=not local)
            unknown = [name for name in asked.tasks if not self.manager.match_tasks([name])]
            if unknown:
                raise _no_task(unknown[0], self.manager.all_tasks)

    def measure(self, folder: Path, adapter: Path | None = None, progress: HarnessProgress | None = None) -> Measured:
        """The scores of the Hugging Face model in `folder`, with a PEFT adapter on it if there is one.

        `progress` is told how far it has come. Raises `DataError` where data or model cannot be read.
        """
        import torch

        if adapter is not None and not present("peft"):
            raise ConfigError([missing("peft")])

        asked = self.asked
        folder, adapter = folder.resolve(), adapter.resolve() if adapter else None  # from here, not from the data
        device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
        with quiet(), self._settled(), within(asked.data):
            with collector_paused():
                from lm_eval import simple_evaluate
                from lm_eval.models.huggingface import HFLM

            from smtrain.worker.generation.load import MISFITS, NO_MODEL, not_an_adapter_for, not_loaded

            try:
                model: Any = HFLM(
                    pretrained=str(folder),
                    tokenizer=_tokenizer(folder),
                    device=device,
                    dtype="auto",
                    batch_size=asked.batch_size,
                    peft=str(adapter) if adapter else None,
                )
            except MISFITS as error:
                if adapter is not None:
                    raise DataError(not_an_adapter_for(folder, adapter, error)) from error
                if not isinstance(error, NO_MODEL):
                    raise
                raise DataError(not_loaded(folder, error)) from error
            if asked.chat_template and not model.tokenizer.chat_template:
                raise ConfigError(
                    [f"chat_template: the tokenizer of {folder} has none; put the model's chat_template.jinja there"]
                )
            if progress is not None:
                progress.watch(model)
            try:
                with no_repository():
                    found: Any = simple_evaluate(
                        model=model, tasks=list(asked.tasks), num_fewshot=asked.num_fewshot, limit=asked.limit,
                        task_manager=self.manager, apply_chat_template=asked.chat_template, log_samples=True,
                        batch_size=asked.batch_size,
                    )  # fmt: skip
            except (OSError, ConnectionError, ValueError) as error:
                if isinstance(error, SmtrainError):
                    raise
                raise DataError(
                    f"tasks: the data of {', '.join(asked.tasks)} cannot be read ({first_line(error)}); give a folder "
                    "that has it (evaluate.data), or let the machine reach the hub."
                ) from error
            return _measured(found, model)

    def close(self) -> None:
        """Delete what was made of the data."""
        self._work.cleanup()


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {name: metadata.version(name) for name in VERSIONS}


def _tokenizer(folder: Path) -> Any:
    """The tokenizer of a model's folder, with a padding token that the model has.

    Raises what transformers raises, and `DataError` if it can write ids that the model lacks.
    """
    from smtrain.core.model import hf_tokenizer

    described = json.loads((folder / "config.json").read_text("utf-8"))
    tokenizer = hf_tokenizer.load(folder)
    if fault := hf_tokenizer.vocabulary_fault(tokenizer.get_vocab(), hf_tokenizer.vocabulary_of(described)):
        raise DataError(f"{folder}: {fault}.")
    if not any((tokenizer.pad_token, tokenizer.unk_token, tokenizer.eos_token)):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)  # or the harness adds one of its own, with a new id
    return tokenizer


def _measured(found: dict[str, Any], model: Any) -> Measured:
    scores: dict[tuple[str, str, str], Score] = {}
    questions: dict[str, list[str]] = {}
    prompts: dict[str, dict[str, str]] = {}
    for task, samples in found["samples"].items():
        ordered = sorted(samples, key=lambda one: one["doc_id"])
        questions[task] = [one["doc_hash"] for one in ordered if one.get("filter") == ordered[0].get("filter")]
        prompts[task] = _prompt(ordered[0]) if ordered else {}
    for group in found.get("group_subtasks", {}):
        if group not in questions:
            questions[group] = [one for task in _leaves(found, group) for one in questions[task]]
    for task, numbers in {**found["results"], **found.get("groups", {})}.items():
        for key, value in numbers.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = numbers.get(f"{metric}_stderr,{filtered}")
            each = _each(found, task, metric, filtered)
            better = found.get("higher_is_better", {}).get(task, {}).get(metric)
            scores[task, metric, filtered] = Score(
                task, metric, filtered, float(value), float(error) if isinstance(error, (int, float)) else None,
                len(questions.get(task, ())), better is not False, each,
            )  # fmt: skip
    listed = {
        task: str(told["metric_list"][0]["metric"])
        for task, told in found.get("configs", {}).items()
        if told.get("metric_list")
    }
    return Measured(scores, questions, prompts, listed, _cut(found, model))


def _leaves(found: dict[str, Any], task: str) -> list[str]:
    """The tasks with questions that a group has, also through groups within it; a task is its own."""
    if task in found["samples"]:
        return [task]
    return sorted({leaf for one in found.get("group_subtasks", {}).get(task, ()) for leaf in _leaves(found, one)})


def _each(found: dict[str, Any], task: str, metric: str, filtered: str) -> tuple[float, ...]:
    values: list[float] = []
    for leaf in _leaves(found, task):
        for one in sorted(found["samples"].get(leaf, ()), key=lambda sample: sample["doc_id"]):
            if one.get("filter", filtered) != filtered:
                continue
            value = one.get(metric)
            if not isinstance(value, (int, float)):
                return ()
            values.append(float(value))
    return tuple(values)


def _arguments(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) of each request of a question; a continuation that is to be generated is empty."""
    told = sample["arguments"]
    pairs = [tuple(one.values()) for one in told.values()] if isinstance(told, dict) else [tuple(one) for one in told]
    return [(str(pair[0]), pair[1] if len(pair) > 1 and isinstance(pair[1], str) else "") for pair in pairs]


def _prompt(sample: dict[str, Any]) -> dict[str, str]:
    context, continuation = _arguments(sample)[0]
    return {"prompt": context, "first_continuation": continuation, "target": str(sample.get("target"))}


def _cut(found: dict[str, Any], model: Any) -> int:
    """How many requests are longer than the model's positions; what is shorter in bytes need not be counted."""
    longest = model.max_length
    pairs = [pair for samples in found["samples"].values() for one in samples for pair in _arguments(one)]
    # the last token of a continuation is predicted only
    rooms = [(f"{context}{after}", longest + bool(after)) for context, after in pairs]
    return sum(len(model.tok_encode(text)) > room for text, room in rooms if len(text.encode(errors="replace")) > room)


def _names(yamls: Iterable[Path]) -> Iterator[str]:
    """The names of tasks, groups and tags in files of the harness, whose own tags a plain reader does not know."""
    for path in yamls:
        yield from (found[1] for found in _NAMED.finditer(path.read_text("utf-8", errors="replace")))
