"""`smtrain doctor`: whether this machine can train, and how well."""

from __future__ import annotations

import json
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.errors import ConfigError
from smtrain.core.files import read_value
from smtrain.core.text import say

app = options.app()
MAX_MINUTES = 24 * 60.0


@app.command()
def doctor(
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="Also train small models on all devices, and compare with the CPU."
        ),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="N", help="Minutes that --train may take.", show_default="10"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Train this model with random weights; default: one of the devices' size.",
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write an HTML page.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON; - prints it.")
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Report what this machine has and what keeps it from training, each with the remedy; exit
    status 2 for a fault.

    The report has no names, folders or secrets of yours, so you can send it to anyone.

    $ smtrain doctor --json doctor.json  # what this machine has, to send with a question
    $ smtrain doctor --train --page doctor.html  # ten minutes of training on all its devices
    """
    from smtrain.tools.doctor.diagnosis import diagnose, refuse, write
    from smtrain.tools.doctor.training import MINUTES

    for option_value, option in ((minutes, "--minutes"), (model, "--model")):
        if option_value is not None and not train:
            raise ConfigError(
                f"{option} goes with --train; add it, or leave {option} out",
                code="config.combination",
            )
    if minutes is not None and not (isfinite(minutes) and 0 < minutes <= MAX_MINUTES):
        raise ConfigError(
            f"--minutes: got {minutes:g}; a number above 0, at most {MAX_MINUTES:.0f}, is needed",
            code="config.wrong_value",
        )
    to_stdout = as_json is not None and str(as_json) == "-"
    file = None if to_stdout else as_json
    refuse(file, "--json", overwrite)
    refuse(page, "--page", overwrite)
    if page is not None and file is not None and page.absolute() == file.absolute():
        raise ConfigError(
            f"--page and --json are the same file, {page}; name two", code="config.combination"
        )
    model_config = None if model is None else _read_model_config(model)
    diagnosis = diagnose(
        (minutes or MINUTES) if train else None, model_config, partial(say, error=True)
    )
    say(json.dumps(diagnosis.to_dict(), indent=1) if to_stdout else diagnosis, raw=to_stdout)
    write(diagnosis, page, file)
    if not diagnosis.report.ok:
        raise typer.Exit(2)


def _read_model_config(model: str) -> dict[str, object]:
    """The config.json of a model's folder.

    Raises `ConfigError` if it is none that the native engine trains.
    """
    from smtrain.core.errors import first_line
    from smtrain.core.model.shape import ModelShape
    from smtrain.core.model.text_part import text_part

    if not model.strip():
        raise ConfigError(
            "--model is an empty name; name a folder with a config.json, or leave it out",
            code="config.wrong_value",
        )
    file = Path(options.model_folder(model)) / "config.json"
    try:
        model_config = read_value(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model: {file} cannot be read ({first_line(error)}); name a model's folder",
            code="config.unreadable",
        ) from None
    if not isinstance(model_config, dict):
        raise ConfigError(
            f"--model: {file} is not the config of a model; name a model's folder",
            code="config.wrong_value",
        )
    ModelShape.from_config(model_config)
    return text_part(model_config)
