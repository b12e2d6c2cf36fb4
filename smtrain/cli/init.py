"""`smtrain init`: a first config, from three questions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.text import say

app = options.app()
_QUESTIONS = {
    "--model": ("The model: a Hugging Face folder, s3://..., hf://organization/model or demo://tiny-llama",
                "demo://tiny-llama"),
    "--data": ("The text: a file or folder (jsonl, parquet, plain text), s3://..., hf://NAME or demo://python-stdlib",
               "demo://python-stdlib"),
    "--machines": ("Where: `here`, or an instance type and how many, such as ml.trn1.32xlarge:2", "here"),
}  # fmt: skip
_BYTES_PER_TOKEN = 4  # of English text, with a vocabulary of 32,000 to 150,000
_ROLE_AND_REGION = {
    "compute.role": "arn:aws:iam::111122223333:role/smtrain-training", "compute.region": "us-west-2",
}  # fmt: skip


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config to write.")] = Path("smtrain.yaml"),
    model: Annotated[Optional[str], typer.Option(help="Model to train: folder or URI.", show_default=False)] = None,  # noqa: UP045
    data: Annotated[Optional[str], typer.Option(help="Text to train on: path or URI.", show_default=False)] = None,  # noqa: UP045
    machines: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="WHERE", help="`here`, or TYPE[:COUNT] on AWS.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of that name.")] = False,
) -> None:
    """Write a commented config; asks for what no option says: the model, the text, and where to train."""
    from smtrain.config.sample import Machines, text_of, values
    from smtrain.errors import ConfigError
    from smtrain.planner.resolve import load_config
    from smtrain.planner.workload import text_bytes
    from smtrain.yaml_text import parse

    if file.exists() and not force:
        raise ConfigError([f"{file} is there already; name another file, or --force replaces it"])
    if file.parent != Path() and not file.parent.is_dir():
        raise ConfigError([f"{file.parent}: no such folder; make it first"])
    if sys.stdin.isatty():
        say("Three questions; Enter takes what is in brackets.")
    model, data = _asked("--model", model), _asked("--data", data)
    where = Machines.parse(_asked("--machines", machines))
    model, data = _from(file.parent, model), _from(file.parent, data)
    seen = _seen_from_here(file.parent, model)
    content = values(seen, data, where, mesh=_shape_known(seen))
    content["model"]["path"] = model
    left_open = {} if where.instance_type is None else _ROLE_AND_REGION
    text = text_of(content, left_open=left_open)
    loaded = parse(text)
    for section in ("model", "data"):
        loaded[section]["path"] = _seen_from_here(file.parent, loaded[section]["path"])
    config = load_config(loaded)  # what cannot run is said now, and nothing is written
    file.write_text(text, encoding="utf-8")
    if size := text_bytes(config):
        steps = max(1, round(size / _BYTES_PER_TOKEN / (config.train.global_batch_size * config.train.seq_len)))
        read = "steps read" if steps > 1 else "step reads"
        say(f"about {steps:,} {read} all of the text once, at {_BYTES_PER_TOKEN} bytes a token")
    say(f"wrote {file}; next:")
    for command in ("plan", "check", "run") if where.instance_type else ("run",):
        say(f"  smtrain {command} {file}")


def _shape_known(model: str) -> bool:
    """Whether the planner knows the model's shape, and so can choose a mesh."""
    from smtrain.config import JobConfig
    from smtrain.errors import ConfigError
    from smtrain.planner.workload import shape_of

    try:
        shape_of(JobConfig.model_validate({"model": {"path": model}}))
    except ConfigError:
        return False
    return True


def _asked(option: str, given: str | None) -> str:
    """The option, else the answer to its question; raises `ConfigError` where nobody can be asked."""
    from smtrain.errors import ConfigError

    if given is not None:
        return given
    question, default = _QUESTIONS[option]
    if not sys.stdin.isatty():
        raise ConfigError([f"{option}: is missing, and there is no terminal to ask on; give --model, --data and "
                           "--machines"])  # fmt: skip
    answer: str = typer.prompt(question, default=default)
    return answer.strip()


def _from(folder: Path, path: str) -> str:
    """A path of this machine as it is written in a file of `folder`."""
    if "://" in path or Path(path).expanduser().is_absolute():
        return path
    relative = os.path.relpath(path, folder)
    return relative if relative.startswith(".") else f"./{relative}"


def _seen_from_here(folder: Path, path: str) -> str:
    """The same path seen from where the command runs."""
    return path if "://" in path else str(folder / Path(path).expanduser())
