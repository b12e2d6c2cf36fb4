"""`smtrain checkpoint inspect|diff|verify`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from smtrain.cli import options
from smtrain.core.errors import ConfigError
from smtrain.core.text import say

app = options.app("""Look into checkpoints of any kind, here or on S3.

    $ smtrain checkpoint inspect checkpoints/step_1000  # kind, mesh, step and size
    """)
Path = Annotated[
    str, typer.Argument(metavar="PATH", help="Folder or s3:// URI.", show_default=False)
]
Config = Annotated[
    str | None,
    typer.Option(help="The model's folder or config.json, if the checkpoint has no config."),
]


@app.command()
def inspect(path: Path, config: Config = None) -> None:
    """Describe a checkpoint: kind, topology, family, step, size.

    $ smtrain checkpoint inspect s3://bucket/run/checkpoints  # also afar
    """
    _require_names(path)
    from smtrain.worker.checkpoint import summary

    description = summary.inspect(options.resolve_folder(path), _read(config))
    say(json.dumps(description.to_dict(), indent=2), raw=True)


@app.command()
def diff(a: Path, b: Path, config: Config = None) -> None:
    """Compare two checkpoints of any kind tensor by tensor; status 1 if they differ.

    $ smtrain checkpoint diff model-a model-b  # tensor by tensor
    """
    _require_names(a, b)
    count, largest = 0, 0.0
    from smtrain.worker.checkpoint import summary

    for difference in summary.diff(
        options.resolve_folder(a), options.resolve_folder(b), _read(config)
    ):
        amount = "" if difference.max_abs is None else f", by at most {difference.max_abs:.6g}"
        say(f"{'first: ' if not count else ''}{difference.name}: {difference.reason}{amount}")
        count, largest = count + 1, max(largest, difference.max_abs or 0.0)
    say(f"{count} tensors differ, by at most {largest:.6g}" if count else "the same, bit for bit")
    if count:
        raise typer.Exit(1)


@app.command()
def verify(path: Path, config: Config = None) -> None:
    """Read every byte and compare the hashes.

    $ smtrain checkpoint verify checkpoints/step_1000  # reads every byte
    """
    _require_names(path)
    from smtrain.worker.checkpoint import summary

    say(f"{summary.verify(options.resolve_folder(path), _read(config))} hashes match")


def _require_names(*paths: str) -> None:
    if not all(path.strip() for path in paths):
        raise ConfigError(
            "PATH is an empty name; name a folder or an s3:// URI", code="config.wrong_value"
        )


def _read(config: str | None) -> dict[str, Any] | None:
    from smtrain.worker.checkpoint.huggingface.folder import read_config

    return None if config is None else read_config(options.resolve_folder(config))
