"""FastFile: a read-only FUSE mount of each channel that fetches bytes when they are read.

    python -m smtrain.plane.server.fastfile SPEC.json      (AWS_ENDPOINT_URL and keys in the environment)

One process per host imports boto3 and forks for each channel. It writes their process ids to stdout
as one line, {"NAME": PID}; they end with it.

Each open file is one streaming GET while it is read sequentially. A jump, as in random access to a
memory map, fetches one block; sequential reads from there start a new stream.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Any

from smtrain.plane.server.namespaces import PR_SET_PDEATHSIG, libc

# The kernel's read-ahead arrives slightly out of order: a gap this small is read, not jumped over.
SKIP_BYTES = 1 << 20
# A jump fetches two blocks of this size, aligned: the kernel reads pieces of 128 KiB around the
# place, in any order, and a request costs more than its bytes.
BLOCK_BYTES = 1 << 19


class _OpenFile:
    """The position in an object's stream, and the block of the last jump."""

    def __init__(self) -> None:
        self.body: Any = None
        self.at = 0
        self.block = b""
        self.block_at = 0
        self.lock = threading.Lock()

    def in_block(self, offset: int, size: int) -> bool:
        return self.block_at <= offset and offset + size <= self.block_at + len(self.block)

    def follows(self, offset: int) -> bool:
        """Whether a read here is probably sequential: at the start of the file or the end of a
        block.
        """
        return offset in (0, self.block_at + len(self.block))

    def close(self) -> None:
        if self.body is not None:
            self.body.close()
            self.body = None


def operations(client: Any, bucket: str, entries: list[list[Any]]) -> Any:
    """The mount's file system over `entries`, [key, path, size, modified] each."""
    import mfusepy

    def get(key: str, span: str) -> Any:
        return client.get_object(Bucket=bucket, Key=key, Range=span)["Body"]

    class ChannelFiles(mfusepy.Operations):  # type: ignore[misc]
        use_ns = False

        def __init__(self) -> None:
            self.files: dict[str, tuple[str, int, float]] = {}
            self.folders: dict[str, set[str]] = {"/": set()}
            for key, path, size, modified_at in entries:
                name = "/" + path
                self.files[name] = (key, size, modified_at)
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
            _, size, modified_at = self.files[path]
            times = dict.fromkeys(("st_mtime", "st_atime", "st_ctime"), modified_at)
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
                if place.in_block(offset, size):
                    start = offset - place.block_at
                    return place.block[start : start + size]
                if place.body is None or not place.at <= offset <= place.at + SKIP_BYTES:
                    if not place.follows(offset):
                        start = offset // BLOCK_BYTES * BLOCK_BYTES
                        last = max(offset + size, start + 2 * BLOCK_BYTES) - 1
                        place.block, place.block_at = (
                            get(key, f"bytes={start}-{last}").read(),
                            start,
                        )
                        return place.block[offset - start : offset - start + size]
                    place.close()
                    place.body, place.at = get(key, f"bytes={offset}-"), offset
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
        import mfusepy  # noqa: F401 - loads libfuse
        from botocore.config import Config
    except (ImportError, OSError) as error:
        sys.exit(
            f"mfusepy or libfuse is missing ({error}); install them: pip install mfusepy, apt-get"
            " install fuse3"
        )
    channels = json.loads(Path(sys.argv[1]).read_text())
    # A ranged answer has no checksum to validate; a proxy would not find 127.0.0.1.
    config = Config(
        proxies={}, max_pool_connections=64, response_checksum_validation="when_required"
    )
    client = boto3.client("s3", config=config)  # connects lazily, so the forks share no connection
    processes = {name: _fork(client, channel) for name, channel in channels.items()}
    print(json.dumps(processes), flush=True)
    for _ in processes:
        os.wait()


def _fork(client: Any, channel: dict[str, Any]) -> int:
    """Serve a channel, {bucket, entries, mountpoint, everyone, log}, in a process that ends with
    ours; gives its id.
    """
    parent = os.getpid()
    if pid := os.fork():
        return pid
    status = 1
    try:
        libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            log = os.open(channel["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            serve(client, channel)
            status = 0
    except BaseException as error:
        print(error or type(error).__name__, file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def serve(client: Any, channel: dict[str, Any]) -> None:
    """Mount a channel and serve it until it is unmounted."""
    import mfusepy

    mfusepy.FUSE(
        operations(client, channel["bucket"], channel["entries"]),
        channel["mountpoint"],
        foreground=True,
        ro=True,
        **({"allow_other": True} if channel.get("everyone") else {}),
        fsname="smtrain-fastfile",
    )


if __name__ == "__main__":
    main()
