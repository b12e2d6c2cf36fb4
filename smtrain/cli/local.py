"""`smtrain local status|env|stop|clean`: the control plane on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smtrain.cli import options
from smtrain.core.text import say, shell_word

if TYPE_CHECKING:
    from smtrain.plane.server.clean import Removal

app = options.app(
    """The control plane on this machine, which takes jobs in place of AWS, and its disk.

    $ smtrain local clean  # what takes the disk; removes nothing
    """
)


NOT_SHOWN = "AWS_SECRET_ACCESS_KEY"


@app.command()
def status(
    secrets: Annotated[bool, typer.Option("--secrets", help="Show the secret key too.")] = False,
) -> None:
    """Show the control plane's state, address and disk use, and how to point other tools at it.

    $ smtrain local status  # address, disk, and how to point other tools at it
    """
    from smtrain.plane.client import home_folder, running_endpoint, server_pid
    from smtrain.plane.server.clean import set_aside_files, usage

    endpoint, used = running_endpoint(), usage(home_folder())
    say(f"{used.line()}; `smtrain local clean` says what can go")
    for path in set_aside_files(used.home):
        say(f"damaged and set aside: {path}")
    if endpoint is None and (pid := server_pid()) is not None:
        say(
            f"process {pid} does not answer; if it was suspended, `kill -CONT {pid}`, and `smtrain"
            " local stop` ends it"
        )
        return
    if endpoint is None:
        say("the local control plane is not running; any command with --target local starts it")
        return
    say(f"running as process {endpoint.pid} at {endpoint.url}; state in {endpoint.home}")
    for line in exports(
        {k: v for k, v in endpoint.environment().items() if secrets or k != NOT_SHOWN}
    ):
        say(line, raw=True)
    if not secrets:
        say(
            f'{NOT_SHOWN} is not shown; `eval "$(smtrain local env)"` sets it with the others,'
            " --secrets shows it"
        )


@app.command()
def env() -> None:
    """Print the variables that point other tools at the control plane, for `eval "$(smtrain local
    env)"`.

    Starts the control plane if it does not run. The output holds its secret key.

    $ smtrain local env  # for a shell: eval "$(smtrain local env)"
    """
    from smtrain.plane.client import ensure_running

    for line in exports(ensure_running().environment()):
        say(line, raw=True)


def exports(variables: dict[str, str]) -> list[str]:
    """Lines that set these variables in a POSIX shell."""
    return [f"export {key}={shell_word(value)}" for key, value in variables.items()]


@app.command()
def stop() -> None:
    """Stop the control plane; jobs that run are ended, everything else is kept.

    $ smtrain local stop  # the next command starts it again
    """
    from smtrain.plane.client import shut_down

    shut_down()
    say("stopped")


@app.command()
def clean(
    jobs: options.FinishedJobs = False,
    older_than: options.OlderThan = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Remove all that no running job or unfinished run needs, models and demo too.",
        ),
    ] = False,
    run: options.OneRun = None,
    yes: options.WithoutAsking = False,
) -> None:
    """Show what the home folder holds on disk, and remove what is asked for.

    What a running job or an unfinished run needs stays.

    $ smtrain local clean --older-than 7d  # jobs of finished runs; models stay
    $ smtrain local clean --run my-run --yes  # one run with all that it left, unasked
    """
    from smtrain.core.config.units import spell_bytes
    from smtrain.plane.client import ensure_running, home_folder
    from smtrain.plane.server.clean import KINDS, end_crashed, plan, remove, usage

    age = options.age_of(older_than)
    if leftovers := end_crashed(home_folder()):
        say(f"removed from Docker what a crash left: {leftovers}")
    used = usage(home_folder())
    for kind, size in used.kinds.items():
        if size:
            say(f"{spell_bytes(size):>9}  {kind}{f': {KINDS[kind]}' if KINDS[kind] else ''}")
    say(f"{spell_bytes(used.total):>9}  in {used.home}; {spell_bytes(used.free)} are free")
    if not options.is_named(jobs, age, everything, run or None):
        return
    endpoint = ensure_running()
    removal = plan(
        endpoint, jobs=jobs or age is not None, older_than=age, everything=everything, run=run
    )
    _show(removal)
    if removal.empty:
        say("nothing to remove")
        return
    if options.may_remove(yes):
        say(f"{spell_bytes(max(0, remove(endpoint, removal, everything=everything)))} freed")


def _show(removal: Removal) -> None:
    from smtrain.core.config.units import spell_bytes

    if removal.jobs:
        names = ", ".join(sorted({record.run for record in removal.jobs}))
        say(f"to go: {len(removal.jobs)} jobs of {names}")
    if removal.objects:
        say(
            f"to go: {len(removal.objects)} objects in S3,"
            f" {spell_bytes(sum(removal.objects.values()))}"
        )
    for path in removal.folders:
        say(f"to go: {path}")
    options.say_kept(removal.keep_reasons)
