"""A job as a notebook shows it: a block that takes the width of its cell, on light and dark pages alike.

Styles stand in the elements, since a stored notebook keeps nothing else. Text takes the page's colour; only the badge
of the status has colours of its own, white on dark, which can be read on either. Whatever a job or AWS wrote goes
through `_text`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from smtrain.client.follow.curve import picture
from smtrain.client.follow.progress import Progress
from smtrain.core.config.units import spell
from smtrain.core.text import clean

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

_COLOURS = {"Completed": "#2e7d32", "Failed": "#c62828", "Stopped": "#8a5a00", "Stopping": "#8a5a00"}
_RUNNING = "#1565c0"
NO_MATH = "tex2jax_ignore mathjax_ignore"
"""Classes in which Jupyter does not take what stands between two dollar signs for a formula."""
_BLOCK = (
    "box-sizing:border-box;max-width:100%;border:1px solid rgba(128,128,128,.4);border-radius:6px;"
    "padding:.6em .9em;line-height:1.5;overflow-wrap:anywhere;text-wrap:pretty"
)
_ROW = "display:flex;flex-wrap:wrap;gap:0 1.4em;align-items:baseline"
_DIM = "opacity:.75;font-size:90%"
_BADGE = "color:#fff;border-radius:4px;padding:0 .5em;font-weight:600"
_LINES = (
    "margin:.5em 0 0;padding:.4em 0 0;border:0;border-top:1px solid rgba(128,128,128,.4);background:none;color:inherit;"
    "font-family:monospace;font-size:85%;line-height:1.35;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
)
# A line of the log stays one line, as on a terminal: broken, it would leave single words below it.
_LOG = f"{_LINES.replace('pre-wrap', 'pre')};overflow-x:auto;scrollbar-width:thin"
_COMMAND = "display:inline-block;max-width:100%;font-family:monospace;background:none;color:inherit;padding:0"
_CURVE = (720, 110)  # pixels
_LONGEST = 300
"""Characters of a log line."""


def block(progress: Progress, lines: Iterable[str] = (), hint: str = "", failure: str = "") -> str:
    """Where a job stands as HTML: status, times, step, numbers, curve and cost; then `lines` of its log.

    `hint` is the sentence at the end of it, `failure` why the job failed.
    """
    now = datetime.datetime.now(datetime.timezone.utc)
    status = progress.told.get("TrainingJobStatus", "")
    cost = progress.cost(now)
    head = [
        f"<b>{_text(progress.name)}</b> on {_text(progress.target)}",
        f'<span style="{_BADGE};background:{_COLOURS.get(status, _RUNNING)}">{_text(progress.status)}</span>',
        f"<span>{spell(progress.elapsed_s(now))}</span>",
        f'<span style="{_DIM}">{_text(cost.machines)}</span>' if cost else "",
    ]
    stages = " &rsaquo; ".join(f"{_text(name)} {spell(seconds)}" for name, seconds in progress.transitions(now))
    numbers = [f"<span>{_text(name)} <b>{_text(value)}</b></span>" for name, value in progress.numbers()]
    used = [f"<span>{_text(name)} <b>{_text(value)}</b></span>" for name, value in progress.use()]
    shown = "\n".join(_text(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…") for line in lines)
    as_of = "" if progress.ended else f"as of {now:%H:%M:%S} UTC"
    rows = [
        f'<div style="{_ROW}">{"".join(head)}</div>',
        f'<div style="{_DIM}">{stages}</div>' if stages else "",
        _bar(progress),
        f'<div style="{_ROW}">{"".join(numbers)}</div>' if numbers else "",
        f'<div style="{_ROW};{_DIM}">{"".join(used)}</div>' if used else "",
        f'<div style="{_DIM}">{_text(progress.profile)}</div>' if progress.profile else "",
        picture(list(progress.points), *_CURVE, validated=list(progress.validated)),
        f'<div style="{_DIM}">cost: {_text(str(cost))}</div>' if cost else "",
        f'<div style="font-weight:600">&#9888; {_text(progress.trouble)}</div>' if progress.trouble else "",
        f'<pre style="{_LINES}">{_text(failure)}</pre>' if failure else "",
        f'<div style="{_DIM}">{_sentence("; ".join(filter(None, (as_of, hint))))}</div>' if hint or as_of else "",
        f'<pre style="{_LOG}" tabindex="0">{shown}</pre>' if shown else "",
    ]
    return f'<div class="{NO_MATH}" style="{_BLOCK}">{"".join(rows)}</div>'


def card(job: Job) -> str:
    """A job of any age: what it is doing or has done, and why it failed."""
    told, records = job.describe(), job.records
    progress = Progress(job.name, job.target.name, job.target.region_name(), told=told)
    for record in records:
        progress.note(record)
    failure = str(job.explain()) if told["TrainingJobStatus"] == "Failed" else ""
    return block(progress, hint=curves(progress), failure=failure)


def curves(progress: Progress) -> str:
    """How to open the TensorBoard files of a job that has trained and ended; empty for any other."""
    if not (progress.ended and progress.last):
        return ""
    download = f"smtrain download {progress.name} curves --what metrics --target {progress.target}"
    return f"TensorBoard: `{download}`, then `tensorboard --logdir curves`"


def _bar(progress: Progress) -> str:
    if "of" not in progress.last:
        return ""
    share = 100 * min(1.0, progress.last["step"] / max(1.0, progress.last["of"]))
    return (
        f'<div role="progressbar" aria-valuenow="{share:.0f}" aria-valuemin="0" aria-valuemax="100" '
        'style="height:6px;margin:.4em 0;border-radius:3px;background:rgba(128,128,128,.3)">'
        f'<div style="width:{share:.1f}%;height:6px;border-radius:3px;background:{_RUNNING}"></div></div>'
    )


def _sentence(text: str) -> str:
    """A sentence whose commands, between backticks, are not broken if a line has room for them."""
    return re.sub(r"`([^`]+)`", rf'<code style="{_COMMAND}">\1</code>', _text(text))


def _text(text: str) -> str:
    return escape(clean(text))
