"""Show a followed job: a live panel on a terminal, else plain lines; Ctrl-C leaves the job
running.
"""

from __future__ import annotations

import datetime
import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from smtrain.client.follow import notebook
from smtrain.client.follow.feed_trackers import TrackerFeed, open_feed
from smtrain.client.follow.follower import Cursor, Event, Follower, StatusChange, StatusPolled
from smtrain.client.follow.progress import Progress
from smtrain.core import text
from smtrain.core.aws_errors import EXPIRED_CREDENTIALS, REFRESH, has_expired_credentials
from smtrain.core.errors import JobError
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.interrupts import interrupts
from smtrain.core.protocol.log_lines import MACHINE, Line
from smtrain.core.protocol.requests import full_status
from smtrain.core.targets import TARGETS
from smtrain.core.text import Say

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

ON_SCREEN = (print, text.say)
"""Functions that write to this process's own screen, on which a panel may be drawn."""


@dataclass(frozen=True)
class View:
    """Options of a follow: the lines to show, and how."""

    host: str | None = None
    grep: str | None = None
    since: int | None = None
    """ms"""
    tail: int | None = None
    resume: bool = False
    panel: bool | None = None
    """None: on a terminal and in a notebook."""
    interval_s: float | None = None
    """Seconds between summary lines without a panel; None: 30 on AWS, none locally."""
    lines: bool = True
    """False: without a panel only status changes and summaries."""
    keep: bool = True
    """False: the panel is replaced by one line when the job has ended."""


def milliseconds(since: datetime.datetime | float | None) -> int | None:
    """A time, or seconds back from now, as a log timestamp."""
    if since is None:
        return None
    return int(
        (since.timestamp() if isinstance(since, datetime.datetime) else time.time() - since) * 1000
    )


def follow(job: Job, view: View, say: Say = text.say) -> bool:
    """Show a job until it has ended: True; False if Ctrl-C left it running."""
    from botocore.exceptions import BotoCoreError, ClientError

    cursor = Cursor.path(job.target, job.name, view.host)
    follower = Follower(
        job.target,
        job.name,
        host=view.host,
        since=view.since,
        tail=view.tail,
        cursor=cursor,
        resume=view.resume,
    )
    progress = Progress(job.name, job.target.name, job.target.region_name(), follower.patience)
    in_notebook = notebook.is_in_notebook()
    panel = (
        view.panel
        if view.panel is not None
        else say in ON_SCREEN and (in_notebook or _can_redraw())
    )
    draw = notebook.notebook_panel if in_notebook else _panel
    if panel and view.keep:
        job.shown_in = notebook.cell()
    show = (
        draw(progress, view.keep)
        if panel
        else nullcontext(_plain(progress, view, job.target.name, say))
    )
    grep_pattern = re.compile(view.grep) if view.grep else None
    if say in ON_SCREEN and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a reader of a pipe wants each line at once
    fed: TrackerFeed | None = None
    is_whole_log = (view.host, view.since, view.tail, view.resume) == (None, None, None, False)
    with interrupts() as interrupt, ExitStack() as open_:
        try:
            with show as take, closing(follower.events()) as events:
                for event in events:
                    progress.take(event)
                    if isinstance(event, StatusPolled) and fed is None:
                        job.note(event.job)
                        fed = open_.enter_context(
                            open_feed(job, event.job, say, is_whole_log=is_whole_log)
                        )
                    if fed is not None and isinstance(event, Line):
                        fed.take(event)
                    if isinstance(event, StatusPolled):
                        job.note(event.job)
                    if not isinstance(event, Line):
                        take(event)
                    elif not grep_pattern or grep_pattern.search(event.text):
                        if not event.text.startswith(MACHINE):  # the panel shows its numbers
                            progress.lines.append(event)
                        take(event)
                    # between two events: this one was shown, and the next is not taken yet
                    interrupt.heed()
        except KeyboardInterrupt:
            follower.save()
            say(f"\nleft {job.name} running\n{_commands_to_return(job)}")
            return False
        except (ClientError, BotoCoreError) as error:
            if not has_expired_credentials(error):
                raise
            raise JobError(
                f"{EXPIRED_CREDENTIALS}; the job is still running; {REFRESH},"
                f" then\n{_commands_to_return(job)}",
                code="aws.no_credentials",
            ) from None
    now = datetime.datetime.now(datetime.timezone.utc)
    if not (panel and view.keep):
        say(f"-- {job.name}: {progress.summary(now)}")
    return True


def _commands_to_return(job: Job) -> str:
    return (
        f"come back:  smtrain logs {job.name} --follow --resume --target {job.target.name}\n"
        f"stop it:    smtrain stop {job.name} --target {job.target.name}"
    )


def dump(job: Job, view: View, say: Say = text.say) -> None:
    """Print the lines so far, page by page: the log of weeks takes no more memory than that of a
    minute.
    """
    from smtrain.client.follow.panel import format_line
    from smtrain.client.follow.reading import pages

    grep_pattern, hosts, tell = re.compile(view.grep or ""), job.hosts, _of_logs(say)
    tail_lines: deque[Line] = deque(maxlen=view.tail)
    silent = True
    for page in pages(
        job.target, job.name, view.host, job.began if view.since is None else view.since
    ):
        for line in page:
            silent = False
            if not grep_pattern.search(line.text):
                continue
            if view.tail is None:
                tell(format_line(line, hosts))
            else:
                tail_lines.append(line)
    for line in tail_lines:
        tell(format_line(line, hosts))
    if silent and (view.host, view.since) == (None, None):
        description = job.describe()
        suffix = "" if description["TrainingJobStatus"] in FINAL_STATUSES else " yet"
        text.say(f"{job.name} has written nothing{suffix}: {full_status(description)}", error=True)


def _can_redraw() -> bool:
    """True on a terminal that can redraw lines; a dumb one would show nothing before the end."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _of_logs(say: Say) -> Say:
    """The function that shows log lines: unchanged, even if they are wider than the terminal."""
    return partial(text.say, raw=True) if say is text.say else say


def _plain(progress: Progress, view: View, target: str, say: Say) -> Callable[[Event], None]:
    from smtrain.client.follow.panel import format_line

    tell = _of_logs(say)
    interval_s = (
        view.interval_s
        if view.interval_s is not None
        else (30.0 if TARGETS[target].rented else float("inf"))
    )
    said_at = time.monotonic()

    def take(event: Event) -> None:
        nonlocal said_at
        if isinstance(event, StatusChange):
            say(f"-- {progress.name}: {event.status}")
        elif isinstance(event, Line):
            if view.lines:
                tell(format_line(event, progress.hosts))
        elif time.monotonic() - said_at >= interval_s and not progress.has_ended:
            said_at = time.monotonic()
            say(
                f"-- {progress.name}:"
                f" {progress.summary(datetime.datetime.now(datetime.timezone.utc))}"
            )

    return take


@contextmanager
def _panel(progress: Progress, keep: bool) -> Iterator[Callable[[Event], None]]:
    from rich.console import Console
    from rich.live import Live

    from smtrain.client.follow.panel import LivePanel

    text.plainly(sys.stdout)
    with Live(
        LivePanel(progress), console=Console(), refresh_per_second=4, transient=not keep
    ) as live:
        try:
            yield lambda _: None
        except KeyboardInterrupt:
            live.transient = True  # else half a panel would stay above the next message
            raise
