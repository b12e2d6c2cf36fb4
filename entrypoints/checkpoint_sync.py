"""The checkpoints of a pod: downloaded from S3 once at the start, then changes are uploaded.

A file is uploaded when two looks in a row saw the same size and time, in the order of their times,
so a manifest, which is written last, arrives last. A deletion is repeated in S3: training deletes a
checkpoint only after a newer one has arrived there (smtrain/worker/train/destination.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from s3_inputs import list_objects

POLL_SECONDS = 1.0


class CheckpointSync:
    """Keeps a prefix of S3 equal to a folder of this pod."""

    def __init__(self, client: Any, uri: str, folder: Path, say: Callable[[str], object]) -> None:
        self.client, self.folder, self._say = client, folder, say
        self.bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        self.prefix = prefix.rstrip("/") + "/"
        self._synced: dict[str, tuple[int, int]] = {}
        self._before: dict[str, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def pull(self) -> None:
        """Download the prefix, which may be empty; objects that disappear meanwhile are skipped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for key, name, _, _ in list_objects(self.client, self.bucket, self.prefix):
            path = self.folder / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                raise SystemExit(f"the key {key!r} points outside the folder of checkpoints")
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.client.download_file(self.bucket, key, str(path))
            except self.client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] not in ("404", "NoSuchKey"):
                    raise
        self._synced = self._scan()

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Stop looking, and upload the rest. The processes that write must have ended."""
        self._ended.set()
        with self._lock:
            self.push(is_settled=True)

    def push(self, *, is_settled: bool) -> None:
        """Look once and upload; with `is_settled` every file counts as finished."""
        files = self._scan()
        changed_names = [name for name, stat in files.items() if self._synced.get(name) != stat]
        for name in sorted(changed_names, key=lambda name: files[name][1]):
            if not is_settled and self._before.get(name) != files[name]:
                break  # later files must not overtake one still being written
            with contextlib.suppress(FileNotFoundError):
                self.client.upload_file(str(self.folder / name), self.bucket, self.prefix + name)
                self._synced[name] = files[name]
        self._before = files
        for name in sorted(self._synced.keys() - files.keys()):
            self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)
            del self._synced[name]

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            with self._lock:
                if self._ended.is_set():
                    return
                try:
                    self.push(is_settled=False)
                except Exception as error:
                    # The next look tries again; the last one, in finish(), fails the pod.
                    self._say(f"checkpoints could not be uploaded yet: {error}")

    def _scan(self) -> dict[str, tuple[int, int]]:
        """Size and time (ns) of every file, by its relative name."""
        files: dict[str, tuple[int, int]] = {}
        for path in self.folder.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file() and not path.is_symlink():
                    status = path.stat()
                    files[path.relative_to(self.folder).as_posix()] = (
                        status.st_size,
                        status.st_mtime_ns,
                    )
        return files
