"""`smtrain undeploy NAME`: delete an endpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


@app.command()
def undeploy(
    name: Annotated[
        str, typer.Argument(metavar="ENDPOINT", show_default=False, help="Name of the endpoint.")
    ],
    target: options.TargetOverride = None,
) -> None:
    """Delete an endpoint with its configuration, model entries and schedule; the model's files
    stay.

    $ smtrain undeploy my-run  # endpoint, configuration and schedule
    """
    from smtrain.tools.serve.deploy import undeploy as undeployed

    undeployed(name, target=options.name_of(target), say=say)
