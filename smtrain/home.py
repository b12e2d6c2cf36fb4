"""Where smtrain keeps things on this machine: $SMTRAIN_HOME, or ~/.smtrain."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The folder, made with mode 0700 where it does not exist."""
    folder = Path(os.environ.get("SMTRAIN_HOME") or Path.home() / ".smtrain")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
