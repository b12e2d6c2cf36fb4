"""Commands called in the test's own process: no Python to start, and no repeated import."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import traceback

import pytest

from smtrain import cli


def typed(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Call `smtrain WORDS`, 200 columns wide and with nothing to read; the result is that of a
    separate process.
    """
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (
        pytest.MonkeyPatch.context() as patch,
        open(os.devnull) as nothing,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, value in {"COLUMNS": "200", **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["smtrain", *words])
        patch.setattr(sys, "stdin", nothing)
        try:
            cli.main()
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
    return subprocess.CompletedProcess(["smtrain", *words], status, out.getvalue(), err.getvalue())


def lacking_options(command: str) -> list[str]:
    """The long options of a `smtrain` command line that its help does not have."""
    words = list(itertools.takewhile(re.compile(r"[a-z]+(-[a-z]+)*").fullmatch, command.split()))
    done = typed(*words[1:], "--help")
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return [
        option for option in re.findall(r"(?<= )--[a-z-]+", command) if option not in done.stdout
    ]
