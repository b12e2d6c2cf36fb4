"""Whether jobs can run in containers here, and the image that the tests use: made of this machine's own programs."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

IMAGE = f"smtrain-tiny:test-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"


@cache
def missing() -> str | None:
    """Why not, for a skip; None where a container of the image runs. Makes the image."""
    from smtrain.errors import LocalError
    from smtrain.local.containers.daemon import borrowed, connect
    from smtrain.local.containers.job import LENT
    from smtrain.local.containers.tiny import make

    try:
        client = connect()
        if not client.images.list(IMAGE):
            make(client, IMAGE)
        lent = borrowed(client.images.get(IMAGE), LENT)
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
    from smtrain.local.containers.daemon import connect

    return connect()


def left(home: Path) -> list[str]:
    """What the control plane of a home has in Docker."""
    from smtrain.local.containers.daemon import HOME
    from smtrain.local.containers.leftovers import containers, networks

    found = client()
    return [one.name for one in (*containers(found, HOME, str(home)), *networks(found, HOME, str(home)))]
