"""Copies of the unfinished files of a preparation, in a folder that outlives the machine (a job's
checkpoints).

SageMaker uploads changed files of that folder to S3 whole and in any order, so a file there never
changes: each copy has only the bytes appended since the one before, and a record of all copies
follows it. The next attempt, on another machine, takes the newest record whose copies are complete
and joins them.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smtrain.core.digests import verify_record, with_digest
from smtrain.core.errors import DataError, SmtrainError
from smtrain.core.files import parse_json, write_atomically

_RECORD = re.compile(r"record-(\d{6})\.json")
_RETAINED_RECORDS = 3  # records; S3 may have a newer one without its parts
_COPY = 4 << 20
PART_BYTES = 1 << 30
"""Bytes of input per part: some ten seconds on a machine with many cores."""


class StoppedError(SmtrainError):
    """The machine was asked to end; finished work is kept."""


class PartUploads:
    """The copies in `folder`, a part for every `part_bytes` bytes of input, and one when `stop` is
    set.
    """

    def __init__(self, folder: Path, part_bytes: int = PART_BYTES) -> None:
        self.folder, self.part_bytes = folder, part_bytes
        self.stop = threading.Event()
        self._files: list[
            list[Any]
        ] = []  # [part's name, file that it is of, its bytes], in the order of writing
        self._number = 0
        self._done = 0

    def marks(self, settings: str, journal: Path) -> Iterator[dict[str, Any]]:
        """The marks of runs with the same settings, newest first, each with its files joined in
        `journal`.

        Stop at the mark in use; without one, call `clear`.
        """
        for number, path in sorted(self._records(), reverse=True):
            try:
                record = verify_record(parse_json(path.read_text("utf-8")))
                if record["mark"]["settings"] != settings:
                    continue
                files = record["files"]
                if any((self.folder / name).stat().st_size != size for name, _, size in files):
                    continue
                self._join(files, journal)
                self._files, self._number, self._done = (
                    files,
                    number + 1,
                    record["mark"]["done_bytes"],
                )
                mark: dict[str, Any] = record["mark"]
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue  # it did not arrive completely
            yield mark

    def add(self, mark: dict[str, Any], sizes: dict[str, int], journal: Path) -> None:
        """Copy new bytes of the files of `journal`, up to `sizes`, if there was enough input since
        the last copy.
        """
        gain = mark["done_bytes"] - self._done
        if gain < self.part_bytes and not (gain and self.stop.is_set()):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        copied_bytes: dict[str, int] = {}
        for _, name, size in self._files:
            copied_bytes[name] = copied_bytes.get(name, 0) + size
        for name, size in sizes.items():
            new_bytes = size - copied_bytes.get(name, 0)
            if new_bytes or name not in copied_bytes:
                part = f"part-{self._number:06}-{name}"
                _copy(journal / name, copied_bytes.get(name, 0), new_bytes, self.folder / part)
                self._files.append([part, name, new_bytes])
        record = json.dumps(with_digest({"mark": mark, "files": self._files}))
        write_atomically(self.folder / f"record-{self._number:06}.json", record, sync=False)
        for number, path in self._records():
            if number <= self._number - _RETAINED_RECORDS:
                path.unlink()
        self._number, self._done = self._number + 1, mark["done_bytes"]

    def clear(self) -> None:
        """Delete everything; records first, so that none is left without its parts."""
        for pattern in ("record-*.json", "part-*", ".record-*"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        self._files, self._number, self._done = [], 0, 0

    def _records(self) -> list[tuple[int, Path]]:
        records = (
            (_RECORD.fullmatch(path.name), path) for path in self.folder.glob("record-*.json")
        )
        return [(int(match[1]), path) for match, path in records if match]

    def _join(self, files: list[list[Any]], journal: Path) -> None:
        for name in {name for _, name, _ in files}:
            if not name or "/" in name or name.startswith("."):
                raise ValueError(name)
            with (journal / name).open("wb") as out:
                for part in (part for part, of, _ in files if of == name):
                    with (self.folder / part).open("rb") as source:
                        shutil.copyfileobj(source, out, _COPY)


def _copy(source: Path, start: int, count: int, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as out:
        read.seek(start)
        while count and (data := read.read(min(count, _COPY))):
            out.write(data)
            count -= len(data)
    if count:
        raise DataError(f"{source} became shorter while it was written; start again.")
