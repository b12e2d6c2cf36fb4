"""What training reads of prepared data, compared with checksums when it is first read.

Data that has none (of an older smtrain) is read through once in the background by one process of the job, compared
with the SHA-256 in its manifest, and its checksums are kept with the run, where the next attempt finds them.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from smtrain.core.errors import DataError
from smtrain.worker.data.checksums import REMEDY, SUFFIX, Blocks, PairSums, Rolling, read_sums, sums_beside, write_sums
from smtrain.worker.data.manifest import DatasetManifest

KEPT = "data-checksums"
"""The folder below a run's checkpoints."""
_AT_ONCE = 256 << 20
"""Bytes of a dataset without checksums that are read through before the first batch."""
_READ = 4 << 20


class FirstRead:
    """The .bin files of the pairs `prefixes` in a prepared folder, for the threads of one process.

    `sums` are the checksums of each pair, or None. Raises DataError where they are missing or damaged.
    """

    def __init__(self, folder: Path, manifest: DatasetManifest, prefixes: Sequence[str], keep: Path | None) -> None:
        self.paths = [folder / f"{prefix}.bin" for prefix in prefixes]
        self.sums = [_sums(folder, manifest, prefix, keep) for prefix in prefixes]
        self._blocks = [
            Blocks(path, path.stat().st_size, sums.block, sums.tokens) if sums else None
            for path, sums in zip(self.paths, self.sums, strict=True)
        ]
        self._damage: DataError | None = None
        self._closing = threading.Event()
        without = [prefix for prefix, sums in zip(prefixes, self.sums, strict=True) if sums is None]
        self._thread = threading.Thread(
            target=self._read_through, args=(folder, manifest, without, keep), name="checksums", daemon=True
        )
        if without and os.environ.get("RANK", "0") == "0":
            self._thread.start()
            if sum((folder / f"{prefix}.bin").stat().st_size for prefix in without) <= _AT_ONCE:
                self._thread.join()

    def read(self, number: int, handle: int, start: int, length: int) -> bytes:
        """`length` bytes from `start` of file `number`, by its open `handle`.

        Raises DataError where they cannot be read or are damaged.
        """
        path, blocks = self.paths[number], self._blocks[number]
        whole = blocks.around(start, length) if blocks else None
        begin, wanted = whole or (start, length)
        try:
            raw = os.pread(handle, wanted, begin)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}); check the channel.") from error
        if len(raw) != wanted:
            raise DataError(f"{path} became shorter while it was read; prepare the data again.")
        if whole is None:
            return raw
        assert blocks is not None
        blocks.check(begin, raw)
        return raw[start - begin : start - begin + length]

    def raise_damage(self) -> None:
        """Raises the DataError that reading through has ended in, if it has."""
        if self._damage is not None:
            raise self._damage

    def close(self) -> None:
        """End the reading through."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _read_through(self, folder: Path, manifest: DatasetManifest, prefixes: list[str], keep: Path | None) -> None:
        try:
            for prefix in prefixes:
                found = [self._whole(folder / f"{prefix}{end}", manifest) for end in (".bin", ".idx")]
                if keep is None or self._closing.is_set():
                    continue
                path = _kept(keep, manifest, prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f".{path.name}.part")
                write_sums(partial, *found)
                partial.replace(path)
        except DataError as error:
            self._damage = error
        except OSError as error:
            self._damage = DataError(f"{error.filename or folder}: {error.strerror}; check the channel and the disk.")

    def _whole(self, path: Path, manifest: DatasetManifest) -> Rolling:
        rolling, whole = Rolling(), hashlib.sha256()
        with path.open("rb") as file:
            while not self._closing.is_set() and (part := file.read(_READ)):
                rolling.add(part)
                whole.update(part)
        wanted = manifest.files.get(path.name, {}).get("sha256")
        if wanted and not self._closing.is_set() and whole.hexdigest() != wanted:
            raise DataError(f"{path} is damaged: its SHA-256 is not the one in its manifest; {REMEDY}.")
        return rolling


def _sums(folder: Path, manifest: DatasetManifest, prefix: str, keep: Path | None) -> PairSums | None:
    if f"{prefix}{SUFFIX}" in manifest.files:
        return read_sums(folder / f"{prefix}{SUFFIX}")
    if found := sums_beside(folder / prefix):
        return found
    kept = _kept(keep, manifest, prefix) if keep else None
    return read_sums(kept) if kept and kept.is_file() else None


def _kept(keep: Path, manifest: DatasetManifest, prefix: str) -> Path:
    """A name of the data's own, so that the checksums of other data are never taken for these."""
    whole = manifest.files.get(f"{prefix}.bin", {}).get("sha256", "unknown")
    return keep / f"{prefix}-{whole[:16]}{SUFFIX}"
