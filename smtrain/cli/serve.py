"""`smtrain serve MODEL`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.cli.chat import Model, TemplateOptions
from smtrain.core.model.chat_options import read_options
from smtrain.core.text import say

app = options.app()


class ServerOption(str, Enum):
    """Servers of models."""

    vllm = "vllm"
    transformers = "transformers"


@app.command()
def serve(
    model: Model,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of this machine.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; it asks for no password.")
    ] = "127.0.0.1",
    server: Annotated[
        ServerOption | None,
        typer.Option(help="Default: vllm if it is installed, else transformers' own server."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION=VALUE",
            help="An option of the server, such as max-model-len=4096; repeatable.",
        ),
    ] = None,
    chat_template_kwargs: TemplateOptions = None,
    target: options.KnownJobTarget = None,
) -> None:
    """Serve a model by OpenAI's API until Ctrl-C: a folder, a run or a job that exported one.

    $ smtrain serve my-run --port 8000  # OpenAI's API on this machine
    $ smtrain serve my-run --server vllm --option max-model-len=4096  # with an option of vLLM
    """
    from smtrain.core.errors import ConfigError
    from smtrain.tools.serve.local_server import serve as served

    server_options: list[str] = []
    for text in option or ():
        key, _, value = text.partition("=")
        if not key.strip("-"):
            raise ConfigError(
                f"--option {text}: must look like max-model-len=4096", code="config.wrong_value"
            )
        server_options += [f"--{key.lstrip('-')}", *([value] if value else [])]
    status = served(
        model,
        port=port,
        host=host,
        server=server.value if server else None,
        more=tuple(server_options),
        template_options=read_options("--chat-template-kwargs", chat_template_kwargs),
        target=options.name_of(target),
        say=say,
    )
    raise typer.Exit(status)
