"""Run lm-evaluation-harness on one model: its numbers, the score of each question, and the
prompts.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.benchmarks import (
    benchmark_of,
    benchmarks_in,
    code_fault,
    forms_of,
    runs_code,
    shots_fault,
    tasks_of,
)
from smtrain.core.errors import ConfigError, DataError, SmtrainError, first_line
from smtrain.core.extras import missing_module, pause_collector, present
from smtrain.core.spinner import spinner
from smtrain.core.suggest import nearest
from smtrain.worker.evaluation.libraries import (
    HarnessProgress,
    configure_libraries,
    endpoint,
    holds_data_sets,
    hub_answers,
    in_folder,
    no_repository,
    silence_warnings,
)
from smtrain.worker.evaluation.offline import tasks_folder, write_confined, write_tasks

if TYPE_CHECKING:
    from smtrain.worker.generation.load import LoadedModel

_TASK_NAME_LINE = re.compile(
    r"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([\w.-]+)["']?[ \t]*$""", re.MULTILINE
)
VERSIONS = ("lm_eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class Score:
    """One metric of a task."""

    task: str
    metric: str
    filter: str
    value: float
    stderr: float | None
    n: int
    higher_is_better: bool
    question_scores: tuple[float, ...] = ()
    """The score of each question, in order; empty if the metric is not a mean over questions."""


@dataclass(frozen=True)
class Measurement:
    """A model's scores, by task and metric."""

    scores: dict[tuple[str, str, str], Score]
    questions: dict[str, list[str]]
    """A digest of each question by task, for pairing."""
    prompts: dict[str, dict[str, str]] = field(default_factory=dict)
    """The first question by task, exactly as the model read it, and the scored answer."""
    first_metrics: dict[str, str] = field(default_factory=dict)
    """The first metric that each task lists."""
    cut: int = 0
    """Requests that were longer than the model's positions, and lost their beginning."""


def can_reach_hub(request: EvaluationRequest) -> bool:
    """Whether the data of tasks that are not all in `request.data` can come from the hub; else take
    the local cache.

    Takes seconds and loads nothing, so call it before models are fetched. Raises `ConfigError` if
    the harness is not installed, `DataError` if the hub does not answer and no data set is cached.
    """
    if package := next((name for name in ("lm_eval", "accelerate") if not present(name)), None):
        raise ConfigError([missing_module(package)])
    if hub_answers():
        return True
    if holds_data_sets():
        return False
    folders = [folder for folder in (request.data, tasks_folder()) if folder is not None]
    task_names = {name for folder in folders for name in _named_in(folder)}
    if set(request.tasks) <= task_names:  # else the harness reports the unknown task
        raise DataError(
            f"tasks: the data of {', '.join(request.tasks)} cannot be read (it is not on this"
            f" machine, and {endpoint()} does not answer); give a folder that has it"
            f" (evaluate.data{_form_of(request.tasks)}), or let the machine reach the hub."
        )
    return False


_TOKEN = re.compile(rb"[\w.\-+]{2,}")
_NO_TASKS = (".json", ".jsonl", ".csv", ".tsv", ".txt", ".pyc")


def refuse_unknown_tasks(request: EvaluationRequest) -> None:
    """Raise `ConfigError` for a task whose name occurs nowhere in the harness's own files.

    Takes one second; importing the harness, which reads them all, takes ten. The harness itself
    refuses a name that occurs but is not a task's.
    """
    names = [name for name in request.tasks if _TOKEN.fullmatch(name.encode())]
    if request.data is not None or not names or not present("lm_eval"):
        return
    tasks_root = tasks_folder()
    harness_words: set[bytes] = set()
    for folder, _, files in os.walk(tasks_root):
        harness_words |= {Path(folder).name.encode(), *(Path(file).stem.encode() for file in files)}
        for file in files:
            if not file.endswith(_NO_TASKS):
                harness_words.update(_TOKEN.findall(Path(folder, file).read_bytes()))
    for name in names:
        if name.encode() not in harness_words:
            raise _no_task(name, _named_in(tasks_root))


def _no_task(name: str, task_names: Iterable[str]) -> ConfigError:
    suggestion = nearest(name, task_names)
    hint = (
        f"did you mean {suggestion}?"
        if suggestion
        else "`lm-eval ls tasks` lists those of the harness"
    )
    return ConfigError(f"tasks: there is no task {name!r}; {hint}", code="config.wrong_value")


def refuse_unreachable(request: EvaluationRequest) -> None:
    """Raise as `can_reach_hub` does unless the folder of data has all tasks; faults of the folder
    are reported later.
    """
    folder = request.data
    if folder is None or (
        folder.is_dir() and not _held_in(folder) >= set(map(_group_of, request.tasks))
    ):
        can_reach_hub(request)


def refuse_tasks(request: EvaluationRequest) -> None:
    """Raise `ConfigError` for a task that cannot be put as the request says: with examples, or by
    running code.
    """
    if fault := code_fault(request.tasks, request.run_generated_code):
        raise ConfigError(f"tasks: {fault}", code="config.combination")
    if fault := shots_fault(request.tasks, request.num_fewshot):
        raise ConfigError(f"num_fewshot: {fault}", code="config.combination")


def _held_in(folder: Path) -> set[str]:
    """The tasks of a folder: of its YAMLs, and of the benchmarks whose files it has."""
    return _named_in(folder) | {_group_of(task) for task in tasks_of(benchmarks_in(folder))}


def _group_of(task: str) -> str:
    """`mmlu` for its subjects, which one file may hold together; other tasks themselves."""
    return "mmlu" if benchmark_of(task) == "mmlu" else task


def _form_of(tasks: Iterable[str]) -> str:
    """The files of these tasks' benchmarks, in brackets' continuation; "" if they are of no known
    one.
    """
    benchmark_tasks = [task for task in tasks if benchmark_of(task)]
    return f": {forms_of(benchmark_tasks)}" if benchmark_tasks else ""


def _named_in(folder: Path) -> set[str]:
    return set(_names(folder.rglob("*.yaml")))


class Tasks:
    """The requested tasks with their data; `close` deletes the temporary folder.

    Raises `ConfigError` if the harness is not installed or a task is unknown, `DataError` if a
    task's data is missing.
    """

    def __init__(self, request: EvaluationRequest) -> None:
        if package := next((name for name in ("lm_eval", "accelerate") if not present(name)), None):
            raise ConfigError([missing_module(package)])
        self.request = request
        self.not_read = ""
        """A sentence about MMLU's columns and files that no task uses."""
        self._work = tempfile.TemporaryDirectory(prefix="smtrain-evaluation-")
        work = Path(self._work.name)
        try:
            self._load(work)
        except BaseException:
            self._work.cleanup()
            raise

    def _load(self, work: Path) -> None:
        from smtrain.worker.data.read.ignored_fields import IgnoredText, ignored_text_sentence

        request, folders = self.request, []
        refuse_tasks(request)
        local = False
        if request.data is not None:
            if not request.data.is_dir():
                raise DataError(
                    f"{request.data} is not a folder; give one of task YAMLs, or of a benchmark's"
                    " files.",
                    code="data.not_found",
                )
            ignored_text = IgnoredText()
            yamls = list(request.data.rglob("*.yaml"))
            yaml_tasks = set(_names(yamls))
            written_tasks = write_tasks(
                request.data,
                tuple(name for name in request.tasks if name not in yaml_tasks),
                work,
                ignored_text,
            )
            self.not_read = ignored_text_sentence(ignored_text)
            if not written_tasks and not yamls:
                raise DataError(
                    f"{request.data} holds no task's .yaml and no {forms_of(request.tasks)}; give"
                    " the folder that does.",
                    code="data.not_found",
                )
            folders = [
                *([str(work)] if written_tasks else []),
                *([str(request.data.resolve())] if yamls else []),
            ]
            local = set(request.tasks) <= {*written_tasks, *yaml_tasks}
        code = any(map(runs_code, request.tasks))
        if code:
            write_confined(work)
            folders = [str(work), *(folder for folder in folders if folder != str(work))]
        offline = local or not can_reach_hub(request)
        with spinner("importing lm-evaluation-harness"), pause_collector():
            from lm_eval.tasks import TaskManager

        # Without a hub the libraries take the local cache instead of asking again and again.
        self._settled = partial(configure_libraries, work / "cache", offline=offline, run_code=code)
        with (
            spinner("reading the tasks"),
            silence_warnings(),
            self._settled(),
            in_folder(request.data),
        ):
            self.manager = TaskManager(include_path=folders or None, include_defaults=not local)
            unknown_tasks = [name for name in request.tasks if not self.manager.match_tasks([name])]
            if unknown_tasks:
                raise _no_task(unknown_tasks[0], self.manager.all_tasks)

    def measure(
        self, folder: Path, adapter: Path | None = None, progress: HarnessProgress | None = None
    ) -> Measurement:
        """Score the Hugging Face model in `folder`, with a PEFT adapter on it if one is given.

        Raises `DataError` if the data cannot be read, and `CheckpointError` as `load` does.
        """
        if adapter is not None and not present("peft"):
            raise ConfigError([missing_module("peft")])

        request = self.request
        # Before we change into the folder of the data.
        folder, adapter = folder.resolve(), adapter.resolve() if adapter else None
        with silence_warnings(), self._settled(), in_folder(request.data):
            with pause_collector():
                from lm_eval import simple_evaluate

            from smtrain.worker.generation.load import load

            model = _reader(load(folder, adapter=adapter), request)
            if request.chat_template and not model.tokenizer.chat_template:
                raise ConfigError(
                    f"chat_template: the tokenizer of {folder} has none; put the model's"
                    " chat_template.jinja there",
                    code="config.wrong_value",
                )
            if progress is not None:
                progress.watch(model)
            try:
                with no_repository():
                    results: Any = simple_evaluate(
                        model=model,
                        tasks=list(request.tasks),
                        num_fewshot=request.num_fewshot,
                        limit=request.limit,
                        task_manager=self.manager,
                        apply_chat_template=request.chat_template,
                        log_samples=True,
                        batch_size=request.batch_size,
                    )
            except (OSError, ConnectionError, ValueError) as error:
                if isinstance(error, SmtrainError):
                    raise
                if "unsafe" in str(error):
                    raise ConfigError(
                        f"tasks: {', '.join(request.tasks)} run code that the model writes, and not"
                        " by the metric that smtrain runs confined; leave such tasks out, or run"
                        " them by lm-eval itself",
                        code="config.wrong_value",
                    ) from error
                raise DataError(
                    f"tasks: the data of {', '.join(request.tasks)} cannot be read"
                    f" ({first_line(error)}); give a folder that has it (evaluate.data), or let the"
                    " machine reach the hub."
                ) from error
            return _read_measurement(results, model)

    def close(self) -> None:
        """Delete the temporary folder."""
        self._work.cleanup()


def versions() -> dict[str, str]:
    """Versions of the packages that the numbers depend on."""
    return {name: metadata.version(name) for name in VERSIONS}


def _pad(loaded_model: LoadedModel) -> None:
    """Give a tokenizer a padding token that its model has: the end of a text, or id 0.

    The harness pads with any that the tokenizer names, and adds one if it names none.
    """
    tokenizer = loaded_model.tokenizer
    pad = tokenizer.pad_token_id
    if pad is None or pad >= loaded_model.vocabulary:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(loaded_model.padding)


def _reader(loaded_model: LoadedModel, request: EvaluationRequest) -> Any:
    """The harness's model of a loaded one; it refuses texts with a token that the model lacks."""
    from lm_eval.models.huggingface import HFLM

    class Reader(HFLM):  # type: ignore[misc]  # lm_eval has no types here
        def tok_encode(self, *args: Any, **options: Any) -> Any:
            ids = super().tok_encode(*args, **options)
            loaded_model.refuse_unknown_token(ids)
            return ids

        def tok_batch_encode(self, *args: Any, **options: Any) -> Any:
            ids, mask = super().tok_batch_encode(*args, **options)
            loaded_model.refuse_unknown_token(ids.flatten().tolist())
            return ids, mask

    _pad(loaded_model)
    reader_class: Any = Reader
    return reader_class(
        pretrained=loaded_model.model,
        tokenizer=loaded_model.tokenizer,
        batch_size=request.batch_size,
        chat_template_args=request.chat_template_kwargs,
    )


def _read_measurement(results: dict[str, Any], model: Any) -> Measurement:
    scores: dict[tuple[str, str, str], Score] = {}
    questions: dict[str, list[str]] = {}
    prompts: dict[str, dict[str, str]] = {}
    for task, samples in results["samples"].items():
        sorted_samples = sorted(samples, key=lambda entry: entry["doc_id"])
        questions[task] = [
            entry["doc_hash"]
            for entry in sorted_samples
            if entry.get("filter") == sorted_samples[0].get("filter")
        ]
        prompts[task] = _prompt(sorted_samples[0]) if sorted_samples else {}
    for group in results.get("group_subtasks", {}):
        if group not in questions:
            questions[group] = [
                entry for task in _leaves(results, group) for entry in questions[task]
            ]
    for task, numbers in {**results["results"], **results.get("groups", {})}.items():
        for key, value in numbers.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = numbers.get(f"{metric}_stderr,{filter_name}")
            question_scores = _question_scores(results, task, metric, filter_name)
            better = results.get("higher_is_better", {}).get(task, {}).get(metric)
            scores[task, metric, filter_name] = Score(
                task,
                metric,
                filter_name,
                float(value),
                float(error) if isinstance(error, (int, float)) else None,
                len(questions.get(task, ())),
                better is not False,
                question_scores,
            )
    first_metrics = {
        task: str(config["metric_list"][0]["metric"])
        for task, config in results.get("configs", {}).items()
        if config.get("metric_list")
    }
    return Measurement(scores, questions, prompts, first_metrics, _cut(results, model))


def _leaves(results: dict[str, Any], task: str) -> list[str]:
    """The tasks with questions in a group, also through nested groups; a task's leaf is itself."""
    if task in results["samples"]:
        return [task]
    return sorted(
        {
            leaf
            for subtask in results.get("group_subtasks", {}).get(task, ())
            for leaf in _leaves(results, subtask)
        }
    )


def _question_scores(
    results: dict[str, Any], task: str, metric: str, filter_name: str
) -> tuple[float, ...]:
    values: list[float] = []
    for leaf in _leaves(results, task):
        for question in sorted(
            results["samples"].get(leaf, ()), key=lambda sample: sample["doc_id"]
        ):
            if question.get("filter", filter_name) != filter_name:
                continue
            value = question.get(metric)
            if not isinstance(value, (int, float)):
                return ()
            values.append(float(value))
    return tuple(values)


def _arguments(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """(context, continuation) of each request of a question; empty if the continuation is to be
    generated.
    """
    requests = sample["arguments"]
    requests = (
        [request.values() for request in requests.values()]
        if isinstance(requests, dict)
        else requests
    )
    pairs = [tuple(request) for request in requests]
    return [
        (str(pair[0]), pair[1] if len(pair) > 1 and isinstance(pair[1], str) else "")
        for pair in pairs
    ]


def _prompt(sample: dict[str, Any]) -> dict[str, str]:
    context, continuation = _arguments(sample)[0]
    return {
        "prompt": context,
        "first_continuation": continuation,
        "target": str(sample.get("target")),
    }


def _cut(results: dict[str, Any], model: Any) -> int:
    """Count the requests that are longer than the model's positions; fewer bytes than that are
    never too long.
    """
    longest = model.max_length
    pairs = [
        pair
        for samples in results["samples"].values()
        for sample in samples
        for pair in _arguments(sample)
    ]
    # the last token of a continuation is only predicted, so it needs no position
    rooms = [
        (f"{context}{continuation}", longest + bool(continuation))
        for context, continuation in pairs
    ]
    return sum(
        len(model.tok_encode(text)) > room
        for text, room in rooms
        if len(text.encode(errors="replace")) > room
    )


def _names(yamls: Iterable[Path]) -> Iterator[str]:
    """Names of tasks, groups and tags in the harness's YAML files, whose own tags a plain YAML
    reader does not know.
    """
    for path in yamls:
        yield from (
            match[1]
            for match in _TASK_NAME_LINE.finditer(path.read_text("utf-8", errors="replace"))
        )


@dataclass(frozen=True)
class EvaluationRequest:
    """Tasks by name, and how they are put to a model."""

    tasks: tuple[str, ...]
    data: Path | None = None
    """A folder of task YAMLs with their data, or of the files of benchmarks
    (`smtrain.core.benchmarks`).
    """
    num_fewshot: int | None = None
    """Worked examples before each question; None: the task's own number."""
    limit: int | None = None
    """Questions of each task (of a group: of each of its tasks); None: all."""
    chat_template: bool = False
    batch_size: int = 8
    run_generated_code: bool = False
    """Run the code that the model writes for tasks such as humaneval, confined."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template."""

    def as_json(self) -> dict[str, Any]:
        values = {
            **asdict(self),
            "tasks": list(self.tasks),
            "data": str(self.data) if self.data else None,
        }
        return (
            values
            if self.chat_template_kwargs
            else {k: v for k, v in values.items() if k != "chat_template_kwargs"}
        )
