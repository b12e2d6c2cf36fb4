"""FastFile: a read-only FUSE mount of a channel that fetches what is read, when it is read.

    python -m smtrain.local.fastfile SPEC.json      (AWS_ENDPOINT_URL and keys in the environment)

Each open file is one streaming GET; reading on continues it, a jump reopens it at the new place.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

# Reading ahead by the kernel arrives slightly out of order; a gap this small is read over, not jumped.
SKIP_BYTES = 1 << 20


class _OpenFile:
    """A place in one object's stream."""

    def __init__(self) -> None:
        self.body: Any = None
        self.at = 0
        self.lock = threading.Lock()

    def close(self) -> None:
        if self.body is not None:
            self.body.close()
            self.body = None


def operations(client: Any, bucket: str, entries: list[list[Any]]) -> Any:
    """The mount's file system over `entries`, [key, path, size, modified] each."""
    import mfusepy

    class ChannelFiles(mfusepy.Operations):  # type: ignore[misc]
        use_ns = False

        def __init__(self) -> None:
            self.files: dict[str, tuple[str, int, float]] = {}
            self.folders: dict[str, set[str]] = {"/": set()}
            for key, path, size, modified in entries:
                name = "/" + path
                self.files[name] = (key, size, modified)
                while name != "/":
                    parent = os.path.dirname(name)
                    self.folders.setdefault(parent, set()).add(os.path.basename(name))
                    name = parent
            self.opened: dict[int, _OpenFile] = {}
            self.numbers = itertools.count(1)

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            if path in self.folders:
                return {"st_mode": stat.S_IFDIR | 0o555, "st_nlink": 2}
            if path not in self.files:
                raise mfusepy.FuseOSError(errno.ENOENT)
            _, size, modified = self.files[path]
            times = dict.fromkeys(("st_mtime", "st_atime", "st_ctime"), modified)
            return {"st_mode": stat.S_IFREG | 0o444, "st_nlink": 1, "st_size": size, **times}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *sorted(self.folders[path])]

        def open(self, path: str, flags: int) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise mfusepy.FuseOSError(errno.EROFS)
            number = next(self.numbers)
            self.opened[number] = _OpenFile()
            return number

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            key, total, _ = self.files[path]
            size = min(size, total - offset)
            if size <= 0:
                return b""
            place = self.opened[fh]
            with place.lock:
                if place.body is None or not place.at <= offset <= place.at + SKIP_BYTES:
                    place.close()
                    reply = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={offset}-")
                    place.body, place.at = reply["Body"], offset
                if offset > place.at:
                    place.body.read(offset - place.at)
                data: bytes = place.body.read(size)
                place.at = offset + len(data)
                return data

        def release(self, path: str, fh: int) -> int:
            place = self.opened.pop(fh, None)
            if place:
                place.close()
            return 0

    return ChannelFiles()


def main() -> None:
    try:
        import boto3
        import mfusepy
        from botocore.config import Config
    except (ImportError, OSError) as error:
        sys.exit(f"mfusepy or libfuse is missing ({error}); install them: pip install mfusepy, apt-get install fuse3")
    spec = json.loads(Path(sys.argv[1]).read_text())
    # A ranged answer has no checksum of its own to validate, and a proxy has no business here.
    config = Config(proxies={}, max_pool_connections=64, response_checksum_validation="when_required")
    client = boto3.client("s3", config=config)
    mfusepy.FUSE(
        operations(client, spec["bucket"], spec["entries"]),
        spec["mountpoint"],
        foreground=True,
        ro=True,
        fsname="smtrain-fastfile",
    )


if __name__ == "__main__":
    main()
