"""`smtrain config schema|show`."""

from __future__ import annotations

import yaml

from smtrain.cli import options
from smtrain.core.text import say

app = options.app("Configs, for people and for editors.")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a config, for editors."""
    from smtrain.core.config.schema import schema_text

    say(schema_text(), end="")


@app.command()
def show(config: options.Config, set_: options.Set = None) -> None:
    """Check a config and print it whole, defaults included, as YAML."""
    from smtrain.client.planner.resolve import load_config

    say(yaml.safe_dump(load_config(config, set_=set_ or ()).model_dump(mode="json"), sort_keys=False), end="")
