"""A folder of files that appears whole or not at all, and a journal by which a killed conversion goes on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from smtrain.checkpoint.manifest import sync_folder
from smtrain.checkpoint.places import is_uri
from smtrain.errors import CheckpointError

PARTIAL = ".partial"
_JOURNAL, _MOVING = ".journal", ".moving"


class Staging:
    """A folder to write into, beside or in the target, and what a killed run of the same work had done in it."""

    def __init__(self, target: Path, fingerprint: str, durable: bool = True) -> None:
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target} is a file; give a folder to write to.")
        self.target, self._exists, self._durable = target, target.is_dir(), durable
        # inside of a folder that exists, since that may be a mount, as /opt/ml/model is
        self.folder = target / PARTIAL if self._exists else target.parent / f".{target.name}{PARTIAL}"
        self._made = [parent for parent in self.folder.parents if not parent.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._journal = os.open(self.folder / _JOURNAL, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._lock = threading.Lock()
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._journal)
            raise CheckpointError(f"another process is writing to {target}; wait until it has ended.") from None
        self.done = self._read(f"{fingerprint} {_boot()}")

    def _read(self, header: str) -> dict[str, list[int]]:
        """Job -> what it gave, of a run with the same header; of any other, nothing stays."""
        size = os.fstat(self._journal).st_size
        lines = os.pread(self._journal, size, 0).decode(errors="replace").split("\n")
        if lines[0] == header:
            done = {}
            for line in lines[1:-1]:  # what follows the last newline was being written
                key, result = json.loads(line)
                done[key] = result
            os.ftruncate(self._journal, size - len(lines[-1]))
            return done
        if self.moving:
            os.close(self._journal)
            raise CheckpointError(
                f"{self.target} is half of another conversion that was interrupted; run that again, or delete it."
            )
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _JOURNAL:
                path.unlink()
        os.ftruncate(self._journal, 0)
        os.write(self._journal, f"{header}\n".encode())
        return {}

    def note(self, key: str, result: Sequence[int]) -> None:
        """A job is done: its bytes are written."""
        with self._lock:
            os.write(self._journal, (json.dumps([key, list(result)]) + "\n").encode())

    @property
    def moving(self) -> bool:
        """Everything was written, and some files may be in the target already."""
        return (self.folder / _MOVING).exists()

    def publish(self, marker: str, replaces: Sequence[str] = ()) -> None:
        """Make the target appear: by one rename where it is new, else file by file, `marker` last.

        Of what was there, the marker goes first and files that match the patterns `replaces` after it, so that readers
        who ask for the marker never meet a mixture.
        """
        if not self._exists:
            (self.folder / _JOURNAL).unlink(missing_ok=True)
            for path in self.folder.rglob("*"):
                if path.is_dir():
                    self._sync(path)
            os.rename(self.folder, self.target)
            self._sync(self.target.parent)
            return
        if not self.moving:
            (self.target / marker).unlink(missing_ok=True)
            for pattern in replaces:
                for path in self.target.glob(pattern):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            (self.folder / _MOVING).touch()
            self._sync(self.folder)
        files = [p.relative_to(self.folder) for p in self.folder.rglob("*") if p.is_file()]
        for file in sorted(files, key=lambda file: (str(file) == marker, file)):
            if file.name in (_JOURNAL, _MOVING):
                continue
            (self.target / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.folder / file, self.target / file)
        for folder in {(self.target / file).parent for file in files if file.name not in (_JOURNAL, _MOVING)}:
            self._sync(folder)
        (self.folder / _MOVING).unlink()

    def _sync(self, folder: Path) -> None:
        if self._durable:
            sync_folder(folder)

    def close(self, keep: bool) -> None:
        """Let go of the folder; unless `keep`, so that the next run goes on, nothing of it stays."""
        os.close(self._journal)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in self._made:
                with suppress(OSError):  # what was written is in it
                    parent.rmdir()


@contextmanager
def staged(target: Path, fingerprint: str, durable: bool = True) -> Iterator[Staging]:
    """A staging folder that an error leaves nothing of, and an interrupt leaves as it is, for the next run to go on.

    `durable` has the renames reach the disk before it ends; what was written must have done so before.
    """
    staging = Staging(target, fingerprint, durable)
    try:
        yield staging
    except Exception:
        staging.close(keep=staging.moving)
        raise
    except BaseException:
        staging.close(keep=True)
        raise
    staging.close(keep=False)


def refuse_unfinished(folder: Path, marker: str) -> None:
    """Raises CheckpointError where a conversion was killed while it put its files into `folder`."""
    if (folder / PARTIAL / _MOVING).exists() and not (folder / marker).exists():
        raise CheckpointError(f"{folder} is half of a conversion that was interrupted; run the conversion again.")


def refuse_overlap(source: Path | str, target: Path | str) -> None:
    """Raises CheckpointError where one folder is, or lies in, the other: writing would change what is read."""
    if is_uri(source) != is_uri(target):
        return
    a, b = (Path(str(p).split("://", 1)[1]) if is_uri(p) else Path(p).resolve() for p in (source, target))
    if a == b or a in b.parents or b in a.parents:
        raise CheckpointError(f"{target} and the source {source} overlap; write to a folder outside of it.")


def _boot() -> str:
    """Changes when the machine starts anew: what was not flushed to disk before may be lost."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "-"
