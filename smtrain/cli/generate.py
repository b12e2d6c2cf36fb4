"""`smtrain generate MODEL [FILE...]`: texts for prompts."""

from __future__ import annotations

from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.cli.chat import (
    FLAGS,
    Adapter,
    Config,
    Model,
    ModelTarget,
    Processes,
    Stop,
    System,
    Template,
    TemplateOptions,
)
from smtrain.cli.dispatch import register_flags
from smtrain.core.model.chat_options import read_options
from smtrain.core.text import json_text, say

app = options.app()


@app.command(
    groups={
        "The model": "--adapter --processes --config --target",
        "The prompt": "--prompt --chat --system --template --chat-template-kwargs",
        "The answer": (
            "--max-new-tokens --temperature --top-k --top-p --stop --seed --beams --length-penalty"
        ),
        "Output": "--out --overwrite --batch --stream --json",
    },
)
def generate(
    model: Model,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...", show_default=False, help="Prompts: .txt, a line each, or .jsonl."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A prompt; repeatable.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write JSON lines there; resumes if interrupted."),
    ] = None,
    overwrite: options.Overwrite = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template.")] = False,
    system: System = None,
    adapter: Adapter = None,
    template: Template = None,
    chat_template_kwargs: TemplateOptions = None,
    batch: Annotated[
        int, typer.Option(metavar="N", help="Prompts that the model takes at a time.")
    ] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Show each text as it comes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")] = False,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Longest text, in tokens.")] = 64,
    temperature: Annotated[
        float, typer.Option(help="Randomness: 0 takes the likeliest token each time.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="Sample from this many of the likeliest tokens (top-k); 0: all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the likeliest tokens with this total probability (top-p)."),
    ] = 1.0,
    beams: Annotated[int, typer.Option(metavar="N", help="Number of beams of a beam search.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="With beams: above 0 prefers longer texts.")
    ] = 1.0,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same texts.")] = 0,
    target: ModelTarget = None,
    processes: Processes = None,
    config: Config = None,
) -> None:
    """Let a model continue prompts, or answer them in its chat template; greedy unless a
    temperature is given.

    $ smtrain generate my-run --prompt 'Once upon a time'  # one prompt, on the screen
    $ smtrain generate my-run prompts.txt --out texts.jsonl --temperature 0.7  # a prompt a line, into a file
    """

    from smtrain.core.errors import ConfigError
    from smtrain.tools.chat.generate import PromptFormat, one_by_one, read_prompts
    from smtrain.tools.chat.generate import generate as generated
    from smtrain.worker.generation.sampling import Sampling

    register_flags({**FLAGS, "batch": "--batch"})
    sampling = Sampling(
        max_new_tokens, temperature, top_k, top_p, beams, length_penalty, tuple(stop or ()), seed
    )
    if stream and (batch != 1 or beams != 1 or out is not None or json):
        raise ConfigError(
            "--stream: shows one text at a time; leave out --batch, --beams, --out and --json",
            code="config.combination",
        )
    if system is not None and not chat:
        raise ConfigError("--system: is read only with --chat; add that", code="config.combination")

    def tell(text: str) -> None:
        say(text, error=True)

    values = read_options("--chat-template-kwargs", chat_template_kwargs)
    queue = read_prompts(files or (), prompt or ())
    if stream:
        previous_number = -1
        for number, piece in one_by_one(
            model,
            queue,
            PromptFormat(chat, system, template, values),
            adapter=adapter,
            sampling=sampling,
            target=options.name_of(target),
            processes=processes,
            config=config,
            say=tell,
        ):
            if number != previous_number:
                say(
                    ("" if previous_number < 0 else "\n") + f"> {queue[number].display_text(chat)}",
                    end="",
                )
                previous_number = number
            say(piece, end="")
            typer.get_text_stream("stdout").flush()
        say("")
        return
    records = generated(
        model,
        prompt or (),
        files=files or (),
        out=out,
        overwrite=overwrite,
        batch=batch,
        chat=chat,
        system=system,
        adapter=adapter,
        template=template,
        chat_template_kwargs=values,
        sampling=sampling,
        target=options.name_of(target),
        processes=processes,
        config=config,
        say=tell,
    )
    if out is not None:
        say(out)
        return
    for asking, record in zip(queue, records, strict=True):
        if json:
            say(json_text(record), raw=True)
        else:
            say(f"> {asking.display_text(chat)}{record['completion']}", raw=True)
