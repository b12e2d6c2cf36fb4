"""Copy files to and from the shared folder, resuming after a broken connection."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from smtrain.client.backends.base import Body, size_of
from smtrain.client.backends.checksums import sha256_of
from smtrain.client.backends.sagemaker.retry import Backoff
from smtrain.client.backends.slurm.remote_shell import (
    SSH_LOST,
    Head,
    HeadError,
    HeadLostError,
    explain_ssh,
    ssh_options,
)
from smtrain.core.interrupts import pause
from smtrain.core.text import Say

PATIENCE_S = 300.0
"""A copy tries for so long to get its connection back."""
_STEADY_S = 60.0  # after a connection that held so long, the backoff starts again
_BROKEN = (10, 12, 20, 30, 35, SSH_LOST)  # rsync's exit statuses for a broken connection
_PARTS = ".partial"
_COMPARE_LONG = 4 << 30  # bytes that take some ten seconds to compare

Files = Sequence[tuple[str, Body]]


def send(head: Head, shared: str, folder: str, files: Files, say: Say) -> None:
    """Copy files into a folder, each atomically, unless they are there with the same size and
    SHA-256.

    rsync keeps a partial copy of an interrupted file below `shared`. Raises `HeadError`.
    """
    announced: list[str] = []
    digests = cache(sha256_of)

    def attempt() -> None:
        sizes = head.sizes(folder)
        there = [(name, body) for name, body in files if sizes.get(name) == size_of(body)]
        if (total := sum(size_of(body) for _, body in there)) > _COMPARE_LONG and not announced:
            say(f"comparing {total / 1e9:.1f} GB in {folder} with the files here")
        found = head.sha256(folder, [name for name, _ in there])
        missing = [
            (name, body)
            for name, body in files
            if name not in found or found[name] != digests(body)
        ]
        total = sum(size_of(body) for _, body in missing)
        if total > 1 << 20 and not announced:
            announced.append(folder)
            say(f"copying {total / 1e6:.1f} MB to {folder}")
        large = [(name, body) for name, body in missing if isinstance(body, Path)]
        if head.host is not None and large:
            if why := _without_rsync(head):
                say(
                    f"{why}, so a file whose copy breaks off is copied again from its beginning;"
                    " with rsync on both machines it would resume"
                )
            else:
                _rsync(head, shared, folder, large)
                missing = [one for one in missing if one not in large]
        for name, body in missing:
            if isinstance(body, bytes):
                head.write(f"{folder}/{name}", body)
            else:
                head.copy(body, f"{folder}/{name}")

    outlasting(attempt, say)


def fetch(head: Head, path: str, destination: Path, say: Say) -> None:
    """Copy a file of the shared folder to this machine."""
    destination.unlink(missing_ok=True)
    outlasting(lambda: head.fetch(path, destination), say)


def outlasting(attempt: Callable[[], None], say: Say) -> None:
    """Call a repeatable `attempt` until its connection holds. Raises `HeadError`."""
    backoff = Backoff(PATIENCE_S, 1.0, 20.0)
    while True:
        began = time.monotonic()
        try:
            return attempt()
        except HeadLostError as error:
            if time.monotonic() - began > _STEADY_S:
                backoff = Backoff(PATIENCE_S, 1.0, 20.0)
            wait = backoff.pause()
            if wait is None:
                raise
            say(f"{error}; next try in {wait:.0f} s")
            pause(wait)


def _without_rsync(head: Head) -> str | None:
    """Say which side lacks rsync, as the beginning of a sentence; None if both have it."""
    if shutil.which("rsync") is None:
        return "there is no rsync on this machine"
    return None if head.sh("command -v rsync; :") else f"there is no rsync on {head.name}"


def _rsync(head: Head, shared: str, folder: str, files: Sequence[tuple[str, Path]]) -> None:
    assert head.host is not None
    parts = f"{shared}/{_PARTS}"
    head.sh('mkdir -p "$1" "$2"', folder, parts)
    for root, group in groupby(sorted(files, key=_root), key=_root):
        names = "\0".join(name for name, _ in group)
        argv = [
            "rsync",
            "--copy-links",
            "--ignore-times",
            "--from0",
            "--files-from=-",
            f"--partial-dir={parts}",
            "--chmod=D755,F644",
            "-e",
            shlex.join(["ssh", *ssh_options()]),
            f"{root}/",
            f"{head.host}:{folder}/",
        ]
        with tempfile.TemporaryFile() as complaint:
            done = subprocess.run(
                argv, input=names.encode(), stdout=subprocess.DEVNULL, stderr=complaint
            )
            complaint.seek(0)
            said = complaint.read().decode(errors="replace")
        if done.returncode in _BROKEN:
            of_ssh = [line for line in said.splitlines() if not line.startswith("rsync")]
            text, lasting = explain_ssh(head.host, "\n".join(of_ssh))
            raise HeadError(text) if lasting else HeadLostError(text)
        if done.returncode:
            raise HeadError(f"{head.name}: {folder} could not be written: {' '.join(said.split())}")


def _root(named: tuple[str, Path]) -> str:
    """The folder that a file's name is relative to."""
    name, path = named
    root = path.absolute().as_posix().removesuffix(f"/{name}")
    assert root != path.absolute().as_posix(), f"{path} is not called {name}"
    return root
