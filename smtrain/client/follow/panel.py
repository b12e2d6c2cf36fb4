"""The live panel of a job on a terminal."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from smtrain.client.follow.curve import sparkline
from smtrain.client.follow.progress import Progress
from smtrain.core.config.units import spell
from smtrain.core.protocol.log_lines import Line, step_record
from smtrain.core.text import clean

_FRAME = 4
"""Rows of the terminal that the job's own lines cannot use: the border's two, the rule above them,
the cursor's.
"""
_DRAWN_ELSEWHERE = re.compile(r" of=\d+(?= |$)| data_wait=0\.00\d*(?= |$)")
"""Fields of a step's line that the bar shows, or that say that no time was lost."""
_COLOURS = {"Completed": "green", "Failed": "red", "Stopped": "yellow", "Stopping": "yellow"}


def format_line(line: Line, hosts: int) -> str:
    """A line as printed: after its host's name if there are several hosts, so that no host can
    imitate another.
    """
    text = clean(line.text).rstrip("\n")
    return f"{line.host} | " + text.replace("\n", f"\n{line.host} | ") if hosts > 1 else text


def format_line_below_numbers(line: Line, hosts: int) -> str:
    """A line below a panel's bar and numbers: a step's line without the numbers shown there."""
    text = format_line(line, hosts)
    return _DRAWN_ELSEWHERE.sub("", text) if step_record(line.text) else text


class LivePanel:
    """Draws a `Progress` each time it is rendered."""

    def __init__(self, progress: Progress, lines: int = 10) -> None:
        self.progress, self.lines = progress, lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = datetime.datetime.now(datetime.timezone.utc)
        p = self.progress
        colour = _COLOURS.get(p.job.get("TrainingJobStatus", ""), "cyan")
        room = max(20, options.max_width - 4)
        screen_rows = console.size.height - _FRAME if console.is_terminal else sys.maxsize
        rows = list(self._rows(now, room))
        if (free_rows := screen_rows - _height(console, options.update(width=room), rows)) < 0:
            rows = list(self._rows(now, room, history=False))
        if free_rows > 0 and p.lines:
            rows.append(Text("─" * room, "dim"))
            for line in list(p.lines)[-self.lines :][-free_rows:]:
                text = format_line_below_numbers(line, p.hosts)
                rows.append(Text(text, overflow="ellipsis", no_wrap=True))
        yield Panel(
            Group(*rows),
            title=Text.assemble((clean(p.name), "bold"), f" on {p.target}"),
            title_align="left",
            subtitle=None if p.has_ended else "Ctrl-C leaves it running",
            subtitle_align="right",
            border_style=colour,
        )
        if console.is_terminal and not p.has_ended:
            # The terminal prints ^C at the cursor. Behind a frame as wide as the screen it would begin
            # a new line, and erasing the panel would leave its first line.
            yield Text()

    def _rows(
        self, now: datetime.datetime, room: int, history: bool = True
    ) -> Iterator[RenderableType]:
        p = self.progress
        colour = _COLOURS.get(p.job.get("TrainingJobStatus", ""), "cyan")
        cost = p.cost(now)
        head = [Text(p.status, f"bold {colour}"), Text(spell(p.elapsed_s(now)))]
        yield from wrap_items([*head, *([Text(cost.machines, "dim")] if cost else [])], room)
        if history:
            changes = [Text(f"{status} {spell(s)}", "dim") for status, s in p.transitions(now)]
            yield from wrap_items(changes, room, between=" > ")
        if numbers := p.numbers():
            if "of" in p.last:
                bar = Table.grid()  # a bar by itself does not end its line
                bar.add_row(ProgressBar(total=p.last["of"], completed=p.last["step"], width=room))
                yield bar
            yield from wrap_items(
                [Text.assemble((f"{name} ", "dim"), value) for name, value in numbers], room
            )
            finite = [loss for _, loss in p.points]
            if len(finite) > 1:
                first, last = f"loss {finite[0]:.3f} ", f" {finite[-1]:.3f}"
                yield Text(first + sparkline(finite, room - len(first) - len(last)) + last, "blue")
        if history and (use := p.use()):
            yield from wrap_items(
                [Text.assemble((f"{name} ", "dim"), value) for name, value in use], room
            )
        if history and p.profile:
            yield Text(clean(p.profile), "dim")
        if cost:
            forms = [f"cost {form}" for form in cost.forms()]
            yield Text(next((form for form in forms if len(form) <= room), forms[-1]), "dim")
        for text in p.warnings:
            yield Text(clean(text), "yellow")
        if p.trouble:
            yield Text(clean(p.trouble), "yellow")


def _height(console: Console, options: ConsoleOptions, rows: Sequence[RenderableType]) -> int:
    return len(console.render_lines(Group(*rows), options, pad=False))


def wrap_items(items: Sequence[Text], room: int, between: str = "  ") -> Iterator[Text]:
    """Put items next to each other, at most `room` characters a line; an item that fits a line is
    not broken.
    """
    line = Text()
    for item in items:
        if line and len(line) + len(between) + len(item) > room:
            yield line
            line = Text()
        line += Text(between if line else "", "dim") + item
    yield line
