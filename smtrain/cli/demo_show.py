"""What the demo ends with: a table of the stages, the loss curve, and what the model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from smtrain.client.follow.curve import save_curve, sparkline
from smtrain.client.launch.run import Run
from smtrain.core.config.units import spell
from smtrain.core.errors import JobError
from smtrain.core.text import clean
from smtrain.stages.base import run_uri


def show(
    run: Run, folder: Path, console: Console, *, overwrite: bool = False, texts: Callable[[], None] | None = None
) -> None:
    """Print the run's table, sparkline and texts, and leave model and picture in `folder`.

    `texts` prints them in place of this. Raises `JobError`, after everything else is told, where it would replace other
    files there, unless `overwrite`.
    """
    model, refused = folder / "model", None
    try:
        run.download(model, overwrite=overwrite)
    except JobError as error:
        refused = error
    metrics = run.records
    base = run_uri(run.config)
    table = Table(title=Text(f"run {run.config.name} in {base}"), title_justify="left")
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("output", overflow="fold")
    for result in run.results:
        took = "done before" if result.skipped else spell(result.seconds)
        table.add_row(result.stage, took, Text(result.output.removeprefix(base)))
    table.add_row("total", spell(sum(result.seconds for result in run.results)), "", style="bold")
    console.print(table)
    steps = [record for record in metrics if "loss" in record]
    losses = [record["loss"] for record in steps]
    if losses:
        console.print(f"loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f} over {len(losses)} steps")
        last = steps[-1]
        console.print(f"last step: {last['tokens_per_s']:.0f} tokens/s, grad norm {last['grad_norm']:.3f}")
    if told := held_out(metrics):
        console.print(told)
    if texts is not None:
        texts()
    else:
        for text in run.texts:
            console.print(clean(f"> {text['prompt']}"), style="bold", end="", markup=False, highlight=False)
            console.print(clean(text["completion"]), markup=False, highlight=False)
    if refused:
        raise refused
    try:
        curve = str(save_curve(metrics, folder / "loss.png", f"{run.config.name}: loss by step"))
    except JobError as error:  # without matplotlib
        curve = f"not drawn: {error}"
    said = f"loss curve: {curve}\nmodel:      {model}  (AutoModelForCausalLM.from_pretrained reads it)"
    console.print(said, markup=False)


def held_out(records: Sequence[dict[str, float]]) -> str:
    """The losses on held-out text as a line with a curve; empty where there were no validations."""
    judged = [record for record in records if "val_loss" in record]
    if not judged:
        return ""
    first, last = judged[0], judged[-1]
    return (
        f"loss {first['val_loss']:.3f} {sparkline([record['val_loss'] for record in judged])} {last['val_loss']:.3f} "
        f"on what is held out: perplexity {first['val_ppl']:.1f} before, {last['val_ppl']:.1f} after"
    )
