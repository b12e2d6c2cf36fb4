"""The git commit that a run was started from, and the tag of its jobs that holds it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

TAG = "smtrain:git"
_VALUE = re.compile(r"[0-9a-f]{40,64}( with changes)?")
_LONGEST_S = 5.0
"""Time limit in seconds, for a folder on a disk that does not answer."""


def describe_commit(folder: Path | None = None) -> str | None:
    """The commit checked out in a folder (default: the working directory), with "with changes" if
    tracked files differ.

    None without git, a repository or a commit.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed_files = _git(folder, "status", "--porcelain", "--untracked-files=no")
    state = commit.strip() + (" with changes" if changed_files else "")
    return state if _VALUE.fullmatch(state) else None


def commit_of(tags: Iterable[Mapping[str, str]]) -> str | None:
    """The commit in a job's tags."""
    return next((tag["Value"] for tag in tags if tag["Key"] == TAG), None)


def _git(folder: Path | None, *words: str) -> str | None:
    # no lock, no prompt: another git may be running in the folder
    command = ["git", "--no-optional-locks", *words]
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return result.stdout if result.returncode == 0 else None
