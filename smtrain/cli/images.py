"""`smtrain images`: known training images, and the one that a region's jobs get."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.facts import table
from smtrain.core.facts.images import (
    gpu_image_uri,
    gpu_rows,
    image_rows,
    image_uri,
    known_image,
    looked_for,
    patch_fault,
)
from smtrain.core.text import say

app = options.app()


class EngineOption(str, Enum):
    """The engine of an image."""

    native = "native"
    nxd = "nxd"


@app.command()
def images(
    region: Annotated[str, typer.Option(help="Region of the registry.")] = "us-west-2",
    engine: Annotated[
        EngineOption, typer.Option(help="Engine to choose the image for.")
    ] = EngineOption.nxd,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the images, newest first. A whole URI in compute.image always wins.

    $ smtrain images --region eu-north-1  # the images of a region's registry
    $ smtrain images --engine native --json  # for a program
    """
    rows, facts = image_rows(), table("images")
    uri = image_uri(region, engine.value) if known_image(engine.value) else None
    if as_json:
        needs = {name: row["needs"] for name, row in facts["engines"].items()}
        summary = {"date": facts["date"], "uri": uri, "needs": needs, "images": rows}
        say(
            json.dumps(
                {**summary, "gpu_uri": gpu_image_uri(region), "gpu_images": gpu_rows()}, indent=2
            ),
            raw=True,
        )
        return
    say(f"{'TAG':46} {'NEURON SDK':10} {'NXD':11} ENGINES")
    for row in rows:
        say(
            f"{row['tag']:46} {row['sdk']:10} {row.get('nxd', '-'):11}"
            f" {' '.join(row['engines']) or '-'}"
        )
        if row["note"]:
            say(f"    {row['note']}")
    say()
    for name, row in facts["engines"].items():
        say(f"{name} needs {row['needs']}")
    say(f"\n{'IMAGE FOR GPUS':94} {'CUDA':5} PATCHED UNTIL")
    for row in gpu_rows():
        name = f"{row['repository']}:{row['tag']}"
        say(
            f"{name:94} {row['cuda']:5}"
            f" {row['patched_until']}{' (ended)' if patch_fault(name) else ''}"
        )
        say(f"    {row['note']}")
    default = uri or f"no image is known; {looked_for(engine.value)}"
    say(f"\n{region}, engine {engine.value} on Neuron cores: {default}")
    say(f"{region}, engine native on GPUs: {gpu_image_uri(region)}")
    say(f"(known {facts['date']}; a whole URI in compute.image always wins)")
