"""A folder of files that appears whole or not at all, and a journal by which a killed conversion goes on.

The journal vouches for what lies beside it: a line is written after the bytes that it tells of, and taken back before
they go. It tells of the machine's boot too, since what was not flushed to disk before may be lost.

A new target appears by one rename. In a target that exists, `.moving` says from before its first change until after its
last one which files belong to it; while it is there and the marker is not, the target is no checkpoint.
"""

from __future__ import annotations

import fcntl
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
from smtrain.core.files import disk_sentence, sync_folder
from smtrain.worker.checkpoint.conversion_plan import written_by

PARTIAL = ".partial"
JOURNAL = ".smtrain-journal"
_MOVING = ".moving"


class Staging:
    """A folder to write into, beside or in the target, and what a killed run of the same work had done in it."""

    def __init__(self, target: Path, fingerprint: str, marker: str, durable: bool = True) -> None:
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; give a folder to write to.")
        self.target, self._marker, self._durable = target, marker, durable
        self._work, self._header = fingerprint, f"{fingerprint} {_boot()}"
        self._exists, self._published = target.is_dir(), False
        # inside of a folder that exists, since that may be a mount, as /opt/ml/model is
        self.folder = target / PARTIAL if self._exists else target.parent / f".{target.name}{PARTIAL}"
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = self._open()
        self._lock = threading.Lock()
        self._files: dict[str, int] | None = None
        self._older: list[str] = []
        """What an earlier conversion wrote into the target."""
        try:
            self.done = self._resume()
        except BaseException:
            os.close(self._journal)
            raise

    def _open(self) -> int:
        path = self.folder / JOURNAL
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(handle).st_ino:  # else its owner finished, and took it away
                return handle
        except OSError:
            pass
        os.close(handle)
        raise CheckpointError(f"another process is writing to {self.target}; wait until it has ended.")

    @property
    def complete(self) -> bool:
        """Everything was written by a run that was killed while it published, and only that is left to do."""
        return self._files is not None

    def note(self, key: str, result: Sequence[int]) -> None:
        """A job is done: its bytes are written."""
        with self._lock:
            os.write(self._journal, (json.dumps([key, list(result)]) + "\n").encode())

    def publish(self, replaces: Sequence[str] = ()) -> None:
        """Make the target appear: by one rename where it is new, else file by file, the marker last.

        Of what was there, the marker goes first and then files that it lists or that match the patterns `replaces`, so
        that readers who ask for the marker never meet a mixture.
        """
        if not self._exists:
            for path in [self.folder, *self.folder.rglob("*")]:
                if path.is_dir():
                    self._sync(path)
            os.rename(self.folder, self.target)
            self._published = True
            (self.target / JOURNAL).unlink(missing_ok=True)  # its lock was needed until now
            self._sync(self.target.parent)
            return
        if self._files is None:
            self._see_to_room(files := self._written())
            told = self.target / self._marker
            self._older = sorted({*self._older, *(written_by(told.read_bytes()) if told.is_file() else ())})
            self._tell_moving(files)
            self._files = files
        self._move(self._files, replaces)
        os.ftruncate(self._journal, 0)  # its files are not here any more, and `.moving` will not say so
        (self.folder / _MOVING).unlink()
        self._published = True

    def close(self, keep: bool) -> None:
        """Let go of the folder; unless `keep`, so that the next run goes on, nothing of it stays.

        But where the target is not whole, what says so stays.
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
            os.close(self._journal)  # last: whoever gets the lock may count on the folder

    def _resume(self) -> dict[str, list[int]]:
        """Job -> what it gave, of a killed run of the same work; of any other, nothing stays."""
        moving = _read_moving(self.folder)
        if moving is not None:
            self._older = moving["older"]
            if moving["header"].split(" ")[0] != self._work and not (self.target / self._marker).exists():
                raise CheckpointError(
                    f"{self.target} is left over from another conversion that was interrupted; run that again, or "
                    "delete it."
                )
            if moving["header"] == self._header and moving["files"] and self._here(moving["files"]):
                self._files = moving["files"]
                return {}
        if moving is None or not moving["files"]:
            done = self._read()
            if done is not None:
                return done
        self._clear()
        if self._exists:
            (self.target / JOURNAL).unlink(missing_ok=True)  # of a run killed right after its rename
        os.write(self._journal, f"{self._header}\n".encode())
        return {}

    def _read(self) -> dict[str, list[int]] | None:
        text = os.pread(self._journal, os.fstat(self._journal).st_size, 0)
        header, *lines = text.split(b"\n")
        if header.decode(errors="replace") != self._header or not lines:
            return None
        done, size = {}, len(header) + 1
        for line in lines[:-1]:  # what follows the last newline was being written
            try:
                key, result = json.loads(line)
            except ValueError:  # the disk was full
                break
            done[key] = result
            size += len(line) + 1
        os.ftruncate(self._journal, size)
        return done

    def _clear(self) -> bool:
        """Take everything away but the journal, which becomes empty; True where the target is left as no checkpoint."""
        os.ftruncate(self._journal, 0)  # first: what it tells of must be there, whenever this is killed
        unfinished = (self.folder / _MOVING).exists() and not (self.target / self._marker).exists()
        if unfinished:
            self._tell_moving({})
        else:
            (self.folder / _MOVING).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in (JOURNAL, _MOVING):
                path.unlink()
        return unfinished

    def _tell_moving(self, files: dict[str, int]) -> None:
        """From now on, all of `files` are in the target or here; none: the target lacks some, and they are not here."""
        beside = self.folder / f"{_MOVING}.new"
        with open(beside, "w") as file:
            json.dump({"header": self._header, "files": files, "older": self._older}, file)
            if self._durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, self.folder / _MOVING)
        self._sync(self.folder)

    def _written(self) -> dict[str, int]:
        own = (JOURNAL, _MOVING, f"{_MOVING}.new")
        found = {p.relative_to(self.folder).as_posix(): p for p in self.folder.rglob("*") if p.is_file()}
        return {file: path.stat().st_size for file, path in sorted(found.items()) if file not in own}

    def _see_to_room(self, files: dict[str, int]) -> None:
        """Raises CheckpointError, while the target is as it was, where something is in the way of a file."""
        for file in files:
            path = self.target / file
            inside = [parent for parent in path.parents if self.target in parent.parents]
            for blocked in [p for p in (path, *inside) if p.exists() and p.is_dir() == (p == path)]:
                raise CheckpointError(f"{blocked} is in the way of {path}; move it away, or write to another folder.")

    def _here(self, files: dict[str, int]) -> bool:
        """Whether each is in one of the two folders: somebody may have deleted the target's."""

        def size(path: Path) -> int:
            return path.stat().st_size if path.is_file() else -1

        return all(n in (size(self.folder / file), size(self.target / file)) for file, n in files.items())

    def _move(self, files: dict[str, int], replaces: Sequence[str]) -> None:
        """Do what is left of it; every step may be done twice."""
        if (self.folder / self._marker).exists():  # else the target's is the new one
            (self.target / self._marker).unlink(missing_ok=True)
            self._sync(self.target)
        older = {path for file in self._older if (path := self.target / file).is_file()}
        for path in older | {path for pattern in replaces for path in self.target.glob(pattern)}:
            for old in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
                if old.relative_to(self.target).as_posix() not in files:
                    old.unlink()
            for folder in [path, *(parent for parent in path.parents if self.target in parent.parents)]:
                if folder.is_dir() and not any(p.is_file() for p in folder.rglob("*")):
                    shutil.rmtree(folder)
        for file in files:
            if file != self._marker and (self.folder / file).exists():
                (self.target / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.folder / file, self.target / file)
        for folder in {(self.target / file).parent for file in files}:
            self._sync(folder)
        if (self.folder / self._marker).exists():
            os.replace(self.folder / self._marker, self.target / self._marker)
            self._sync(self.target)

    def _sync(self, folder: Path) -> None:
        if self._durable:
            sync_folder(folder)


