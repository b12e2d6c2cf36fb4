"""`smtrain compare A B [C...]`: compare the curves of trainings."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say

app = options.app()


class ByOption(str, Enum):
    """The x axis of a comparison."""

    step = "step"
    tokens = "tokens"
    time = "time"


@app.command()
def compare(
    trainings: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            show_default=False,
            help=(
                "Runs, jobs, metrics.jsonl, TensorBoard folders, CSV files or logs; NAME=PATH names"
                " one."
            ),
        ),
    ],
    by: Annotated[ByOption, typer.Option(help="What the curves are compared by.")] = ByOption.step,
    window: Annotated[
        int, typer.Option(metavar="N", help="Points in a window of the smoothed curves.")
    ] = 20,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Exit status 1 if a smoothed loss differs by more."),
    ] = None,
    tokens_per_step: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Global batch size times sequence length, for logs that do not say."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write compare.png, .html and .json there.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One line of JSON in place of the table.")
    ] = False,
    target: options.KnownJobTarget = None,
) -> None:
    """Compare trainings with the first: losses, gradient norms, point of divergence, tokens per
    second and dollar.

    $ smtrain compare my-run other-run  # the verdict, and a table
    $ smtrain compare ours=my-run theirs=nemo/train.log --tokens-per-step 2097152 --out compare
        # with another tool's log, as a page and a picture
    """
    import json as encoder
    from array import array

    from smtrain.client.follow.curve import sparkline
    from smtrain.tools.compare.compare import compare as compared

    comparison = compared(
        *trainings,
        by=by.value,
        window=window,
        tolerance=tolerance,
        tokens_per_step=tokens_per_step,
        target=options.name_of(target),
    )
    summary = comparison.to_dict()
    if json:
        say(encoder.dumps(summary), raw=True)
    else:
        for training, row in zip(
            comparison.series, (summary["baseline"], *summary["compared"]), strict=True
        ):
            losses = array("d", (record["loss"] for record in training.records))
            rate = f"{row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
            price_text = (
                f"{row['tokens_per_dollar']:,.0f} tokens/$" if row["tokens_per_dollar"] else ""
            )
            numbers = "  ".join(
                filter(
                    None, (f"loss {losses[-1]:.4f} at step {row['last_step']}", rate, price_text)
                )
            )
            say(f"{training.name}: {numbers}  {sparkline(losses, 40)}")
        say(comparison.verdict)
    options.folder_of("--out", out)
    if out is not None:
        from smtrain.tools.compare.picture import save

        for path in save(comparison, Path(out)):
            say(path, error=json)
    if tolerance is not None and not comparison.within:
        raise typer.Exit(1)
