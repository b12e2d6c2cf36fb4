"""`smtrain config schema|show|set`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from smtrain.cli import options
from smtrain.core.text import say

app = options.app("""Configs, for people and for editors.

    $ smtrain config show run.yaml  # with all defaults
    """)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors.

    $ smtrain config schema > smtrain.schema.json  # for an editor
    """
    from smtrain.core.config.schema import schema_text

    say(schema_text(), end="")


@app.command()
def show(config: options.Config, set_: options.Set = None) -> None:
    """Check a config and print it whole, defaults included, as YAML.

    $ smtrain config show run.yaml --set train.lr=2e-4  # as --set leaves it
    """
    from smtrain.client.planner.resolve import load_config

    say(
        yaml.safe_dump(
            load_config(config, set_=set_ or ()).model_dump(mode="json"), sort_keys=False
        ),
        end="",
    )


@app.command("set")
def set_keys(
    config: options.Config,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="Keys to write, e.g. train.lr=2e-4.")
    ],
) -> None:
    """Write keys into a config's file; comments and the order of the rest stay.

    Nothing is written if a key is unknown or its value is not valid.

    $ smtrain config set run.yaml train.lr=2e-4  # comments stay
    """
    from smtrain.client.config.load import draft, parse_assignment
    from smtrain.client.config.write import with_value
    from smtrain.client.config.yaml_file import read_settings
    from smtrain.client.planner.resolve import load_config
    from smtrain.core.errors import ConfigError
    from smtrain.core.files import only_writer, write_atomically

    path = Path(config)
    pairs = [parse_assignment(text) for text in keys]
    read_settings(path, "config", "name the YAML file of the config")
    draft(path)  # leave a file without a config unchanged
    names = {".".join(parts) for parts, _ in pairs}
    try:
        load_config(path, set_=keys)
    except ConfigError as error:  # faults of other keys are not this command's
        if faults := [
            fault for fault in error.faults if names & set(fault.partition(": ")[0].split(", "))
        ]:
            raise ConfigError(faults) from None
    with only_writer(path.resolve(), ConfigError):
        content = read_settings(path, "config", "name the YAML file of the config")
        for parts, value in pairs:
            content = with_value(content, parts, value)
        write_atomically(path.resolve(), content, mode=path.stat().st_mode & 0o777)
    say(f"wrote {', '.join(sorted(names))} into {path}")
