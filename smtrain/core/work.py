"""Say in a pipe what a command, or the first call of a Python script, does before anything of it is
imported: CI and nohup would otherwise show nothing for seconds. A terminal gets a spinner instead
(smtrain/core/spinner.py), a notebook nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

WORK = {
    "init": "reading the model and the text, and planning the run",
    "plan": "planning the run",
    "check": "checking the run",
    "iam policy": "reading the rights that the run needs",
    "run": "planning and checking the run",
    "launch": "planning and checking the job",
    "tune": "planning and checking the trials",
    "pipeline": "making the pipeline",
    "list": "listing the jobs",
    "status": "looking for the job",
    "compare": "reading the trainings",
    "report": "reading the run",
    "tensorboard": "reading the run",
    "logs": "reading the log",
    "stop": "stopping the job",
    "download": "copying the output",
    "chat": "loading the model",
    "generate": "loading the model",
    "serve": "looking for the model and its server",
    "push": "reading the model",
    "register": "looking for the run's model",
    "deploy": "looking for the model",
    "undeploy": "looking for the endpoint",
    "convert": "reading the weights",
    "checkpoint inspect": "reading the checkpoint",
    "checkpoint diff": "reading the checkpoints",
    "checkpoint verify": "reading the checkpoint",
    "images": "listing the images",
    "image build": "reading what the image needs",
    "image verify": "looking for the image",
    "image pull": "looking for the image",
    "image tiny": "making the image",
    "evaluate": "loading the model and the tasks",
    "data prepare": "preparing the text",
    "data merge": "reading the data sets",
    "data split": "reading the data set",
    "data inspect": "reading the data set",
    "data report": "reading the text",
    "data export": "reading the data set",
    "data import": "reading the data set",
    "demo": "preparing the demo",
    "doctor": "looking at this machine",
    "config show": "reading the config",
    "config set": "reading the config",
    "config schema": "collecting the keys of a config",
    "cluster template": "reading the config",
    "cluster network": "reading the config",
    "cluster clean": "looking for runs in the shared folder",
    "pool list": "looking for warm pools",
    "pool extend": "looking for the training plan",
    "pool release": "looking for warm pools",
    "local status": "looking at jobs and disk",
    "local env": "starting the control plane of this machine",
    "local clean": "looking for what may go",
}
"""The first line of each command that takes more than half a second."""
_QUIET = {"--help", "-h", "--json"}
_is_command = False
"""Whether this process is a command, which says its line itself."""
_has_said = False
"""Whether a call of the Python API has said its line."""


def announce(argv: Sequence[str]) -> None:
    """Write the command's first line to standard error, unless a person or a program reads it."""
    global _is_command
    _is_command = True
    line = WORK.get(argv[0]) or WORK.get(" ".join(argv[:2]))
    if line is not None and _QUIET.isdisjoint(argv):
        _write(line)


def announce_call(function: str) -> None:
    """Write the line of a function of the Python API, if it is the first one called here."""
    global _has_said
    if _is_command or _has_said or function not in WORK:
        return
    _has_said = True  # a script that plans a thousand configs gets one line
    _write(WORK[function])


def _write(line: str) -> None:
    if not has_pipe():
        return
    with suppress(OSError):  # standard error is closed, which is no reason to end
        print(line, file=sys.stderr, flush=True)  # noqa: T201


def has_pipe() -> bool:
    """Whether errors go to a pipe or a file; not if a caller in this process collects them."""
    stream = sys.__stderr__
    return stream is not None and stream is sys.stderr and not stream.isatty()
