"""Look into an image: run image_probe.py in a container of it, without a network."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.client.launch.bundle import bundle_files
from smtrain.core.errors import LocalError
from smtrain.plane.docker import (
    LENT_FOLDERS,
    borrowed_folders,
    connect,
    explain_docker_errors,
    require_usable,
)
from smtrain.plane.hosts import read

FOLDER = "/smtrain-look"
SECONDS = 600
_contents: dict[str, ImageContents] = {}


@dataclass(frozen=True)
class ImageContents:
    """Contents of an image, as a container of it sees them."""

    python: str
    """Version of `python3`."""
    machine: str
    """Architecture, as Linux spells it."""
    uid: int
    packages: dict[str, str]
    """Installed distributions and their versions."""
    lacking: dict[str, dict[str, list[str]]]
    """By list (`requirements`, `wheels`) and stage, or word of core/protocol/entrypoints.py:
    requirements that the packages do not satisfy.
    """
    faults: dict[str, str]
    """Modules of the stages that cannot be imported, each with its reason."""
    programs: dict[str, str | None]
    unwritable: list[str]
    """Folders that stages write to and that this user may not write to."""


def inspect_image(client: Any, image: Any, engine: str | None = "native") -> ImageContents:
    """Look into a local image; without an engine nothing is imported, and no faults are found.

    Raises `LocalError` if no container of it runs, or if it has no Python 3.10.
    """
    name = image.tags[0] if image.tags else image.short_id
    status, output, _ = run(
        client, image, ["python3", f"{FOLDER}/image_probe.py", *filter(None, [engine])]
    )
    line = next(
        (line for line in reversed(output.splitlines()) if line.startswith('{"python"')), None
    )
    if line is None:
        last = (output.strip().splitlines() or [f"exit status {status}"])[-1]
        raise LocalError(
            f"image {name} has no Python of 3.10 or later that runs the stages ({last}); name"
            " another in compute.image, or build one with `smtrain image build`"
        )
    return ImageContents(**json.loads(line))


def of_hosts(request: dict[str, Any]) -> ImageContents | None:
    """Look into the image of a local job's containers, once; None if its hosts are sandboxes.

    Raises `LocalError` if containers are requested and cannot be started, or if the image has no
    Python.
    """
    run_in = read(request.get("Tags") or []).run_in
    if run_in not in ("docker", "auto"):
        return None
    with ExitStack() as stack:
        try:
            client = stack.enter_context(closing(connect()))
            image, _ = require_usable(client, request["AlgorithmSpecification"]["TrainingImage"])
        except LocalError:
            if run_in == "auto":
                return None
            raise
        if image.id not in _contents:
            _contents[image.id] = inspect_image(client, image, None)
        return _contents[image.id]


def run(
    client: Any, image: Any, command: list[str], read: str | None = None
) -> tuple[int, str, str | None]:
    """Run a command in a container of an image that has the code of a job in `FOLDER`.

    Gives the exit status, what was written, and the text of the file `read`, if it is there
    afterwards.
    """
    import docker.errors

    with _container(client, image, command) as container:
        container.start()
        status = int(container.wait(timeout=SECONDS)["StatusCode"])
        text = None
        if read:
            try:
                archive_bytes = b"".join(container.get_archive(read)[0])
                with tarfile.open(fileobj=io.BytesIO(archive_bytes)) as archive:
                    member = archive.extractfile(archive.getmembers()[0])
                    text = member.read().decode(errors="replace") if member else None
            except docker.errors.NotFound:
                pass
        return status, container.logs().decode(errors="replace"), text


@contextmanager
def _container(client: Any, image: Any, command: list[str]) -> Iterator[Any]:
    volumes = {
        folder: {"bind": folder, "mode": "ro"} for folder in borrowed_folders(image, LENT_FOLDERS)
    }
    with explain_docker_errors("running a container of the image"):
        container = client.containers.create(
            image.id, command[1:], entrypoint=command[:1], volumes=volumes, network_mode="none"
        )
        try:
            container.put_archive("/", _pack_code())
            yield container
        finally:
            container.remove(force=True)


def _pack_code() -> bytes:
    """The code of a job and image_probe.py below `FOLDER`, and an empty /opt/ml, as a tar
    archive.
    """
    files = {**bundle_files(), "image_probe.py": Path(__file__).with_name("image_probe.py")}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("opt/ml", "opt/ml/output"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, path in files.items():
            content = path.read_bytes()
            entry = tarfile.TarInfo(f"{FOLDER[1:]}/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