@contextmanager
def staged(target: Path, fingerprint: str, marker: str, durable: bool = True) -> Iterator[Staging]:
    """A staging folder that an error leaves nothing of, and an interrupt leaves as it is, for the next run to go on.

    `marker` is the file by which a reader knows that the target is whole. `durable` has the renames reach the disk
    before it ends; what was written must have done so before.
    """
    staging = Staging(target, fingerprint, marker, durable)
    try:
        yield staging
    except Exception:
        staging.close(keep=staging.complete)
        raise
    except BaseException:
        staging.close(keep=True)
        raise
    staging.close(keep=False)


def present(folder: Path) -> dict[str, int]:
    """The size of every file of a target, but those that are only staged; empty where there is none."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.stat().st_size
        for name, path in found.items()
        if not name.startswith(f"{PARTIAL}/") and name != JOURNAL
    }


def is_unfinished(folder: Path, marker: str) -> bool:
    """Whether a conversion was killed while it put its files into `folder`."""
    return (folder / PARTIAL / _MOVING).exists() and not (folder / marker).exists()


def refuse_unfinished(folder: Path, marker: str) -> None:
    """Raises CheckpointError where a conversion was killed while it put its files into `folder`."""
    if is_unfinished(folder, marker):
        raise CheckpointError(f"{folder} is left over from a conversion that was interrupted; run that again.")


def _read_moving(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _MOVING).read_text())
        older = list(found.get("older", []))  # earlier releases did not write it
        return {"header": str(found["header"]), "files": dict(found["files"]), "older": older}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):  # a power cut: whose it was is not known
        return {"header": "", "files": {}, "older": []}


def _boot() -> str:
    """Changes when the machine starts anew; where it cannot tell, with every call, so that nothing is relied on."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def not_written(target: Path | str, error: OSError) -> str:
    """A sentence for a target that the system does not let us write."""
    return disk_sentence(error, target) or f"{target} cannot be written ({first_line(error)}); name another folder"
