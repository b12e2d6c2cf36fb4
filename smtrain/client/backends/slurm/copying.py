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
_LOST_STATUSES = (10, 12, 20, 30, 35, SSH_LOST)  # rsync's exit statuses for a broken connection
_PARTS = ".partial"
_COMPARE_LONG = 4 << 30  # bytes that take some ten seconds to compare

Files = Sequence[tuple[str, Body]]


def send(head: Head, shared_folder: str, folder: str, files: Files, say: Say) -> None:
    """Copy files into a folder, each atomically, unless they are there with the same size and
    SHA-256.

    rsync keeps a partial copy of an interrupted file below `shared_folder`. Raises `HeadError`.
    """
    announcements: list[str] = []
    digests = cache(sha256_of)

    def attempt() -> None:
        sizes = head.sizes(folder)
        present_files = [(name, body) for name, body in files if sizes.get(name) == size_of(body)]
        if (
            total := sum(size_of(body) for _, body in present_files)
        ) > _COMPARE_LONG and not announcements:
            say(f"comparing {total / 1e9:.1f} GB in {folder} with the files here")
        remote_digests = head.sha256(folder, [name for name, _ in present_files])
        missing_files = [
            (name, body)
            for name, body in files
            if name not in remote_digests or remote_digests[name] != digests(body)
        ]
        total = sum(size_of(body) for _, body in missing_files)
        if total > 1 << 20 and not announcements:
            announcements.append(folder)
            say(f"copying {total / 1e6:.1f} MB to {folder}")
        large = [(name, body) for name, body in missing_files if isinstance(body, Path)]
        if head.host is not None and large:
            if reason := _without_rsync(head):
                say(
                    f"{reason}, so a file whose copy breaks off is copied again from its beginning;"
                    " with rsync on both machines it would resume"
                )
            else:
                _rsync(head, shared_folder, folder, large)
                missing_files = [file for file in missing_files if file not in large]
        for name, body in missing_files:
            if isinstance(body, bytes):
                head.write(f"{folder}/{name}", body)
            else:
                head.copy(body, f"{folder}/{name}")

    retry_while_cut_off(attempt, say)


def fetch(head: Head, path: str, destination: Path, say: Say) -> None:
    """Copy a file of the shared folder to this machine."""
    destination.unlink(missing_ok=True)
    retry_while_cut_off(lambda: head.fetch(path, destination), say)


def retry_while_cut_off(attempt: Callable[[], None], say: Say) -> None:
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


def _rsync(head: Head, shared_folder: str, folder: str, files: Sequence[tuple[str, Path]]) -> None:
    assert head.host is not None
    parts = f"{shared_folder}/{_PARTS}"
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
            process = subprocess.run(
                argv, input=names.encode(), stdout=subprocess.DEVNULL, stderr=complaint
            )
            complaint.seek(0)
            stderr_text = complaint.read().decode(errors="replace")
        if process.returncode in _LOST_STATUSES:
            of_ssh = [line for line in stderr_text.splitlines() if not line.startswith("rsync")]
            text, lasting = explain_ssh(head.host, "\n".join(of_ssh))
            raise HeadError(text) if lasting else HeadLostError(text)
        if process.returncode:
            raise HeadError(
                f"{head.name}: {folder} could not be written: {' '.join(stderr_text.split())}"
            )


def _root(file: tuple[str, Path]) -> str:
    """The folder that a file's name is relative to."""
    name, path = file
    root = path.absolute().as_posix().removesuffix(f"/{name}")
    assert root != path.absolute().as_posix(), f"{path} is not called {name}"
    return root
