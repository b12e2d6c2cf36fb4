"""Rules for data: its sources, what the objective can use of them, and the tasks of stage
evaluate.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, all_set, rule_faults
from smtrain.client.config.yaml_file import read_settings
from smtrain.core.benchmarks import benchmarks_in, code_fault, forms_of, shots_fault, tasks_of
from smtrain.core.config.data import ANSWER_COLUMNS, PAIR_COLUMNS
from smtrain.core.config.outputs import LONG_TASKS, POSITIONS, Evaluate
from smtrain.core.config.schema import TESTS_CHANNEL, JobConfig, other_inputs
from smtrain.core.errors import ConfigError, Sentence
from smtrain.core.extras import MODULES, missing_module, present
from smtrain.core.files import read_value
from smtrain.core.model.hf_folder import tokenizer_in
from smtrain.core.protocol.entrypoints import EXTRAS, package_needs
from smtrain.core.protocol.uris import A_URI, object_store, readable_schemes, spelling_fault
from smtrain.core.suggest import near_path
from smtrain.core.targets import TARGETS, TargetName
from smtrain.core.yaml_text import YamlError, parse


def _weighted_count(config: JobConfig) -> int:
    """Number of sources with a weight."""
    return sum(source.weight is not None for source in config.data.sources)


SOURCES = (
    Rule(
        "data.path data.sources",
        lambda c: c.data.sources and c.data.path,
        "data.path, data.sources: both are set; name the path among the sources",
    ),
    Rule(
        "data.sources",
        lambda c: _weighted_count(c) not in (0, len(c.data.sources)),
        lambda c: (
            f"data.sources: {_weighted_count(c)} of {len(c.data.sources)} sources have a weight;"
            " give one to every source, or to none"
        ),
    ),
    Rule(
        "data.machines network.isolation",
        lambda c: c.network.isolation and c.data.machines > 1,
        "data.machines: keeps shares of the text in S3, and network.isolation keeps jobs from it;"
        " set only one",
    ),
    Rule(
        "data.path data.sources network.isolation",
        lambda c: (
            c.network.isolation and any(s.path.startswith("hf://") for s in c.data.all_sources)
        ),
        "data.path: hf:// needs the network, which network.isolation takes away; give the files, or"
        " allow it",
    ),
    Rule(
        "data.decontaminate.path network.isolation",
        lambda c: (
            c.network.isolation
            and c.data.decontaminate
            and c.data.decontaminate.path.startswith("hf://")
        ),
        "data.decontaminate.path: hf:// needs the network, which network.isolation takes away; give"
        " the files, or allow it",
    ),
)

OBJECTIVE = (
    Rule(
        "data.format train.objective",
        lambda c: c.train.objective == "dpo" and c.data.format in ("text", "megatron"),
        lambda c: (
            f"data.format: {c.data.format} has no pairs of answers for train.objective: dpo; use"
            " jsonl"
        ),
    ),
    Rule(
        "data.columns train.objective",
        lambda c: c.train.objective == "sft" and PAIR_COLUMNS & c.data.columns.keys(),
        lambda c: (
            f"data.columns: {', '.join(sorted(PAIR_COLUMNS & c.data.columns.keys()))} are columns"
            " of preference data, and train.objective: sft learns one answer; name the question as"
            " instruction and the answer as output"
        ),
    ),
    Rule(
        "data.columns train.objective",
        lambda c: c.train.objective == "dpo" and ANSWER_COLUMNS & c.data.columns.keys(),
        lambda c: (
            f"data.columns: {', '.join(sorted(ANSWER_COLUMNS & c.data.columns.keys()))} are columns"
            " of one answer, and train.objective: dpo learns from two; name the answers as chosen"
            " and rejected"
        ),
    ),
    Rule(
        "data.format train.objective",
        lambda c: c.train.objective == "sft" and c.data.format in ("text", "megatron"),
        lambda c: (
            f"data.format: {c.data.format} has no answers to learn for train.objective: sft; use"
            " alpaca or messages"
        ),
    ),
    Rule(
        "data.format train.objective",
        lambda c: c.train.objective != "sft" and c.data.format in ("alpaca", "messages"),
        lambda c: (
            f"data.format: {c.data.format} is instruction data; set train.objective: sft"
            " (`smtrain help sft`), or another format"
        ),
    ),
    Rule(
        "data.columns train.objective",
        lambda c: c.train.objective == "pretrain" and c.data.columns,
        "data.columns: is for train.objective: sft; leave it out and name the field of the text in"
        " data.text_column",
    ),
    Rule(
        "data.overlong train.objective",
        lambda c: (
            c.train.objective == "pretrain" and not c.data.columns and c.data.overlong != "truncate"
        ),
        "data.overlong: is for train.objective: sft; leave it out, text is cut into windows",
    ),
)


def _for_text(key: str, verb: str) -> Callable[[JobConfig], str]:
    them = "it" if verb == "is" else "them"
    return lambda c: (
        f"{key}: {verb} for train.objective: pretrain; leave {them} out for {c.train.objective}"
    )


PRETRAIN_ONLY = tuple(
    Rule(f"{key} train.objective", is_requested, _for_text(key, verb))
    for key, verb, is_requested in (
        (
            "data.document_mask",
            "is",
            lambda c: c.data.document_mask,
        ),  # other objectives always keep their samples apart
        ("data.text_column", "is", lambda c: c.data.text_column != "text"),
        ("data.separator", "is", lambda c: c.data.separator is not None),
        ("data.unicode", "is", lambda c: c.data.unicode != "none"),
        ("data.strip_control", "is", lambda c: c.data.strip_control),
        ("data.min_characters", "is", lambda c: c.data.min_characters > 0),
        ("data.deduplicate", "is", lambda c: c.data.deduplicate),
        ("data.filters", "are", lambda c: c.data.filters),
        ("data.near_duplicates", "are", lambda c: c.data.near_duplicates is not None),
        ("data.pii", "is", lambda c: c.data.pii is not None),
        ("data.fix_mojibake", "is", lambda c: c.data.fix_mojibake),
        ("data.language", "is", lambda c: c.data.language is not None),
        ("data.decontaminate", "is", lambda c: c.data.decontaminate is not None),
        ("data.sources", "weights are", lambda c: c.data.weights is not None),
    )
)

MEGATRON = tuple(
    Rule(
        f"{key} data.format",
        all_set(key),
        f"{key}: megatron is tokens, which nothing filters; leave it out or give text",
    )
    for key in (
        "data.filters",
        "data.near_duplicates",
        "data.pii",
        "data.fix_mojibake",
        "data.language",
        "data.decontaminate",
    )
)

TEMPLATE = Rule(
    "model.chat_template_kwargs train.objective evaluate.chat_template",
    lambda c: (
        c.model.chat_template_kwargs
        and c.train.objective == "pretrain"
        and not c.evaluate.chat_template
    ),
    "model.chat_template_kwargs: no conversation is written with train.objective: pretrain; leave"
    " it out, or set evaluate.chat_template",
)

PHONES = Rule(
    "data.phone_region data.pii",
    lambda c: c.data.phone_region and not c.data.pii,
    "data.phone_region: has no effect unless data.pii is set; leave it out",
)


def data_faults(config: JobConfig) -> Iterator[Fault]:
    """Sources that cannot be mixed, and options that the objective cannot use."""
    yield from rule_faults(SOURCES, config)
    key, store = config.data.text_key, object_store(config.target)
    for path in (
        source.path for source in config.data.all_sources if source.path.startswith(store)
    ):
        if "*" in path or "?" in path:
            yield (
                {key},
                (
                    f"{key}: {path} has a wildcard, and a job's input is everything under a prefix;"
                    " give the prefix up to it, and data.format if there are other files"
                ),
            )
    yield from text_faults(config)
    yield from rule_faults((TEMPLATE,), config)
    if (
        TARGETS[config.target].here and config.local.run_in == "sandbox"
    ):  # the job runs with this machine's packages
        for need in package_needs(config.model_dump()):
            absent_module = next(
                (name for name in MODULES[EXTRAS[need]] if not present(name)), None
            )
            if absent_module:
                yield (
                    {need.partition(":")[0]},
                    Sentence(f"{need}: {missing_module(absent_module)}", "package.missing"),
                )


def text_faults(config: JobConfig) -> Iterator[Fault]:
    """Options that the objective or the format of the text cannot use."""
    yield from rule_faults(
        (*OBJECTIVE, *(PRETRAIN_ONLY if config.train.objective != "pretrain" else ())), config
    )
    yield from rule_faults(
        (*(MEGATRON if config.data.format == "megatron" else ()), PHONES), config
    )


def path_faults(config: JobConfig) -> Iterator[Fault]:
    """Text missing from this machine, and URIs of schemes that cannot be read."""
    key, store = config.data.text_key, object_store(config.target)
    known_prefixes = ("hf://", "demo://", *readable_schemes(config.target, with_mounts=True))
    for path in (source.path for source in config.data.all_sources):
        if (
            hint := spelling_fault(path, known_prefixes, data=True)
            if not path.startswith(known_prefixes)
            else None
        ):
            yield {key}, f"{key}: {hint}"
        elif "://" in path and not path.startswith(known_prefixes):
            yield {key}, f"{key}: {path} is not {_words(config.target, 'hf://')}"
        elif fault := _demo_text_fault(path):
            yield {key}, f"{key}: {fault}"
        elif "://" not in path and not Path(path).exists() and not glob.has_magic(path):
            remedy = f"{near_path(path)}give a file, a folder, a glob or {A_URI[store]}"
            yield {key}, Sentence(f"{key}: {path} does not exist; {remedy}", "data.not_found")
    yield from _other_path_faults(config)


def _demo_text_fault(path: str) -> str | None:
    if not path.startswith("demo://"):
        return None
    from smtrain.core.demo.inputs import TEXTS, demo_fault

    return demo_fault(path, TEXTS)


def _words(target: str, *hub: str) -> str:
    """The kinds of places for text, in the words of a sentence."""
    schemes = [
        scheme for scheme in readable_schemes(target, with_mounts=True) if scheme != "file://"
    ]
    return f"a path, {', '.join([schemes[0], *hub, *schemes[1:]])} or demo://"


def _other_path_faults(config: JobConfig) -> Iterator[Fault]:
    """The same for held-out text, the text of tests and a language model."""
    store = object_store(config.target)
    for key, channel, path in other_inputs(config):
        hub = ("hf://",) if channel == TESTS_CHANNEL else ()
        known_prefixes = (*hub, "demo://", *readable_schemes(config.target, with_mounts=True))
        if (
            hint := spelling_fault(path, known_prefixes)
            if not path.startswith(known_prefixes)
            else None
        ):
            yield {key}, f"{key}: {hint}"
            continue
        if "://" in path and not path.startswith(known_prefixes):
            yield {key}, f"{key}: {path} is not {_words(config.target, *hub)}"
        if path.startswith(store) and ("*" in path or "?" in path):
            yield (
                {key},
                (
                    f"{key}: {path} has a wildcard, and a job's input is everything under a prefix;"
                    " give that"
                ),
            )
        if "://" not in path and not Path(path).exists() and not glob.has_magic(path):
            remedy = f"{near_path(path)}give a file, a folder, a glob or {A_URI[store]}"
            yield {key}, Sentence(f"{key}: {path} does not exist; {remedy}", "data.not_found")


def prepared_faults(config: JobConfig) -> Iterator[Fault]:
    """A folder of this machine without a prepared dataset, and URIs of schemes that cannot be
    read.
    """
    folder, store = config.data.prepared, object_store(config.target)
    known_prefixes = readable_schemes(config.target, with_mounts=True)
    if folder is None or folder.startswith(known_prefixes):
        return
    if hint := spelling_fault(folder, known_prefixes):
        yield {"data.prepared"}, f"data.prepared: {hint}"
    elif "://" in folder:
        yield {"data.prepared"}, f"data.prepared: {folder} is not a folder or {A_URI[store]}"
    elif not (Path(folder) / "manifest.json").is_file():
        fault = (
            f"data.prepared: {folder} holds no manifest.json; give a folder that `smtrain data"
            f" prepare` or stage prepare wrote, or its {store} URI"
        )
        yield {"data.prepared"}, Sentence(fault, "data.not_found")


def tokenizer_faults(
    config: JobConfig, folder: Path, hf_config: Mapping[str, Any]
) -> Iterator[Fault]:
    """A tokenizer in the model's folder that cannot write conversations, or that ends texts by an
    unknown id.
    """
    if config.data.prepared is not None:
        return
    from smtrain.core.model.hf_tokenizer import end_fault

    if (
        config.train.objective == "sft"
        and tokenizer_in(p.name for p in folder.iterdir())
        and not _template(folder)
    ):
        yield (
            {"model.path", "train.objective"},
            (
                f"model.path: the tokenizer of {folder} has no chat template, which"
                " train.objective: sft needs for conversations; put a chat_template.jinja there"
                " (`smtrain help sft` has one)"
            ),
        )
    if fault := end_fault(folder, hf_config):
        yield {"model.path"}, f"model.path: {folder}: {fault}"


def _template(folder: Path) -> bool:
    """Whether the tokenizer has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_value(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return False
    return bool(isinstance(settings, dict) and settings.get("chat_template"))


def task_faults(config: JobConfig) -> Iterator[Fault]:
    """Tasks of stage evaluate that run code, or are named by a path of this machine and cannot be
    read there.
    """
    if fault := code_fault(config.evaluate.tasks, config.evaluate.run_generated_code):
        yield {"evaluate.tasks", "evaluate.run_generated_code"}, f"evaluate.tasks: {fault}"
    if fault := shots_fault(config.evaluate.tasks, config.evaluate.num_fewshot):
        yield {"evaluate.tasks", "evaluate.num_fewshot"}, f"evaluate.num_fewshot: {fault}"
    yield from long_faults(config.evaluate, config.target)
    data, store = config.evaluate.data, object_store(config.target)
    if data is None or data.startswith(readable_schemes(config.target)):
        return
    folder = Path(data)
    if hint := spelling_fault(data, (store,)):
        yield {"evaluate.data"}, f"evaluate.data: {hint}"
        return
    if "://" in data or not folder.is_dir():
        fault = (
            f"{data} is not a folder or {A_URI[store]}; give one of task YAMLs, or of a benchmark's"
            " files"
        )
        yield {"evaluate.data"}, Sentence(f"evaluate.data: {fault}", "data.not_found")
        return
    local_tasks = tasks_in(folder)
    if not local_tasks and not any(folder.rglob("*.yaml")):
        yield (
            {"evaluate.data"},
            (
                f"evaluate.data: {data} holds no task's .yaml and no"
                f" {forms_of(config.evaluate.tasks)}; give the folder that does"
            ),
        )
    for name in config.evaluate.tasks:
        for file in _files(local_tasks.get(name, {})):
            if "://" not in file and not glob.has_magic(file) and not (folder / file).exists():
                fault = (
                    f"evaluate.data: the task {name} reads {folder / file}, which does not exist;"
                    " put it there, or correct the task's data_files"
                )
                yield {"evaluate.data"}, Sentence(fault, "data.not_found")


def long_faults(options: Evaluate, target: TargetName) -> Iterator[Fault]:
    """Keys of the tasks for long texts that are missing, or that no task reads."""
    text = options.text
    if POSITIONS in options.tasks and text is None:
        yield (
            {"evaluate.text", "evaluate.tasks"},
            (
                f"evaluate.text: is missing, and the task {POSITIONS} reads long documents; name"
                " some, such as those that training holds out"
            ),
        )
    for key in ("lengths", "text") if not options.long_tasks else ():
        if getattr(options, key):
            yield (
                {f"evaluate.{key}", "evaluate.tasks"},
                f"evaluate.{key}: only the tasks {' and '.join(LONG_TASKS)} read it; leave it out",
            )
    store = object_store(target)
    if text is None or text.startswith(("demo://", *readable_schemes(target))):
        return
    if hint := spelling_fault(text, (store,)):
        yield {"evaluate.text"}, f"evaluate.text: {hint}"
    elif "://" in text or not Path(text).exists():
        fault = (
            f"evaluate.text: {text} is not a file, a folder or {A_URI[store]}; give one with long"
            " documents"
        )
        yield {"evaluate.text"}, Sentence(fault, "data.not_found")


def tasks_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The YAML of each task and group in a folder, by name; {} for those of a benchmark whose own
    files are there.
    """
    tasks: dict[str, dict[str, Any]] = {name: {} for name in tasks_of(benchmarks_in(folder))}
    for path in sorted(folder.rglob("*.yaml")):
        task = _read(path)
        tasks |= {
            task[key]: task for key in ("task", "group", "tag") if isinstance(task.get(key), str)
        }
    return tasks


def _read(path: Path) -> dict[str, Any]:
    """A task's YAML; {} if it is not one, as the harness says what is wrong with it."""
    try:
        task = parse(read_settings(path, "task", "name a task"), unknown_tags=True)
    except (ConfigError, YamlError):
        return {}
    return task if isinstance(task, dict) else {}


def _files(task: dict[str, Any]) -> Iterator[str]:
    options = task.get("dataset_kwargs")
    files = options.get("data_files") if isinstance(options, dict) else None
    for entries in files.values() if isinstance(files, dict) else [files]:
        yield from (
            file
            for file in (entries if isinstance(entries, list) else [entries])
            if isinstance(file, str)
        )
