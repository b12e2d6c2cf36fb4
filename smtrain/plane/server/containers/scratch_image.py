"""A tiny CPU image without a registry: a root folder that borrows this machine's programs and
Python, read-only.

It has a few kilobytes and works only on this machine. The programs of another root folder, such as
debootstrap makes, can be packed instead.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from smtrain.core.errors import LocalError
from smtrain.plane.docker import BORROWS, explain_docker_errors, present_image, program

NAME = "smtrain-tiny"
FOLDERS = (
    "dev",
    "proc",
    "sys",
    "etc",
    "home",
    "mnt",
    "opt",
    "root",
    "run",
    "srv",
    "tmp",
    "usr",
    "var/tmp",
)
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USERS = (
    "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
GROUP = "root:x:0:\nnogroup:x:65534:\n"


def make(
    client: Any, name: str, programs: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Make the image; return its id.

    `programs` is a root folder (/usr, /bin, ...) to pack; by default this machine's /usr is
    borrowed. `env` holds variables of the image. Raises `LocalError` if /bin or /lib of this
    machine is not a link into /usr, or of Docker.
    """
    import docker.errors
    import docker.utils

    lent_folders = _lent_folders(programs)
    variables = {
        "PATH": f"{sys.prefix}/bin:{SYSTEM}",
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        **(env or {}),
    }
    changes = [
        *(f"ENV {key}={value}" for key, value in variables.items()),
        f"LABEL {BORROWS}={':'.join(lent_folders)}",
    ]
    repository, tag = docker.utils.parse_repository_tag(name)
    tag = tag or "latest"
    old_images = [image for image in client.images.list() if image.tags == [f"{repository}:{tag}"]]
    with (
        tempfile.NamedTemporaryFile(suffix=".tar") as tar_file,
        explain_docker_errors(f"making image {name}"),
    ):
        with tarfile.open(fileobj=tar_file, mode="w") as tar:
            if programs:
                tar.add(programs, arcname=".")
            else:
                _skeleton(tar)
        tar_file.flush()
        answer = client.api.import_image_from_file(tar_file.name, repository, tag, changes=changes)
    if "error" in answer:
        raise LocalError(
            f"making image {name} failed: {program()} said: {answer.strip().splitlines()[-1]}"
        )
    with explain_docker_errors(f"making image {name}"):
        # podman tags an import `latest`, whatever the tag is.
        client.api.tag(json.loads(answer.strip().splitlines()[-1])["status"], repository, tag)
        image_id = str(client.images.get(name).id)
    for image in old_images:
        # Remove the old image, or each build would leave one without a name; Docker keeps one that
        # is in use.
        with contextlib.suppress(docker.errors.APIError):
            if image.id != image_id:
                client.images.remove(image.id)
    return image_id


def usable_here(client: Any) -> str:
    """The name of an image that borrows from this machine, made if it is missing or borrows another
    Python.
    """
    image = present_image(client, NAME)
    lent_folders = ((image.labels or {}).get(BORROWS) or "") if image else ""
    if lent_folders != ":".join(_lent_folders(None)):
        make(client, NAME)
    return NAME


def _lent_folders(programs: Path | None) -> list[str]:
    return sorted({sys.prefix, sys.base_prefix, *(() if programs else ("/usr",))})


def _skeleton(tar: tarfile.TarFile) -> None:
    """The root folder without programs: folders, links into /usr as on this machine, users,
    names.
    """
    for folder in FOLDERS:
        entry = tarfile.TarInfo(folder)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder.endswith("tmp") else 0o755
        tar.addfile(entry)
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
            tar.addfile(entry)
        elif os.path.isdir(f"/{name}"):
            raise LocalError(
                f"/{name} of this machine is a folder, not a link into /usr, so its programs cannot"
                " be lent: give a root folder with --from"
            )
    for path, text in (
        ("etc/passwd", USERS),
        ("etc/group", GROUP),
        ("etc/nsswitch.conf", "hosts: files dns\n"),
    ):
        entry = tarfile.TarInfo(path)
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text.encode()))
    for path in ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if os.path.isfile(path):
            tar.add(os.path.realpath(path), arcname=path[1:])
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        tar.add(alternatives, arcname="etc/alternatives")
