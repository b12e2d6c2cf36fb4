"""Shell commands of users, checked before a cluster runs them."""

from __future__ import annotations

import os
import re
import subprocess

_PLACE = re.compile(r"^bash: (?:-c: )?line \d+: ")
_SECONDS = 10


def syntax_error(script: str) -> str:
    """The first syntax error that bash finds in a script, without running it; empty without one, or
    without bash.
    """
    try:
        result = subprocess.run(
            ["bash", "-n"],
            input=os.fsencode(script),
            capture_output=True,
            timeout=_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = result.stderr.decode("utf-8", "replace").splitlines()
    return _PLACE.sub("", lines[0]) if result.returncode and lines else ""
