"""`smtrain data report`: a page about text, before it is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from smtrain.cli import options
from smtrain.cli.data_options import FLAGS, CleaningOptions, config_of, require_name
from smtrain.cli.dispatch import register_flags
from smtrain.core.errors import ConfigError, DataError
from smtrain.core.files import no_folder_fault, only_writer, write_atomically
from smtrain.core.text import say


def report(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, folders, globs, s3://, hf:// or demo://."),
    ],
    cleaning: CleaningOptions,
    out: Annotated[str, typer.Option(help="The page to write.")] = "report.html",
    model: Annotated[
        str | None, typer.Option("--model", help="Tokenizer folder, to count tokens.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Text that a model will be tested on, to find in INPUT; repeatable."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="Same as for `smtrain data prepare`.")
    ] = "auto",
    text_column: Annotated[str, typer.Option(help="Same as for `smtrain data prepare`.")] = "text",
    limit_mb: Annotated[
        float | None,
        typer.Option("--limit-mb", min=0.001, help="Read at most this many megabytes."),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Write an HTML page about text: lengths, duplicates, scripts, repeated lines, what filters
    would remove.

    $ smtrain data report texts/ --out report.html  # a page on the text
    $ smtrain data report texts/ --against questions.jsonl --filter gopher_quality  # overlap, and what would go
    """
    register_flags(FLAGS)
    config = config_of(model or "", {**vars(cleaning), "format": form, "text_column": text_column})
    for name in [*inputs, *(against or [])]:
        require_name("INPUT or --against", name)
    require_name("--out", out)
    inputs = [options.resolve_folder(name) for name in inputs]
    against = [options.resolve_folder(name) for name in against or []]
    model = options.model_folder(model) if model else model
    from smtrain.worker.data import report as reports
    from smtrain.worker.data.clean.cleaning import Cleaning
    from smtrain.worker.data.manifest import refuse_others
    from smtrain.worker.data.read.ignored_fields import ignored_text_sentence
    from smtrain.worker.data.report import page

    is_folder = Path(out).is_dir()
    fault = "is a folder; name a file in it" if is_folder else no_folder_fault(Path(out).parent)
    if fault:
        raise ConfigError(f"--out {out}: {fault}", code="config.wrong_value")
    with only_writer(Path(out), DataError):
        if not overwrite:
            refuse_others(Path(out))
        data_report = reports.report(
            inputs,
            Path(model) if model else None,
            against,
            text_column=text_column,
            format=cast(Any, form),
            most_bytes=round(limit_mb * 1e6) if limit_mb else None,
            cleaning=Cleaning.of(config.data),
        )
        write_atomically(Path(out), page(data_report))
    documents, duplicates = (
        sum(getattr(s, name) for s in data_report.sources) for name in ("documents", "duplicates")
    )
    say(f"{out}: {documents:,} documents, {duplicates:,} of them exact duplicates")
    for note, count in [*data_report.dropped.items(), *data_report.noted.items()]:
        say(f"{count:,} {note}")
    for source in data_report.sources:
        if source.unread:
            say(f"{source.name}: {ignored_text_sentence(source.unread)}")
    if data_report.untested:
        say(f"--against: {ignored_text_sentence(data_report.untested)}")
    if data_report.tested:
        say(
            f"{data_report.tested[1]:,} of {data_report.tested[0]:,} tested texts overlap with them"
        )
