"""Write a folder atomically, with a journal for resuming a killed conversion.

A journal line is written after the bytes that it describes, and removed before they are. It records
the machine's boot too, since bytes that were not flushed to disk before a reboot may be lost.

A new target appears by one rename. In a target that exists, `.moving` lists its files from before
the first change until after the last one; while it is there and the marker is not, the target is no
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smtrain.core.errors import CheckpointError, first_line
from smtrain.core.files import disk_sentence, hold, parse_json, sync_folder, write_atomically
from smtrain.worker.checkpoint.conversion_plan import written_by
from smtrain.worker.checkpoint.storage import UnreachableError

PARTIAL = ".partial"
JOURNAL = ".smtrain-journal"
_MOVING = ".moving"


class Staging:
    """A folder to write into, next to or in the target, and the jobs that a killed run of the same
    work had done.
    """

    def __init__(self, target: Path, fingerprint: str, marker: str, durable: bool = True) -> None:
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; give a folder to write to.")
        self.target, self._marker, self._durable = target, marker, durable
        self._work, self._header = fingerprint, f"{fingerprint} {_boot()}"
        self._exists, self._published = target.is_dir(), False
        # inside a folder that exists, since that may be a mount such as /opt/ml/model, and renames
        # stay on one disk
        self.folder = (
            target / PARTIAL if self._exists else target.parent / f".{target.name}{PARTIAL}"
        )
        # Listed before they are made, nearest first, so that `close` can remove them in this order.
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        # The lock before anything is read: another process may be writing these files.
        self._journal = self._open()
        self._lock = threading.Lock()
        self._files: dict[str, int] | None = None
        self._older: list[str] = []
        """Files that an earlier conversion wrote into the target."""
        try:
            self.done = self._resume()
        except BaseException:
            os.close(self._journal)
            raise

    def _open(self) -> int:
        if (handle := hold(self.folder / JOURNAL)) is not None:
            return handle
        raise CheckpointError(
            f"another process is writing to {self.target}; wait until it has ended."
        )

    @property
    def complete(self) -> bool:
        """Whether a run was killed while publishing, so that only publishing is left to do."""
        return self._files is not None

    def note(self, key: str, result: Sequence[int]) -> None:
        """Record a finished job, after its bytes are written."""
        with self._lock:
            os.write(self._journal, (json.dumps([key, list(result)]) + "\n").encode())

    def publish(self, replaces: Sequence[str] = ()) -> None:
        """Make the target appear: by one rename if it is new, else file by file, the marker last.

        In an old target, the marker is removed first, then the files that it lists or that match
        `replaces`, so that readers who check the marker never see a mixture.
        """
        if not self._exists:
            # Flush the folders before the rename: after a power cut the target's name must not lead
            # to a folder without its files.
            for path in [self.folder, *self.folder.rglob("*")]:
                if path.is_dir():
                    self._sync(path)
            os.rename(self.folder, self.target)
            self._published = True
            (self.target / JOURNAL).unlink(missing_ok=True)  # kept until now for its lock
            self._sync(self.target.parent)
            return
        if self._files is None:
            # Every error that can be foreseen comes before `.moving`: from then on only the same
            # command can complete the target.
            self._refuse_blocked(files := self._list_files())
            marker = self.target / self._marker
            self._older = sorted(
                {*self._older, *(written_by(marker.read_bytes()) if marker.is_file() else ())}
            )
            # Before the first change of the target, or a kill would leave a mixture without a mark.
            self._record_moving(files)
            self._files = files
        self._move(self._files, replaces)
        os.ftruncate(self._journal, 0)  # its files are no longer here, and `.moving` is about to go
        (self.folder / _MOVING).unlink()
        self._published = True

    def close(self, keep: bool) -> None:
        """Release the folder and, unless `keep` (for the next run to resume), remove it.

        `.moving` stays as long as the target is not whole.
        """
        try:
            if not keep and (self._exists or not self._published):
                with suppress(OSError):
                    if not self._clear():
                        (self.folder / JOURNAL).unlink()
                        self.folder.rmdir()
                        for parent in [] if self._published else self._made:
                            parent.rmdir()
        finally:
            os.close(self._journal)  # last: the next owner of the lock relies on the folder

    def _resume(self) -> dict[str, list[int]]:
        """Job -> its result, from a killed run of the same work; leftovers of other work are
        removed.
        """
        moving = _read_moving(self.folder)
        if moving is not None:
            # The old manifest that listed these files may be gone, so only `.moving` still has
            # them.
            self._older = moving["older"]
            if (
                # The boot is left out here: after a reboot the same command may still complete the
                # target.
                moving["header"].split(" ")[0] != self._work
                and not (self.target / self._marker).exists()
            ):
                raise CheckpointError(
                    f"{self.target} is left over from another conversion that was interrupted; run"
                    " that again, or delete it."
                )
            if (
                # With the boot: files of an earlier boot may lack bytes that were never flushed.
                moving["header"] == self._header
                and moving["files"]
                and self._has_files(moving["files"])
            ):
                self._files = moving["files"]
                return {}
        # If `.moving` lists files, some may have left this folder, so the journal no longer holds.
        if moving is None or not moving["files"]:
            finished_jobs = self._read()
            if finished_jobs is not None:
                return finished_jobs
        self._clear()
        if self._exists:
            (self.target / JOURNAL).unlink(
                missing_ok=True
            )  # of a run killed right after its rename
        os.write(self._journal, f"{self._header}\n".encode())
        return {}

    def _read(self) -> dict[str, list[int]] | None:
        text = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        header, *lines = text.split(b"\n")
        if header.decode(errors="replace") != self._header or not lines:
            return None
        results, size = {}, len(header) + 1
        for line in lines[:-1]:  # a line without newline was cut off
            try:
                key, result = parse_json(line)
            except ValueError:  # the disk was full
                break
            results[key] = result
            size += len(line) + 1
        os.ftruncate(self._journal, size)
        return results

    def _clear(self) -> bool:
        """Empty the folder and its journal; returns True if the target is still not a whole
        checkpoint.
        """
        os.ftruncate(
            self._journal, 0
        )  # first: whenever this is killed, the journal must not list bytes that are gone
        was_interrupted = (self.folder / _MOVING).exists() and not (
            self.target / self._marker
        ).exists()
        # Never without `.moving` while the target is a mixture: it is rewritten, not removed.
        if was_interrupted:
            self._record_moving({})
        else:
            (self.folder / _MOVING).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (JOURNAL, _MOVING):
                path.unlink()
        return was_interrupted

    def _record_moving(self, files: dict[str, int]) -> None:
        """Record that all of `files` are in the target or here; none: the target lacks some that
        are lost.
        """
        content = json.dumps({"header": self._header, "files": files, "older": self._older})
        write_atomically(self.folder / _MOVING, content, sync=self._durable)

    def _list_files(self) -> dict[str, int]:
        # `write_atomically` killed half-way leaves a file named after `.moving`.
        paths = {
            p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*") if p.is_file()
        }
        internal_files = [
            file for file in paths if file in (JOURNAL, _MOVING) or file.startswith(f".{_MOVING}.")
        ]
        return {
            file: path.stat().st_size
            for file, path in sorted(paths.items())
            if file not in internal_files
        }

    def _refuse_blocked(self, files: dict[str, int]) -> None:
        """Raises CheckpointError, before any change of the target, if something is in the way of a
        file.
        """
        for file in files:
            path = self.target / file
            parents = [parent for parent in path.parents if self.target in parent.parents]
            for obstacle in [
                p for p in (path, *parents) if p.exists() and p.is_dir() == (p == path)
            ]:
                raise CheckpointError(
                    f"{obstacle} is in the way of {path}; move it away, or write to another folder."
                )

    def _has_files(self, files: dict[str, int]) -> bool:
        """Whether each file is in one of the two folders; the user may have deleted some of the
        target.
        """

        def size(path: Path) -> int:
            return path.stat().st_size if path.is_file() else -1

        return all(
            n in (size(self.folder / file), size(self.target / file)) for file, n in files.items()
        )

    def _move(self, files: dict[str, int], replaces: Sequence[str]) -> None:
        """Move the files into the target; a killed run repeats this, so every step may be done
        twice.
        """
        # First the old marker goes, with `durable` also from the disk: a power cut must not bring
        # it back next to new files.
        if (self.folder / self._marker).exists():  # else the target's marker is the new one
            (self.target / self._marker).unlink(missing_ok=True)
            self._sync(self.target)
        older = {path for file in self._older if (path := self.target / file).is_file()}
        for path in older | {path for pattern in replaces for path in self.target.glob(pattern)}:
            for old in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
                # A file with a successor stays: `os.replace` swaps it in one step, and a rerun may
                # find the new one in its place.
                if old.relative_to(self.target).as_posix() not in files:
                    old.unlink()
            for folder in [
                path,
                *(parent for parent in path.parents if self.target in parent.parents),
            ]:
                if folder.is_dir() and not any(p.is_file() for p in folder.rglob("*")):
                    shutil.rmtree(folder)
        for file in files:
            if file != self._marker and (self.folder / file).exists():
                (self.target / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.folder / file, self.target / file)
        # With `durable`, all names reach the disk before the marker does.
        for folder in {(self.target / file).parent for file in files}:
            self._sync(folder)
        if (self.folder / self._marker).exists():
            os.replace(self.folder / self._marker, self.target / self._marker)
            self._sync(self.target)

    def _sync(self, folder: Path) -> None:
        if self._durable:
            sync_folder(folder)


@contextmanager
def staging_folder(
    target: Path, fingerprint: str, marker: str, durable: bool = True
) -> Iterator[Staging]:
    """A staging folder, removed after an error, and kept for the next run after an interrupt or a
    store's failure.

    `marker` is the file by which readers know that the target is whole. With `durable` the renames
    reach the disk before it ends; the files must have been flushed before.
    """
    staging = Staging(target, fingerprint, marker, durable)
    try:
        yield staging
    # Before its base class Exception: the work has no fault if a store fails, and can resume.
    except UnreachableError:
        staging.close(keep=True)
        raise
    except Exception:
        # Half published, the target is a mixture that only these files can complete.
        staging.close(keep=staging.complete)
        raise
    except BaseException:
        staging.close(keep=True)
        raise
    staging.close(keep=False)


def present(folder: Path) -> dict[str, int]:
    """Sizes of all files of a target except staged ones."""
    paths = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    return {
        name: path.stat().st_size
        for name, path in paths.items()
        if not name.startswith(f"{PARTIAL}/") and name != JOURNAL
    }


def is_unfinished(folder: Path, marker: str) -> bool:
    """Whether a conversion was killed while it put its files into `folder`."""
    return (folder / PARTIAL / _MOVING).exists() and not (folder / marker).exists()


def _read_moving(folder: Path) -> dict[str, Any] | None:
    try:
        moving = parse_json((folder / _MOVING).read_text())
        return {
            "header": str(moving["header"]),
            "files": dict(moving["files"]),
            "older": list(moving["older"]),
        }
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # damaged by a power cut: its owner is unknown
        return {"header": "", "files": {}, "older": []}


def _boot() -> str:
    """An id that changes at every boot; if the system has none, at every call, so that nothing is
    relied on.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def not_written(target: Path | str, error: OSError) -> str:
    """The sentence for a target that cannot be written."""
    return (
        disk_sentence(error, target)
        or f"{target} cannot be written ({first_line(error)}); name another folder"
    )
