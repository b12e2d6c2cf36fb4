"""`smtrain chat MODEL`: talk to a model on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.errors import ConfigError
from smtrain.core.model.chat_options import read_options
from smtrain.core.text import say

app = options.app()
FLAGS = {
    key: f"--{key}".replace("_", "-")
    for key in (
        "max_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "stop",
        "seed",
        "turns",
        "beams",
        "length_penalty",
        "processes",
        "config",
    )
}
_MODEL = typer.Argument(
    metavar="MODEL",
    show_default=False,
    help=(
        "Hugging Face folder or adapter, run, job or s3:// prefix, or checkpoints (folder or"
        " s3://)."
    ),
)
Model = Annotated[str, _MODEL]
Adapter = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="PEFT adapter to put on the model, without merging."),
]
Template = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Chat template (jinja) in place of the model's own."),
]
TemplateOptions = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Options of the chat template: '{\"enable_thinking\": false}'.",
    ),
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End an answer at this text; repeatable.")
]
Processes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help=(
            "Divide the model over N processes; default: 1, of a checkpoint as many GPUs as"
            " hold it."
        ),
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Model with config.json and tokenizer, if a checkpoint has none."
    ),
]
ModelTarget = Annotated[
    options.TargetOption | None,
    typer.Option("--target", help="Target of MODEL; default: here if it is known here, else AWS."),
]


@app.command(
    groups={
        "The model": "--endpoint --compare --adapter --processes --config --target",
        "The conversation": "--system --template --chat-template-kwargs --turns",
        "The answer": "--max-new-tokens --temperature --top-k --top-p --stop --seed",
    },
)
def chat(
    model: Annotated[str | None, _MODEL] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="NAME", help="A SageMaker endpoint, in place of MODEL.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="A second model, which answers the same questions."),
    ] = None,
    adapter: Adapter = None,
    system: System = None,
    template: Template = None,
    chat_template_kwargs: TemplateOptions = None,
    turns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Earlier questions to remember; default: as many as there is room for.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", help="Longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(help="Randomness: 0 takes the likeliest token each time.")
    ] = 0.7,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many of the likeliest tokens (top-k); 0: all. Default: 50."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help=(
                "Sample from the likeliest tokens with this total probability (top-p). Default:"
                " 0.95."
            )
        ),
    ] = None,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same answers.")] = 0,
    target: ModelTarget = None,
    processes: Processes = None,
    config: Config = None,
) -> None:
    """Talk to a model, which is loaded here, or to an endpoint. /help lists the commands.

    $ smtrain chat my-run  # the model that a run exported
    $ smtrain chat my-run --compare demo://smollm2  # both answer each question
    """
    from smtrain.tools.chat.chat import chat as begin
    from smtrain.tools.chat.terminal import Terminal

    register_flags(
        FLAGS | {key: f"--{key}" for key in ("endpoint", "compare", "adapter", "template")}
    )
    if model is None and endpoint is None:
        raise ConfigError(
            "missing argument MODEL; name a folder, run, job or s3:// prefix, or give --endpoint"
            " NAME",
            code="config.missing_key",
        )
    narrowing: dict[str, Any] = {
        name: value for name, value in (("top_k", top_k), ("top_p", top_p)) if value is not None
    }
    talk = begin(
        model,
        compare=compare,
        adapter=adapter,
        system=system,
        template=template,
        chat_template_kwargs=read_options("--chat-template-kwargs", chat_template_kwargs),
        turns=turns,
        endpoint=endpoint,
        target=options.name_of(target),
        say=lambda text: say(text, error=True),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        stop=tuple(stop or ()),
        seed=seed,
        processes=processes,
        config=config,
        **narrowing,
    )
    try:
        Terminal(talk).run()
    finally:
        talk.close()
