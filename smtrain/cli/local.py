"""`smtrain local status|stop`: the control plane on this machine."""

from __future__ import annotations

from smtrain.cli import options
from smtrain.text import say

app = options.app()


@app.command()
def status() -> None:
    """Say whether the control plane runs, where, and how to point other tools at it."""
    from smtrain.local import running

    endpoint = running()
    if endpoint is None:
        say("the local control plane is not running; any command with --target local starts it")
        return
    say(f"running as process {endpoint.pid} at {endpoint.url}; state in {endpoint.home}")
    for key, value in endpoint.environment().items():
        say(f"export {key}={value}")


@app.command()
def stop() -> None:
    """Stop the control plane; jobs that run are ended, everything else is kept."""
    from smtrain.local import shut_down

    shut_down()
    say("stopped")
