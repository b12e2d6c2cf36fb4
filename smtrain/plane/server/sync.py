"""A host's checkpoint folder and its S3 prefix: down once at the start, then up whatever changes, for ever."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.protocol.uris import split_uri
from smtrain.plane.server import artifacts
from smtrain.plane.server.artifacts import upload
from smtrain.plane.server.channels import download_to

if TYPE_CHECKING:
    from smtrain.plane.server.logstream import HostLog

POLL_SECONDS = 1.0
Seen = tuple[int, int, int]
"""Size, mtime in ns, inode."""


class CheckpointSync:
    """Keeps `uri` equal to what this host wrote: new and changed files go up, files it had and lost are deleted.

    While the job runs, a file goes up once two looks in a row saw the same size and time; files go in the order they
    were written, so a manifest that a script writes last arrives last. A script deletes a checkpoint when a newer one
    is whole on the disks of all hosts, and whatever is killed then must leave one of the two in S3. So what was deleted
    here is deleted there only once there is a moment after it from which everything has arrived: all that lay on the
    disk of any host then was seen in one look, stayed as it was until it was sent, and is in S3.
    """

    def __init__(self, client: Any, uri: str, folder: Path, hosts: list[CheckpointSync] | None = None) -> None:
        """`hosts` are the syncs of all hosts of the job, to which this one will be added."""
        self.client, self.folder = client, folder
        self.hosts = [self] if hosts is None else hosts
        self.arrived = 0.0
        """What lay here at any moment from `since` to this one (ns since 1970) is in S3."""
        self.since = 0.0
        """The end of the first look after which no file has gone before it had arrived."""
        self.bucket, prefix = split_uri(uri)
        self.prefix = prefix.rstrip("/") + "/" if prefix else ""
        self._ml, self._log = folder, None  # type: Path, HostLog | None
        self._tree = artifacts.Tree()
        self._synced: dict[str, Seen] = {}
        self._before: dict[str, Seen] = {}
        self._gone: dict[str, int] = {}  # since which look
        self._too_large: OSError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def see_as(self, ml: Path, log: HostLog) -> None:
        """Follow links as the host with this /opt/ml does, and name in its log what is left out."""
        self._ml, self._log = ml, log

    def pull(self) -> None:
        """Copy the prefix into the folder. A prefix that holds nothing yet is a fresh start.

        Another job may write to it and delete its old checkpoints meanwhile: what is gone by its turn is passed over.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        for page in pages:
            for item in page.get("Contents", []):
                name = item["Key"][len(self.prefix) :]
                if not name or name.endswith("/"):
                    continue
                try:
                    download_to(self.client, self.bucket, item["Key"], self.folder, name, "the checkpoints")
                except self.client.exceptions.ClientError as error:
                    if error.response["Error"]["Code"] not in ("404", "NoSuchKey"):
                        raise
        self._synced = self._look()

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """End the watching and bring up what is left. The host's processes must be gone.

        Raises what S3 said, and OSError for a file that has no room there, when all others are up.
        """
        self.abandon()
        self.push(settled=True)
        if self._log and (said := self._tree.sentences(f"/opt/ml/{self.folder.relative_to(self._ml).as_posix()}")):
            self._log.write(said)
        if self._too_large:
            raise self._too_large

    def abandon(self) -> None:
        """End the watching and leave what is not up yet, as when the machine is lost."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def push(self, settled: bool) -> None:
        """One look and what follows from it; with `settled` every file counts as finished."""
        began, now = time.time_ns(), self._look()
        looked = time.time_ns()
        if not self._tree.stood_still():
            self.since = math.inf  # a checkpoint may have moved past a walk that saw neither it nor the one before
        elif self.since == math.inf or self._lost(now):
            self.since = looked
        self._gone = {name: self._gone.get(name, looked) for name in self._synced.keys() - now.keys()}
        changed = [name for name, seen in now.items() if self._synced.get(name) != seen]
        for name in sorted(changed, key=lambda name: now[name][1]):
            if not settled and self._before.get(name) != now[name]:
                break  # what was written later must not overtake what is still being written
            # Gone by now, it is missed at the next look; changed during the upload, it is sent again after that.
            with contextlib.suppress(FileNotFoundError):
                if self._send(name):
                    self._synced[name] = now[name]
        self._before = now
        waiting = [seen[1] - 1 for name, seen in now.items() if self._synced.get(name) != seen]
        self.arrived = math.inf if settled else min([began, *waiting])
        self.delete()

    def _send(self, name: str) -> bool:
        """Bring one file up; False if it cannot be read, which the tree then says, or has no room in S3."""
        path = self._tree.files[name]
        try:
            upload(self.client, path, self.bucket, self.prefix + name)
        except FileNotFoundError:
            raise
        except OSError as error:  # of this file: what S3 and the network say are errors of botocore
            if error.errno == errno.ENOSPC:
                self._too_large = error
            else:
                self._tree.leave_out(name, error)
            return False
        return True

    def _lost(self, now: dict[str, Seen]) -> bool:
        """Whether a file of the look before went, or was written over, before it had arrived.

        A file of the same size, time and inode under another name was renamed: an inode alone is soon used again. One
        that changes and was never sent is still being written.
        """
        there = set(now.values())
        return any(
            self._synced.get(name) != seen and seen not in there and not (name in now and name not in self._synced)
            for name, seen in self._before.items()
        )

    def delete(self) -> None:
        """Delete in S3 what is gone here and no longer needed there; the newest files first, as manifests are."""
        since = max(sync.since for sync in self.hosts)
        arrived = min(sync.arrived for sync in self.hosts)
        if since > arrived:
            return
        for name in sorted(self._gone, key=lambda name: self._synced[name][1], reverse=True):
            if self._gone[name] <= arrived:
                self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)
                del self._synced[name], self._gone[name]

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                self.push(settled=False)
            except Exception as error:
                # The next look tries again, and the last one, in finish(), fails the job loudly.
                print(f"checkpoint sync of {self.folder}: {error}", flush=True)

    def _look(self) -> dict[str, Seen]:
        """What there is of every regular file, by relative name."""
        found: dict[str, Seen] = {}
        self._tree, self._too_large = artifacts.walk(self._ml, self.folder, self.prefix), None
        for name, path in self._tree.files.items():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
        return found
