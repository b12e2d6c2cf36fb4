"""Files of the control plane's folder, read so that damage to one cannot stop a start or mislead a
client.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smtrain.core.files import read_object
from smtrain.core.text import say

ENDPOINT = "endpoint.json"
MOST_BYTES = 1 << 20
_URL = re.compile(r"http://127\.0\.0\.1:([0-9]{1,5})")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a regular file of at most a megabyte; None for anything else."""
    try:
        return read_object(path, MOST_BYTES)
    except (OSError, ValueError):
        return None


def set_aside(path: Path, reason: str) -> None:
    """Move a damaged file, or a folder in its place, out of the way and log it."""
    for number in range(1, 100):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(aside):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                path.rename(aside)
                say(f"warning: {path} {reason}; set aside as {aside.name}", error=True)
            return


def make_way(path: Path) -> None:
    """Set aside a folder, link or device at the path of a regular file of the control plane."""
    if os.path.lexists(path) and not path.is_file():
        set_aside(path, "is not a file")


def safe_join(folder: Path, relative: str) -> Path:
    """`folder/relative`. Raises ValueError for a name that leads out of the folder."""
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in relative:
        raise ValueError(f"the name {relative!r} points outside {folder}")
    return folder.joinpath(*parts)


def remove(path: Path) -> None:
    """Remove a file or a folder, however deep and whatever its modes; warn if something is left."""
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    if not os.path.lexists(path):
        return
    # rmtree fails for trees that are deeper than its stack, have too long paths, or forbid it.
    for command in (
        ["chmod", "-R", "u+rwX"],
        ["chattr", "-R", "-f", "-i", "-a"],
        ["rm", "-rf", "--"],
    ):
        with contextlib.suppress(OSError):
            subprocess.run([*command, str(path)], capture_output=True, check=False)
    if os.path.lexists(path):
        say(f"warning: {path} could not be removed; it stays on the disk")


def make_folder(path: Path) -> Path:
    """Make a folder; anything else in its place is set aside."""
    if os.path.lexists(path) and not path.is_dir():
        set_aside(path, "is not a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def endpoint_fields(state: Path) -> dict[str, Any]:
    """The well-formed fields of endpoint.json, which the last server of this folder wrote."""
    fields = read_json(state / ENDPOINT) or {}
    return {
        name: fields[name] for name, good in _GOOD.items() if name in fields and good(fields[name])
    }


def pid_in(lock: Path) -> int | None:
    """The process that wrote its id into the lock of a server."""
    with contextlib.suppress(OSError, ValueError):
        if lock.is_file():
            text = lock.read_text()[:20]
            return int(text) if _GOOD["pid"](int(text)) else None
    return None


def port_of(url: str) -> int:
    """The port of a server's address; 0 if it has none that can be bound."""
    match = _URL.fullmatch(url)
    port = int(match[1]) if match else 0
    return port if port < 1 << 16 else 0


def _text(pattern: str) -> Callable[[Any], bool]:
    regex = re.compile(pattern)
    return lambda value: isinstance(value, str) and regex.fullmatch(value) is not None


_GOOD: dict[str, Callable[[Any], bool]] = {
    "url": lambda value: isinstance(value, str) and port_of(value) > 0,
    "region": _text(r"[a-z0-9-]{1,40}"),
    "account": _text(r"[0-9]{12}"),
    "bucket": _text(r"[a-z0-9.-]{3,63}"),
    "role": _text(r"arn:[\w+=,.@:/-]{1,256}"),
    "pid": lambda value: type(value) is int and 0 < value < 1 << 31,
    "access_key": _text(r"\w{16,128}"),
    "secret_key": _text(r"[\w/+=]{16,128}"),
    "stopped": lambda value: isinstance(value, bool),
}
