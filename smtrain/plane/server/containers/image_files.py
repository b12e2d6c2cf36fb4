"""What an image has below /opt/ml, such as a program in /opt/ml/code: hosts get it, as on SageMaker.

There only some folders of /opt/ml are mounted, and hide the image's; here all of /opt/ml is the host's own folder.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

from smtrain.plane.docker import plainly
from smtrain.plane.server.links import resolved

MOUNTED = ("input", "model", "output", "checkpoints", ".tmp")


def fetch(client: Any, image: Any, labels: dict[str, str], packed: Path) -> Path | None:
    """Pack the image's /opt/ml into the file `packed`; None where the image has none.

    Raises `LocalError` where Docker refuses.
    """
    import docker.errors

    with plainly("looking for what the image has below /opt/ml"):
        made = client.api.create_container(image.id, ["none"], labels=labels)["Id"]
        try:
            pieces, _ = client.api.get_archive(made, "/opt/ml")
            with open(packed, "wb") as file:
                for piece in pieces:
                    file.write(piece)
        except docker.errors.NotFound:
            return None
        finally:
            client.api.remove_container(made, force=True, v=True)
    return packed


def lay(packed: Path, ml: Path) -> None:
    """Put it into a host's folder: files, folders and links, but for what the service's own folders hide."""
    with tarfile.open(packed) as archive:
        for member in archive:
            name = PurePosixPath(member.name).relative_to("ml")
            if not name.parts or name.parts[0] in MOUNTED or ".." in name.parts:
                continue
            parent = resolved(ml, ml / name.parent)
            to = parent / name.name if parent and parent.is_dir() else None
            if to is None or to.is_symlink():
                continue
            if member.isdir():
                to.mkdir(exist_ok=True)
            elif to.exists():
                continue
            elif member.issym():
                os.symlink(member.linkname, to)
            elif source := archive.extractfile(member):
                with source, open(to, "xb") as file:
                    shutil.copyfileobj(source, file)
                to.chmod(member.mode & 0o777)
