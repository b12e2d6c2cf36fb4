"""The git commit that a run was started from: what a folder has checked out, and the tag by which its jobs carry it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

TAG = "smtrain:git"
_VALUE = re.compile(r"[0-9a-f]{40,64}( with changes)?")
_LONGEST_S = 5.0
"""A folder on a disk that does not answer is not worth waiting for."""


def committed(folder: Path | None = None) -> str | None:
    """The commit that a folder (default: the working directory) has checked out, with "with changes" where files that
    git knows differ from it. None where there is no git, no repository, or no commit."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    found = commit.strip() + (" with changes" if changed else "")
    return found if _VALUE.fullmatch(found) else None


def commit_of(tags: Iterable[Mapping[str, str]]) -> str | None:
    """The commit that a job's tags name."""
    return next((tag["Value"] for tag in tags if tag["Key"] == TAG), None)


def _git(folder: Path | None, *words: str) -> str | None:
    # no lock is taken, and nothing is asked: another git may be at work in the folder
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LONGEST_S
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
