"""Docker through its SDK: connections, images, and its errors as one sentence with the remedy."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from typing import Any

from smtrain.core.errors import LocalError
from smtrain.core.extras import missing_module, present

HOME, JOB, HOST = "smtrain.home", "smtrain.job", "smtrain.host"
"""Labels of what we make in Docker: the home folder, the job, the host's folder."""
BORROWS = "smtrain.borrows"
"""Label of an image: folders of this machine, separated by colons, that its containers get
read-only.
"""
LENT_FOLDERS = sorted({"/usr", sys.prefix, sys.base_prefix})
"""Folders that an image may borrow: the programs of this machine and the control plane's Python."""
ASK_SECONDS = 60
_START = {
    "Docker": "start it (`sudo systemctl start docker`, or `sudo dockerd`)",
    "podman": "start its service (`systemctl start podman.socket`, with --user for your own)",
}
_ACCESS_REMEDIES = {
    "Docker": "join its group (`sudo usermod -aG docker $USER`, then log in again)",
    "podman": (
        "set DOCKER_HOST to a service of your own, unix://$XDG_RUNTIME_DIR/podman/podman.sock after"
        " `systemctl --user start podman.socket`"
    ),
}
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:sha256:)?{_PART}(?::\d+)?(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?",
    re.ASCII,
)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def address() -> str:
    """The address of Docker's daemon."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def program() -> str:
    """The program behind the address: podman or Docker."""
    return "podman" if "podman" in address() else "Docker"


def connect(alternative: str = "leave out local.run_in") -> Any:
    """A client of a daemon that answers.

    Raises `LocalError` if none answers; the sentence ends with the remedy `alternative`, if any.
    """
    if not present("docker"):
        raise LocalError(missing_module("docker"))
    import docker

    try:
        if address().startswith("unix://"):
            # The SDK leaves a socket open that cannot connect.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(
                    ASK_SECONDS
                )  # connecting blocks if a daemon that hangs has a full queue
                probe.connect(address().removeprefix("unix://"))
        client = docker.from_env(timeout=ASK_SECONDS)
        client.ping()
    except Exception as error:
        raise LocalError(_unreachable(error, alternative)) from None
    return client


def _unreachable(error: BaseException, alternative: str = "") -> str:
    reasons = [cause for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror]
    if any(isinstance(cause, PermissionError) for cause in reasons):
        problem, ways = f"you may not use {program()} at {address()}", [_ACCESS_REMEDIES[program()]]
    else:
        reason = reasons[-1].strerror if reasons else str(error).splitlines()[0]
        problem = f"{program()} does not answer at {address()} ({reason})"
        ways = [_START[program()], "set DOCKER_HOST"]
    *first_ways, last = [*ways, alternative] if alternative else ways
    return f"{problem}: {', '.join(first_ways)}{', or ' if first_ways else ''}{last}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    visited_ids: set[int] = set()
    pending = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in visited_ids:
            continue
        visited_ids.add(id(cause))
        yield cause
        pending += [
            cause.__cause__,
            cause.__context__,
            *(a for a in cause.args if isinstance(a, BaseException)),
        ]


@contextlib.contextmanager
def explain_docker_errors(attempt: str) -> Iterator[None]:
    """Turn Docker's errors into a `LocalError` of one sentence; it begins with `attempt`."""
    try:
        yield
    except LocalError:
        raise
    except Exception as error:
        raise LocalError(sentence(error, attempt)) from None


def sentence(error: BaseException, attempt: str) -> str:
    """Explain an error of Docker or podman in one sentence."""
    name = program()
    tool = name.lower()
    lines = str(getattr(error, "explanation", None) or error).strip().splitlines()
    text = lines[-1] if lines else type(error).__name__
    if "no space left on device" in text.lower():
        return (
            f"{attempt} failed, as {name}'s disk is full; free some with `{tool} system prune`"
            f" ({text})"
        )
    if "predefined address pools" in text or "non-overlapping" in text:
        return (
            f"{attempt} failed, as {name} has no addresses left; remove networks with `{tool}"
            f" network prune` ({text})"
        )
    if any(isinstance(cause, (ConnectionError, FileNotFoundError)) for cause in _causes(error)):
        return f"{attempt} failed: {_unreachable(error)}"
    return f"{attempt} failed: {name} said: {text}"


def check_image_name(name: str) -> None:
    """Raise `LocalError` for a name that no image can have (the OCI distribution specification)."""
    if not _IMAGE.fullmatch(name):
        raise LocalError(
            f"{name!r} cannot be the name of an image; use lower-case letters, digits and . - _ /,"
            " and a tag such as :1"
        )


def local_image(client: Any, name: str) -> Any:
    """An image of this machine.

    Raises `LocalError` if it is not here, or is for another processor.
    """
    image = present_image(client, name)
    if image is None:
        raise LocalError(
            f"image {name} is not on this machine, and a job pulls none, as it may be large: fetch"
            f" it with `smtrain image pull {name}`, or name another one in local.image (`smtrain"
            " image tiny` makes a small one)"
        )
    return image


def present_image(client: Any, name: str) -> Any:
    """An image of this machine, None if it is not here.

    Raises `LocalError` if it is for another processor, or if no image can have this name.
    """
    import docker.errors

    check_image_name(name)
    try:
        image = client.images.get(name)
    except docker.errors.ImageNotFound:
        return None
    except docker.errors.APIError as error:
        raise LocalError(sentence(error, f"looking for image {name}")) from None
    image_architecture, machine_architecture = (
        image.attrs.get("Architecture") or "",
        architecture(client),
    )
    if image_architecture and image_architecture != machine_architecture:
        raise LocalError(
            f"image {name} is for {image_architecture}, and this machine is"
            f" {machine_architecture}: pull or build it for linux/{machine_architecture}"
        )
    return image


def architecture(client: Any) -> str:
    """The processor of Docker's machine, as images name it."""
    name = str(client.info().get("Architecture") or platform.machine())
    return _ARCHITECTURES.get(name, name)


def borrowed_folders(image: Any, allowed_folders: list[str]) -> list[str]:
    """Folders of this machine that an image borrows.

    Raises `LocalError` for one outside the allowed.
    """
    folders = [folder for folder in ((image.labels or {}).get(BORROWS) or "").split(":") if folder]
    for folder in folders:
        if folder not in allowed_folders:
            raise LocalError(
                f"image {image.tags[0] if image.tags else image.short_id} borrows {folder}, and the"
                f" control plane lends only {', '.join(allowed_folders)}: make it again with"
                " `smtrain image tiny`"
            )
    return folders


def require_usable(client: Any, name: str) -> tuple[Any, list[str]]:
    """An image and the folders that it borrows. Raises `LocalError` if it cannot be used."""
    image = local_image(client, name)
    return image, borrowed_folders(image, LENT_FOLDERS)


def free_bytes(client: Any) -> int | None:
    """Bytes free on the disk of Docker's images; None if this machine does not see that disk."""
    folder = client.info().get("DockerRootDir")
    return shutil.disk_usage(folder).free if folder and os.path.isdir(folder) else None
