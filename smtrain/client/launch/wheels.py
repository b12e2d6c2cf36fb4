"""Wheels for libraries that a job's image lacks: downloaded once, pinned by hash, kept by content.

The container installs them without a network (entrypoints/launch.py). They make stages faster, and
none needs them: if they cannot be downloaded here, the job runs without them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.launch.inputs import Upload
from smtrain.core.facts import table
from smtrain.core.facts.images import python_of
from smtrain.core.files import home
from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.core.text import Say

if TYPE_CHECKING:
    from smtrain.client.launch.image_inspect import ImageContents

SECONDS = 180  # for the download
RAY = "wheels-ray.txt"
"""The lock file of Ray, 70 MB a wheel, which only a preparation on several machines takes along."""


def wheel_uploads(request: dict[str, Any], target: SageMakerBackend, say: Say) -> list[Upload]:
    """The upload that belongs next to the code of a request: the wheels that its stage wants.

    On this machine what the image of its containers lacks; none for a sandbox, which has this
    machine's own Python.
    """
    uploads = _of_lock(request, target, say, lock_file())
    machines = (request.get("ResourceConfig") or {}).get("InstanceCount", 1)
    if request["HyperParameters"]["stage"] == "prepare" and machines > 1 and target.record.rented:
        uploads += _of_lock(request, target, say, lock_file(RAY))
    return uploads


def _of_lock(
    request: dict[str, Any], target: SageMakerBackend, say: Say, lock: Path
) -> list[Upload]:
    stage = request["HyperParameters"]["stage"]
    wheel_names = names(stage, lock)
    if not wheel_names:
        return []
    image_contents = None
    if not target.record.rented:
        from smtrain.client.launch.image_inspect import of_hosts

        if (image_contents := of_hosts(request)) is None:
            return []
        missing_names = [
            line.partition("==")[0] for line in image_contents.lacking["wheels"][stage]
        ]
        if not missing_names:
            return []
        wheel_names = missing_names
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"]}
    code = channels["code"]["DataSource"]["S3DataSource"]["S3Uri"]
    image = request["AlgorithmSpecification"]["TrainingImage"]
    if not folder_of(image, image_contents, lock).is_dir():
        say(f"downloading {', '.join(names(lock=lock))} for the image, once")
    try:
        files = fetch(image, image_contents, lock)
    except OSError as error:
        loss = (
            "prepare and checkpoints are slower"
            if lock == lock_file()
            else "the image must have it (data.machines)"
        )
        say(
            f"without {', '.join(names(lock=lock))}, which could not be downloaded ({error}):"
            f" {loss}"
        )
        return []
    files = [path for path in files if path.name.split("-")[0].replace("_", "-") in wheel_names]
    return [Upload(f"{code}wheels/", tuple((path.name, path) for path in files))]


def names(stage: str | None = None, lock: Path | None = None) -> list[str]:
    """The libraries of a lock file; for one stage, those whose comment names it."""
    text = (lock or lock_file()).read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^([a-z0-9-]+)==[^#\n]*# *(.*)$", text, re.MULTILINE)
    return [name for name, stages in lines if stage is None or stage in stages.split()]


def lock_file(name: str = "wheels.txt") -> Path:
    return entrypoints_folder() / name


def pythons(image: str) -> list[str]:
    """The CPython releases that an image may have, as pip says them ("312"): its own if it is
    known, else all.
    """
    python = python_of(image)
    return [python] if python else list(table("images")["contents"]["pythons"])


def _kind(image: str, contents: ImageContents | None) -> tuple[list[str], str]:
    """CPython releases and architecture, from the image itself or else from its name."""
    if contents is None:
        return pythons(image), table("images")["contents"]["architecture"]
    return ["".join(contents.python.split(".")[:2])], contents.machine


def folder_of(image: str, contents: ImageContents | None = None, lock: Path | None = None) -> Path:
    """The folder of an image's wheels on this machine, by the content of the lock file; it may not
    exist yet.
    """
    releases, machine = _kind(image, contents)
    kind = f"{'-'.join(releases)}-{machine}"
    return (
        home()
        / "wheels"
        / f"{hashlib.sha256((lock or lock_file()).read_bytes()).hexdigest()[:16]}-{kind}"
    )


def fetch(
    image: str, contents: ImageContents | None = None, lock: Path | None = None
) -> list[Path]:
    """The wheels for an image, downloaded by pip if they are not here yet.

    Raises OSError with pip's reason.
    """
    folder = folder_of(image, contents, lock)
    releases, machine = _kind(image, contents)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=folder.parent))
        try:
            for python in releases:
                _download(python, machine, part, lock or lock_file())
            os.rename(part, folder)
        except OSError:
            if not folder.is_dir():  # or another process was faster
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return sorted(folder.glob("*.whl"))


def _download(python: str, machine: str, folder: Path, lock: Path) -> None:
    pip_run(
        "download",
        "--retries=1",
        "--timeout=10",
        "--require-hashes",
        "--no-deps",
        *pip_options(python, machine),
        f"--dest={folder}",
        f"--requirement={lock}",
        seconds=SECONDS,
    )


def pip_options(python: str, machine: str) -> list[str]:
    """Options that choose wheels for CPython `python` ("3.12", or "312" as pip shortens it) on
    Linux on `machine`.
    """
    platforms = [
        f"--platform={tag}_{machine}"
        for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
    ]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]


def pip_run(command: str, *arguments: str, seconds: int) -> str:
    """Run a pip command and return its output.

    Raises OSError with pip's reason, or after `seconds` without an end.
    """
    try:
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                command,
                "-q",
                "--disable-pip-version-check",
                "--no-input",
                *arguments,
            ],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"no answer from the package index within {seconds} s") from None
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [
            f"pip ended with status {process.returncode}"
        ]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise OSError(errors[-1].removeprefix("ERROR: "))
    return process.stdout
