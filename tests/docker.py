"""Whether jobs can run in containers here, and the image that the tests use: made of this machine's
own programs.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

IMAGE = f"smtrain-tiny:test-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"


@cache
def missing() -> str | None:
    """The reason for a skip; None if a container of the image runs. Makes the image."""
    from smtrain.core.errors import LocalError
    from smtrain.plane.docker import LENT_FOLDERS, borrowed_folders, connect
    from smtrain.plane.server.containers.scratch_image import make

    try:
        client = connect()
        if not client.images.list(IMAGE):
            make(client, IMAGE)
        lent = borrowed_folders(client.images.get(IMAGE), LENT_FOLDERS)
        volumes = {folder: {"bind": folder, "mode": "ro"} for folder in lent}
        made = client.containers.create(IMAGE, ["python", "-c", "import json"], volumes=volumes)
        try:
            made.start()
            assert made.wait()["StatusCode"] == 0, made.logs().decode(errors="replace")
        finally:
            made.remove(force=True)
    except LocalError as error:
        return str(error)
    except Exception as error:  # a daemon that answers and runs nothing, as in some sandboxes
        return f"Docker runs no container here: {error}"
    return None


def client() -> Any:
    """Docker's client."""
    from smtrain.plane.docker import connect

    return connect()


def left(home: Path) -> list[str]:
    """Containers and networks that the control plane of a home has in Docker."""
    from smtrain.plane.docker import HOME
    from smtrain.plane.server.containers.leftovers import containers, networks

    docker = client()
    return [
        one.name
        for one in (*containers(docker, HOME, str(home)), *networks(docker, HOME, str(home)))
    ]
