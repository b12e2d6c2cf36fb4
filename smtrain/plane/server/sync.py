"""A host's checkpoint folder and its S3 prefix: downloaded once at the start, then changes are
uploaded.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.protocol.uris import objects_at, split_uri
from smtrain.plane.server import artifacts
from smtrain.plane.server.artifacts import upload
from smtrain.plane.server.channels import download_to

if TYPE_CHECKING:
    from smtrain.plane.server.logstream import HostLog

POLL_SECONDS = 1.0
FileStat = tuple[int, int, int]
"""Size, mtime in ns, inode."""


class CheckpointSync:
    """Keeps `uri` equal to the host's folder: uploads new and changed files, deletes the deleted
    ones.

    While the job runs, a file is uploaded once two scans in a row saw the same size and time; files
    go in the order they were written, so a manifest that a script writes last arrives last. A
    script deletes a checkpoint when a newer one is complete on the disks of all hosts, and a kill
    at any moment must leave one of the two in S3. So a deletion is repeated in S3 only after
    everything that was on any host's disk at a later moment has arrived: it was seen in one scan,
    unchanged until it was sent, and is in S3.
    """

    def __init__(
        self, client: Any, uri: str, folder: Path, hosts: list[CheckpointSync] | None = None
    ) -> None:
        """`hosts` are the syncs of all hosts of the job; the caller adds this one."""
        self.client, self.folder = client, folder
        self.hosts = [self] if hosts is None else hosts
        self.arrived = 0.0
        """Files that were here at any moment from `since` to this one (ns since 1970) are in S3."""
        self.since = 0.0
        """The end of the first scan after which no file disappeared before it had arrived."""
        self.bucket, prefix = split_uri(uri)
        self.prefix = prefix.rstrip("/") + "/" if prefix else ""
        self._ml, self._log = folder, None  # type: Path, HostLog | None
        self._tree = artifacts.Tree()
        self._synced: dict[str, FileStat] = {}
        self._before: dict[str, FileStat] = {}
        self._gone: dict[str, int] = {}  # since which scan
        self._too_large: OSError | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def see_as(self, ml: Path, log: HostLog) -> None:
        """Follow links as the host with this /opt/ml does, and name the files left out in its
        log.
        """
        self._ml, self._log = ml, log

    def pull(self) -> None:
        """Download the prefix, which may be empty.

        Another job may delete old checkpoints meanwhile: objects that have disappeared are skipped.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for item in objects_at(self.client.list_objects_v2, f"s3://{self.bucket}/{self.prefix}"):
            name = item["Key"][len(self.prefix) :]
            if not name or name.endswith("/"):
                continue
            try:
                download_to(
                    self.client, self.bucket, item["Key"], self.folder, name, "the checkpoints"
                )
            except self.client.exceptions.ClientError as error:
                if error.response["Error"]["Code"] not in ("404", "NoSuchKey"):
                    raise
        self._synced = self._scan()

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Stop watching and upload the rest. The host's processes must have ended.

        Raises S3's error, or, after all other files, OSError for one that has no room there.
        """
        self.abandon()
        self.push(is_settled=True)
        if self._log and (
            lines := self._tree.sentences(f"/opt/ml/{self.folder.relative_to(self._ml).as_posix()}")
        ):
            self._log.write(lines)
        if self._too_large:
            raise self._too_large

    def abandon(self) -> None:
        """Stop watching without uploading the rest, as if the machine is lost."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def push(self, is_settled: bool) -> None:
        """Scan once and upload; with `is_settled` every file counts as finished."""
        began, current_files = time.time_ns(), self._scan()
        scan_end = time.time_ns()
        if not self._tree.stood_still():
            self.since = (
                math.inf
            )  # a checkpoint may have moved while the walk missed both its old and its new place
        elif self.since == math.inf or self._has_lost_file(current_files):
            self.since = scan_end
        self._gone = {
            name: self._gone.get(name, scan_end)
            for name in self._synced.keys() - current_files.keys()
        }
        changed_names = [
            name for name, file_stat in current_files.items() if self._synced.get(name) != file_stat
        ]
        for name in sorted(changed_names, key=lambda name: current_files[name][1]):
            if not is_settled and self._before.get(name) != current_files[name]:
                break  # later files must not overtake one still being written
            # The next scan notes a file that has disappeared, and sends one again that changed
            # during the upload.
            with contextlib.suppress(FileNotFoundError):
                if self._send(name):
                    self._synced[name] = current_files[name]
        self._before = current_files
        pending_times = [
            file_stat[1] - 1
            for name, file_stat in current_files.items()
            if self._synced.get(name) != file_stat
        ]
        self.arrived = math.inf if is_settled else min([began, *pending_times])
        self.delete()

    def _send(self, name: str) -> bool:
        """Upload one file; False if it cannot be read, which the tree records, or has no room in
        S3.
        """
        path = self._tree.files[name]
        try:
            upload(self.client, path, self.bucket, self.prefix + name)
        except FileNotFoundError:
            raise
        except OSError as error:  # of this file: errors of S3 and the network are botocore's
            if error.errno == errno.ENOSPC:
                self._too_large = error
            else:
                self._tree.leave_out(name, error)
            return False
        return True

    def _has_lost_file(self, current_files: dict[str, FileStat]) -> bool:
        """Whether a file of the last scan was deleted or overwritten before it had arrived.

        A file of the same size, time and inode under another name was renamed; an inode by itself
        is soon reused. A changed file that was never sent is still being written.
        """
        current_stats = set(current_files.values())
        return any(
            self._synced.get(name) != file_stat
            and file_stat not in current_stats
            and not (name in current_files and name not in self._synced)
            for name, file_stat in self._before.items()
        )

    def delete(self) -> None:
        """Repeat deletions in S3 once it is safe; the newest files first, as manifests are."""
        since = max(sync.since for sync in self.hosts)
        arrival_ns = min(sync.arrived for sync in self.hosts)
        if since > arrival_ns:
            return
        for name in sorted(self._gone, key=lambda name: self._synced[name][1], reverse=True):
            if self._gone[name] <= arrival_ns:
                self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)
                del self._synced[name], self._gone[name]

    def _watch(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                self.push(is_settled=False)
            except Exception as error:
                # The next scan retries; the last one, in finish(), fails the job.
                print(f"checkpoint sync of {self.folder}: {error}", flush=True)

    def _scan(self) -> dict[str, FileStat]:
        """Size, time and inode of every regular file, by relative name."""
        files: dict[str, FileStat] = {}
        self._tree, self._too_large = artifacts.walk(self._ml, self.folder, self.prefix), None
        for name, path in self._tree.files.items():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
        return files
