"""Where smtrain keeps things on this machine: $SMTRAIN_HOME, or ~/.smtrain."""

from __future__ import annotations

import os
from pathlib import Path

from smtrain.core.errors import SmtrainError


def home_path() -> Path:
    """The folder, which may not exist: for those who only read, such as a plan."""
    return Path(os.environ.get("SMTRAIN_HOME") or Path.home() / ".smtrain")


def home() -> Path:
    """The folder, made with mode 0700 if it does not exist. Raises `SmtrainError` if it cannot be."""
    folder = home_path()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SmtrainError(
            f"{folder} cannot be made ({error.strerror}); set SMTRAIN_HOME to a folder you can write"
        ) from None
    return folder
