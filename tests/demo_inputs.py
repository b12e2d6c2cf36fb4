"""Make demo:// inputs once for all test processes, and copy them into their homes.

A tokenizer of the whole standard library takes five CPU seconds, and tests have many homes.
Commands in separate processes make theirs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smtrain.core.demo import inputs


@contextmanager
def made_once(folder: Path) -> Iterator[None]:
    """Let this process, and those with the same folder, copy what one of them has made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "_write_text", copier(inputs._write_text, folder / "text"))
        patch.setattr(inputs, "_write_model", copier(inputs._write_model, folder / "model"))
        yield


def copier(make: Callable[[Path], None], folder: Path) -> Callable[[Path], None]:
    """Return `make` with a common folder: the first call makes it, every call copies it."""

    def write(target: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                part = folder.with_name(f"{folder.name}.{os.getpid()}")
                part.mkdir()
                make(part)
                part.rename(folder)
        shutil.copytree(folder, target, dirs_exist_ok=True)

    return write
