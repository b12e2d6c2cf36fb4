"""`smtrain init`: a first config, from three questions."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smtrain.cli import options
from smtrain.core.targets import TARGETS
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.core.config import JobConfig
    from smtrain.tools.data_form import DataForm

app = options.app()
_QUESTIONS = {
    "--model": (
        "The model: a Hugging Face folder, s3://..., hf://organization/model or demo://tiny-llama",
        "demo://tiny-llama",
    ),
    "--data": (
        (
            "The text: a file or folder (jsonl, parquet, plain text), s3://..., hf://NAME or"
            " demo://python-stdlib"
        ),
        "demo://python-stdlib",
    ),
    "--machines": (
        "The machines: `here`, or an instance type and how many, such as ml.trn1.32xlarge:2",
        "here",
    ),
}
_KEYS = {
    "--model": ("model",),
    "--data": ("data",),
    "--machines": ("machines", "compute", "parallel"),
}
"""Beginnings of the keys in the faults of an answer."""
_BYTES_PER_TOKEN = 4  # of English text, with a vocabulary of 32,000 to 150,000
_EPOCHS = 4
"""Up to 4 epochs the loss falls almost as with new text (Muennighoff et al. 2023, arXiv
2305.16264).
"""
_REGION = "us-west-2"
_OPEN = {
    "compute.role": "arn:aws:iam::111122223333:role/smtrain-training",
    "compute.region": _REGION,
}


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config to write.")] = Path(
        "smtrain.yaml"
    ),
    model: Annotated[str | None, typer.Option(help="Model to train: folder or URI.")] = None,
    data: Annotated[str | None, typer.Option(help="Text to train on: path or URI.")] = None,
    machines: Annotated[
        str | None, typer.Option(metavar="WHERE", help="`here`, or TYPE[:COUNT] on AWS.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of that name.")] = False,
) -> None:
    """Write a commented config; asks for missing options: the model, the text, and the machines.

    $ smtrain init  # asks three questions
    $ smtrain init my-run.yaml --model hf://HuggingFaceTB/SmolLM2-135M --data texts/ --machines here  # asks nothing
    """
    from smtrain.core.errors import ConfigError
    from smtrain.core.files import no_folder_fault, only_writer, write_atomically

    _refuse_existing(file, force)
    if fault := no_folder_fault(file.parent):
        raise ConfigError(fault, code="config.wrong_value")
    config, text, form = _ask_until_valid(
        {"--model": model, "--data": data, "--machines": machines}, file
    )
    is_known_shape = _has_known_shape(config.model.path)
    with only_writer(file, ConfigError):
        _refuse_existing(file, force)  # another process may have written it since
        write_atomically(file, text)
    _say_size(config, is_known_shape)
    if config.train.adapter is not None:
        machines = f"{config.compute.instance_count} x {config.compute.instance_type}"
        say(
            f"to train all weights of this model does not fit on {machines}; train.adapter, with"
            " LoRA, does"
        )
    if form.objective != "pretrain":
        say(f"train.objective: {form.objective}, as the first record of the data is for it")
    for cause in (*_foreseeable_failures(config, is_known_shape), *_unread_data(form)):
        say(f"! {cause}")
    say(f"wrote {file}; next:")
    for command in ("plan", "check", "run"):
        say(f"  smtrain {command} {file}")


def _refuse_existing(file: Path, force: bool) -> None:
    from smtrain.core.errors import ConfigError

    if file.is_dir():
        raise ConfigError(
            f"{file} is a folder; name a file, such as {file / 'smtrain.yaml'}",
            code="config.wrong_value",
        )
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"{file}: a config is YAML with comments; name it {file.with_suffix('.yaml')}",
            code="config.wrong_value",
        )
    if file.exists() and not force:
        raise ConfigError(
            f"{file} is there already; name another file, or --force replaces it",
            code="config.wrong_value",
        )


def _ask_until_valid(options: dict[str, str | None], file: Path) -> tuple[JobConfig, str, DataForm]:
    """The config of the options and of the answers to the questions for the missing ones, its YAML
    and the form of its data.

    In a terminal a wrong answer is asked for again, with itself as the default, and the right
    answers stay. Raises `ConfigError` for wrong options, and without a terminal.
    """
    from smtrain.core.errors import ConfigError

    open_options = [option for option, value in options.items() if value is None]
    if open_options and not sys.stdin.isatty():
        raise ConfigError(
            f"{open_options[0]}: is missing, and there is no terminal to ask on; give --model, --data and "
            "--machines",
            code="config.missing_key",
        )
    if open_options:
        say("Three questions; Enter takes what is in brackets.")
    for option in ("--model", "--data"):
        if options[option] == "":
            raise ConfigError(
                f"{option}: is an empty name; give one, such as {_QUESTIONS[option][1]}",
                code="config.wrong_value",
            )
    answers = {
        option: _QUESTIONS[option][1] if value is None else value
        for option, value in options.items()
    }
    questions = open_options
    while True:
        for option in questions:
            answers[option] = _answer(option, answers[option])
        try:
            return _config_of(answers, file)
        except ConfigError as error:
            questions = [
                option
                for option in open_options
                if any(fault.startswith(_KEYS[option]) for fault in error.faults)
            ]
            if not questions:
                raise
            for fault in error.faults:
                say(f"! {fault}")


def _config_of(answers: dict[str, str], file: Path) -> tuple[JobConfig, str, DataForm]:
    """The config of three answers, its YAML and the form of its data.

    Raises `ConfigError` if it cannot run.
    """
    from smtrain.client.config.sample import Machines, values

    machines = Machines.parse(answers["--machines"])
    model = _relative_path(file.parent, answers["--model"])
    model_path = _path_from_here(file.parent, model)
    data = _relative_path(file.parent, answers["--data"])
    form = _form_of(_path_from_here(file.parent, data))
    content = values(
        model_path, data, machines, mesh=_has_known_shape(model_path), objective=form.objective
    )
    content["model"]["path"] = model
    if form.format:
        content["data"]["format"] = form.format
    open_keys = machines.instance_type is not None
    config, text = _config_and_text(content, file, open_keys=open_keys)
    _refuse_unreadable_data(config)
    if (interval := _best_save_interval(config)) is not None:
        content["train"]["save_interval"] = interval
        config, text = _config_and_text(content, file, open_keys=open_keys)
    return config, text, form


def _form_of(path: str) -> DataForm:
    """The form of the data; the default if only later checks can say what is wrong with the path.

    Raises `ConfigError` for files that cannot be read.
    """
    from smtrain.core.errors import ConfigError, DataError
    from smtrain.tools.data_form import DataForm, form_of

    try:
        return form_of(path)
    except DataError as error:
        if error.code == "data.not_found":  # the config's own check says so, by its key
            return DataForm()
        raise ConfigError(
            f"data.path: {str(error).rstrip('.')}", code="config.wrong_value"
        ) from None
    except ConfigError:  # no such demo
        return DataForm()


def _refuse_unreadable_data(config: JobConfig) -> None:
    """Raise `ConfigError` for data on this machine that are not text or records."""
    from smtrain.client.config.checks.local_data import local_data_faults
    from smtrain.core.errors import ConfigError

    if faults := [text for _, text in local_data_faults(config, None)]:
        raise ConfigError(faults, code="config.wrong_value")


def _unread_data(form: DataForm) -> list[str]:
    return [f"data.path: {form.fault}"] if form.fault else []


def _best_save_interval(config: JobConfig) -> int | None:
    """The steps between checkpoints that lose least time by the plan; None if it has no such
    figure.
    """
    from smtrain.client.planner.plan import plan
    from smtrain.core.errors import ConfigError

    if TARGETS[config.target].here or not _has_known_shape(config.model.path):
        return None  # a plan of this machine knows nothing of interruptions
    try:
        best = plan(config).save_interval_steps
    except ConfigError:  # smtrain plan says why
        return None
    return best and min(best, config.train.steps)


def _config_and_text(
    content: dict[str, Any], file: Path, *, open_keys: bool
) -> tuple[JobConfig, str]:
    """The config of these keys and its YAML; with LoRA in `content` if only that fits the machines.

    Raises `ConfigError` for a config that cannot run, before anything is written.
    """
    from smtrain.client.config.sample import text_of
    from smtrain.client.planner.resolve_mesh import LORA_FITS
    from smtrain.client.planner.search import RANK
    from smtrain.core.errors import ConfigError

    left_open = _OPEN if open_keys else {}
    text = text_of(content, str(file), left_open=left_open)
    try:
        return _load_text(text, file.parent), text
    except ConfigError as error:
        if not open_keys or LORA_FITS not in str(error):
            raise
    content["train"]["adapter"] = {"rank": RANK}
    text = text_of(content, str(file), left_open=left_open)
    return _load_text(text, file.parent), text


def _load_text(text: str, folder: Path) -> JobConfig:
    """The config of a text, with paths relative to the working directory."""
    from smtrain.client.planner.resolve import load_config
    from smtrain.core.yaml_text import parse

    content = parse(text)
    for section in ("model", "data"):
        content[section]["path"] = _path_from_here(folder, content[section]["path"])
    return load_config(content)


def _say_size(config: JobConfig, is_known_shape: bool) -> None:
    """Say the size of the text, the steps that read it, and the time of a run of a known model
    here.
    """
    from smtrain.client.planner.this_machine import is_here, plan_here
    from smtrain.client.planner.workload import text_bytes
    from smtrain.core.config.units import spell, spell_bytes

    if size := text_bytes(config):
        tokens = size / _BYTES_PER_TOKEN
        steps = max(1, round(tokens / (config.train.global_batch_size * config.train.seq_len)))
        read = "steps read" if steps > 1 else "step reads"
        say(
            f"the text has {spell_bytes(size)}, about {tokens:,.0f} tokens at {_BYTES_PER_TOKEN}"
            f" bytes each; about {steps:,} {read} all of it once"
        )
        if (times := config.train.steps / steps) > _EPOCHS:
            say(
                f"! {config.train.steps} steps read it {times:,.0f} times, and after about"
                f" {_EPOCHS} a text teaches little new; add text, or set train.steps:"
                f" {_EPOCHS * steps}"
            )
    if is_known_shape and is_here(config):
        plan = plan_here(config)
        if plan.hours is not None:
            say(
                f"{config.train.steps} steps take about {spell(plan.hours * 3600)} on"
                f" {plan.machines}"
            )
        for fault in (*plan.faults, *(text for text in plan.warnings if text.startswith("busy: "))):
            say(f"! {fault}")


def _foreseeable_failures(config: JobConfig, is_known_shape: bool) -> Iterator[str]:
    """Known causes that would stop this config later, each with a remedy."""
    from smtrain.client.config.checks.weights import gated_faults
    from smtrain.core.demo.inputs import SMOLLM2
    from smtrain.core.errors import ConfigError
    from smtrain.core.extras import missing_module, present
    from smtrain.core.facts.images import end_of_life, training_image

    yield from (text for _, text in gated_faults(config))
    if TARGETS[config.target].here:
        modules = ("moto", "torch", *(("gguf",) if config.model.path == SMOLLM2 else ()))
        yield from (
            f"to run here, {missing_module(module)}" for module in modules if not present(module)
        )
    if TARGETS[config.target].rented:
        try:
            training_image(
                config.compute.region or _REGION, config.train.engine, config.compute.instance_type
            )
        except ConfigError as error:
            yield str(error)
        if end := end_of_life(config.train.engine):
            yield (
                f"{end}; nothing needs to be done today, and trn2 with engine native is what"
                " follows"
            )
    if not is_known_shape:
        yield (
            f"model.path: the shape of {config.model.path} is not known here, so memory, time and"
            " cost are not either; `smtrain plan CONFIG --model FOLDER` takes a folder with its"
            " config.json"
        )


def _has_known_shape(model: str) -> bool:
    """True if the planner knows the model's shape from its folder or name, and so can choose a
    mesh.
    """
    from smtrain.client.planner.workload import shape_of
    from smtrain.core.config import JobConfig
    from smtrain.core.errors import ConfigError

    try:
        shape_of(JobConfig.model_validate({"model": {"path": model}}))
    except ConfigError:
        return False
    return True


def _answer(option: str, default: str) -> str:
    """The answer to an option's question; Enter takes the default."""
    answer: str = typer.prompt(_QUESTIONS[option][0], default=default)
    return answer.strip()


def _relative_path(folder: Path, path: str) -> str:
    """A path of this machine, relative to `folder`."""
    if "://" in path or Path(path).expanduser().is_absolute():
        return path
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _path_from_here(folder: Path, path: str) -> str:
    """A path in a file of `folder`, relative to the working directory."""
    return path if "://" in path else str(folder / Path(path).expanduser())
