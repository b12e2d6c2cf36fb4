"""Docker through its SDK: connections, images, and its errors as one sentence with the remedy."""

from __future__ import annotations

import contextlib
import os
import platform
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
LENT = sorted({"/usr", sys.prefix, sys.base_prefix})
"""Folders that an image may borrow: the programs of this machine and the control plane's Python."""
ASK_SECONDS = 60
_START = {
    "Docker": "start it (`sudo systemctl start docker`, or `sudo dockerd`)",
    "podman": "start its service (`systemctl start podman.socket`, with --user for your own)",
}
_ALLOWED = {
    "Docker": "join its group (`sudo usermod -aG docker $USER`, then log in again)",
    "podman": (
        "set DOCKER_HOST to a service of your own, unix://$XDG_RUNTIME_DIR/podman/podman.sock after"
        " `systemctl --user start podman.socket`"
    ),
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def address() -> str:
    """The address of Docker's daemon."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def program() -> str:
    """The program behind the address: podman or Docker."""
    return "podman" if "podman" in address() else "Docker"


def connect(instead: str = "leave out local.run_in") -> Any:
    """A client of a daemon that answers.

    Raises `LocalError` if none answers; the sentence ends with the remedy `instead`, if any.
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
        raise LocalError(_unreachable(error, instead)) from None
    return client


def _unreachable(error: BaseException, instead: str = "") -> str:
    reasons = [cause for cause in _causes(error) if isinstance(cause, OSError) and cause.strerror]
    if any(isinstance(cause, PermissionError) for cause in reasons):
        what, ways = f"you may not use {program()} at {address()}", [_ALLOWED[program()]]
    else:
        reason = reasons[-1].strerror if reasons else str(error).splitlines()[0]
        what = f"{program()} does not answer at {address()} ({reason})"
        ways = [_START[program()], "set DOCKER_HOST"]
    *others, last = [*ways, instead] if instead else ways
    return f"{what}: {', '.join(others)}{', or ' if others else ''}{last}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [
            one.__cause__,
            one.__context__,
            *(a for a in one.args if isinstance(a, BaseException)),
        ]


@contextlib.contextmanager
def plainly(what: str) -> Iterator[None]:
    """Turn Docker's errors into a `LocalError` of one sentence; `what` names the attempt."""
    try:
        yield
    except LocalError:
        raise
    except Exception as error:
        raise LocalError(sentence(error, what)) from None


def sentence(error: BaseException, what: str) -> str:
    """Explain an error of Docker or podman in one sentence."""
    name = program()
    tool = name.lower()
    lines = str(getattr(error, "explanation", None) or error).strip().splitlines()
    text = lines[-1] if lines else type(error).__name__
    if "no space left on device" in text.lower():
        return (
            f"{what} failed, as {name}'s disk is full; free some with `{tool} system prune`"
            f" ({text})"
        )
    if "predefined address pools" in text or "non-overlapping" in text:
        return (
            f"{what} failed, as {name} has no addresses left; remove networks with `{tool} network"
            f" prune` ({text})"
        )
    if any(isinstance(cause, (ConnectionError, FileNotFoundError)) for cause in _causes(error)):
        return f"{what} failed: {_unreachable(error)}"
    return f"{what} failed: {name} said: {text}"


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

    Raises `LocalError` if it is for another processor.
    """
    import docker.errors

    try:
        image = client.images.get(name)
    except docker.errors.ImageNotFound:
        return None
    except docker.errors.APIError as error:
        raise LocalError(sentence(error, f"looking for image {name}")) from None
    needed, here = image.attrs.get("Architecture") or "", architecture(client)
    if needed and needed != here:
        raise LocalError(
            f"image {name} is for {needed}, and this machine is {here}: pull or build it for"
            f" linux/{here}"
        )
    return image


def architecture(client: Any) -> str:
    """The processor of Docker's machine, as images name it."""
    here = str(client.info().get("Architecture") or platform.machine())
    return _ARCHITECTURES.get(here, here)


def borrowed(image: Any, allowed: list[str]) -> list[str]:
    """Folders of this machine that an image borrows.

    Raises `LocalError` for one outside the allowed.
    """
    folders = [folder for folder in ((image.labels or {}).get(BORROWS) or "").split(":") if folder]
    for folder in folders:
        if folder not in allowed:
            raise LocalError(
                f"image {image.tags[0] if image.tags else image.short_id} borrows {folder}, and the"
                f" control plane lends only {', '.join(allowed)}: make it again with `smtrain image"
                " tiny`"
            )
    return folders


def usable(client: Any, name: str) -> tuple[Any, list[str]]:
    """An image and the folders that it borrows. Raises `LocalError` if it cannot be used."""
    image = local_image(client, name)
    return image, borrowed(image, LENT)


def room(client: Any) -> int | None:
    """Bytes free on the disk of Docker's images; None if this machine does not see that disk."""
    folder = client.info().get("DockerRootDir")
    return shutil.disk_usage(folder).free if folder and os.path.isdir(folder) else None
