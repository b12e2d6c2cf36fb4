"""Carry out a conversion into an object store: each file is uploaded front to back in parts, the
manifest last.

If nothing is in the way, a file appears as soon as it is whole, and a journal lists the whole ones,
so that a killed conversion resumes with the rest. While there is a journal and no manifest, the
target is no checkpoint. An older output in the way is not touched before everything is uploaded.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.files import parse_json
from smtrain.worker.checkpoint.conversion_plan import (
    MANIFEST,
    ConversionPlan,
    ConversionProgress,
    is_done,
    manifest,
    matches,
    on_threads,
    written_by,
)
from smtrain.worker.checkpoint.sources import WeightSource
from smtrain.worker.checkpoint.staging import JOURNAL
from smtrain.worker.checkpoint.storage import (
    RemotePlace,
    UnreachableError,
    filesystem,
    patient,
    refuse_changed,
)
from smtrain.worker.checkpoint.tensor_files import Job, TensorFile, run

_PART = 8 << 20  # bytes of one part of a multipart upload
_JOURNAL_EVERY = (
    64 << 20
)  # bytes of finished files after which the journal, one object, is written again


def upload(
    source: WeightSource, target: str, plan: ConversionPlan, work: str, overwrite: bool = True
) -> None:
    """Write `plan` under a URI; `work` identifies the journal.

    Raises CheckpointError if the source turns out broken, and then removes its output, or if a
    store fails, and then keeps what is finished. Without `overwrite`, a finished output is left,
    and other files are an error.
    """
    try:
        fs, prefix = filesystem(target)
        present = {path: (size, version) for path, size, version in RemotePlace(target).stamp()}
        # A journal without a manifest is an unfinished output: the writer resumes or refuses it.
        if not overwrite and (JOURNAL not in present or MANIFEST in present):
            old_manifest = fs.cat_file(f"{prefix}/{MANIFEST}") if MANIFEST in present else None
            if is_done(
                plan,
                work,
                {path: size for path, (size, _) in present.items()},
                old_manifest,
                target,
            ):
                if JOURNAL in present:  # left by a run killed right after its manifest
                    fs.rm_file(f"{prefix}/{JOURNAL}")
                return
        writer = _Writer(
            source,
            plan,
            None if overwrite else work,
            _Journal(fs, prefix, target, work, present),
            present,
        )
    except CheckpointError:
        raise
    except Exception as error:  # each client has its own kinds
        raise _unwritable(target, error) from None
    try:
        writer.write()
    # Before its base class CheckpointError: what is uploaded stays for the next run.
    except UnreachableError:
        raise
    except CheckpointError:
        writer.leave_nothing()
        raise
    except Exception as error:
        raise _unwritable(target, error) from None
    finally:
        writer.close()


def _unwritable(target: str, error: Exception) -> CheckpointError:
    return UnreachableError(
        f"{target} cannot be written ({error}); check the network and your permissions, and run the"
        " same command again to resume."
    )


class _Journal:
    """An object in the target that lists the whole files of one conversion."""

    def __init__(
        self, fs: Any, prefix: str, target: str, work: str, present: dict[str, tuple[int, str]]
    ) -> None:
        self.fs, self.prefix, self._work = fs, prefix, work
        self.done: dict[str, dict[str, Any]] = {}
        """File -> size, version and the crc32 of its tensors."""
        self.mixed = False
        """Whether files of an older output may be among them."""
        self.files: list[str] = []
        """All files that the conversion writes."""
        self.older: list[str] = []
        """Files of an earlier conversion whose manifest is gone."""
        self.left: list[str] = []
        """Files of another conversion that was killed."""
        self._unrecorded = 0
        self._lock = threading.Lock()
        if MANIFEST in present:
            self.older = [
                file for file in written_by(fs.cat_file(f"{prefix}/{MANIFEST}")) if file in present
            ]
        # Next to a manifest a journal counts for nothing: the old output is untouched, or the new
        # one is whole.
        if JOURNAL not in present or MANIFEST in present:
            return
        try:
            journal = parse_json(fs.cat_file(f"{prefix}/{JOURNAL}"))
            owner, self.mixed, self.files = (
                journal["work"],
                journal["mixed"],
                list(journal["files"]),
            )
            done_files = dict(journal["done"])
            self.older = [file for file in journal["older"] if file in present]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{target}/{JOURNAL} cannot be read ({error!r}); delete {target}."
            ) from None
        if owner == work:
            # By size and version: somebody may have replaced a file since.
            self.done = {
                f: a for f, a in done_files.items() if present.get(f) == (a["size"], a["version"])
            }
        elif self.mixed:
            raise CheckpointError(
                f"{target} is left over from another conversion that was interrupted; run that"
                " again, or delete it."
            )
        else:
            self.left = [file for file in self.files if file in present]

    def begin(self, plan: ConversionPlan, is_mixed: bool) -> None:
        """Write the journal: from now on the target is no checkpoint, until it has a manifest and
        no journal.
        """
        self.mixed = is_mixed
        self.files = [*(container.file for container in plan.containers), *plan.extras]
        self._write()

    def note(self, file: str, crcs: dict[str, int]) -> None:
        """Record an existing, whole file."""
        path = f"{self.prefix}/{file}"

        def read_info() -> dict[str, Any]:
            # fsspec may still know the file that this one replaced.
            self.fs.invalidate_cache(path)
            entry: dict[str, Any] = self.fs.info(path)
            return entry

        info = patient(read_info)
        with self._lock:
            self.done[file] = {
                "size": int(info["size"]),
                "version": RemotePlace.version(info),
                "crc32": crcs,
            }
            self._unrecorded += int(info["size"])
            if self._unrecorded >= _JOURNAL_EVERY:
                self._write()

    def flush(self) -> None:
        with self._lock:
            if self._unrecorded:
                self._write()

    def _write(self) -> None:
        journal = {
            "work": self._work,
            "mixed": self.mixed,
            "files": self.files,
            "older": self.older,
            "done": self.done,
        }
        patient(lambda: self.fs.pipe_file(f"{self.prefix}/{JOURNAL}", json.dumps(journal).encode()))
        self._unrecorded = 0

    def end(self) -> None:
        self.fs.rm_file(f"{self.prefix}/{JOURNAL}")
        self._unrecorded = 0


class _Upload:
    """A file uploaded front to back in parts, which appears with `commit`."""

    def __init__(self, fs: Any, path: str, container: TensorFile) -> None:
        self.container = container
        self.crcs: dict[str, int] = {}
        # Without autocommit the object appears with `commit` only, so an old one stays until then.
        self.file = fs.open(path, "wb", block_size=_PART, autocommit=False)
        self._fixed = list(container.fixed_blocks)
        self._at = 0

    def put(self, at: int, data: bytes | memoryview) -> None:
        while self._fixed and self._fixed[0][0] == self._at:
            self._append(self._fixed.pop(0)[1])
        # A multipart upload only appends, so a group's jobs must come in the order of their
        # offsets.
        assert at == self._at, f"{at} is written after {self._at}"
        self._append(data)

    def _append(self, data: bytes | memoryview) -> None:
        self.file.write(bytes(data))
        self._at += len(data)

    def end(self, crcs: dict[str, int]) -> None:
        self.crcs = crcs
        self.put(
            self.container.end, b"" if self.container.tail is None else self.container.tail(crcs)
        )
        self.file.close()

    def commit(self) -> None:
        self.file.commit()


class _Writer:
    def __init__(
        self,
        source: WeightSource,
        plan: ConversionPlan,
        recorded_work: str | None,
        journal: _Journal,
        present: dict[str, Any],
    ) -> None:
        self._source, self._plan, self._signed, self._journal, self._present = (
            source,
            plan,
            recorded_work,
            journal,
            present,
        )
        self._read = source.location.stamp()
        self._fs, self._prefix = journal.fs, journal.prefix
        self._progress, self._lock = ConversionProgress(plan), threading.Lock()
        self._open: list[_Upload] = []
        """Uploads that are not committed."""
        self.files = {*(container.file for container in plan.containers), *plan.extras, MANIFEST}
        old = present.keys() - set(journal.files)
        stale = {*journal.older, *(file for file in old if matches(file, plan.replaces))}
        self._stale = sorted(stale - self.files)
        self._mixed = bool(self._stale or self.files & old) or journal.mixed
        # xser has too many files to keep all uploads open
        xser = any(".tensors/" in container.file for container in plan.containers)
        self._holds_back = self._mixed and not journal.mixed and not xser
        self._begun = False

    def write(self) -> None:
        # Of another conversion that was killed; a mixture with an older output was refused before.
        self._remove(self._journal.left)
        if not self._holds_back:
            self._begin()
        # One call a group, not one a job as in execute.py: two threads would mix the order of a
        # file.
        on_threads([partial(self._group, jobs)] for jobs in self._plan.groups)
        for container in self._plan.containers:
            if not container.offsets:
                self._finish_upload(self._start(container), {})
        if self._holds_back:
            self._begin()
        while self._open:
            self._commit(self._open[0])
        self._remove(self._stale)
        # Before the manifest: without it no reader takes files of two versions of the source.
        refuse_changed(self._source.location, self._read)
        for file, data in {
            **self._plan.extras,
            MANIFEST: manifest(self._plan, self._progress.crcs, self._signed),
        }.items():
            patient(partial(self._fs.pipe_file, f"{self._prefix}/{file}", data))
        # After the manifest: until then only the journal says that the target is no checkpoint.
        self._journal.end()

    def leave_nothing(self) -> None:
        """After an error: remove our files, unless they replace an older output's, and the journal
        last.
        """
        if not self._begun or self._mixed:
            return
        # The journal goes last, so that a kill in between leaves no files that look whole.
        with suppress(Exception):  # the store may be the cause
            self._fs.invalidate_cache()
            self._remove([file for file in self.files if self._fs.exists(f"{self._prefix}/{file}")])
            self._journal.end()

    def close(self) -> None:
        """Discard unfinished uploads, and write the journal."""
        for upload in self._open:
            upload.file.discard()
        with suppress(Exception):
            self._journal.flush()

    def _begin(self) -> None:
        self._begun = True
        # Before the old manifest goes: without both, files look like the output of another tool.
        self._journal.begin(self._plan, self._mixed)
        if self._mixed:
            self._remove([file for file in self._present if file == MANIFEST])

    def _group(self, jobs: list[Job]) -> None:
        uploads: dict[str, _Upload] = {}
        done_files = self._journal.done

        def put(file: str, at: int, data: bytes | memoryview) -> None:
            if file not in done_files:
                uploads[file].put(at, data)

        for job in jobs:
            tensor_targets = [
                (write.name, container) for write in job for container in write.targets
            ]
            missing_containers = {
                container.file: container
                for _, container in tensor_targets
                if container.file not in done_files
            }
            for file, container in missing_containers.items():
                if file not in uploads:
                    uploads[file] = self._start(container)
            if missing_containers:
                crcs = run(job, self._source, self._plan.layout, put)
            else:
                crcs = [
                    done_files[container.file]["crc32"][name] for name, container in tensor_targets
                ]
            for container in self._progress.add(job, crcs):
                if container.file in uploads:
                    self._finish_upload(
                        uploads.pop(container.file), self._progress.crcs[container.file]
                    )

    def _start(self, container: TensorFile) -> _Upload:
        upload = _Upload(self._fs, f"{self._prefix}/{container.file}", container)
        with self._lock:
            self._open.append(upload)
        return upload

    def _finish_upload(self, upload: _Upload, crcs: dict[str, int]) -> None:
        upload.end(crcs)
        if not self._holds_back:
            self._commit(upload)

    def _commit(self, upload: _Upload) -> None:
        upload.commit()
        with self._lock:
            self._open.remove(upload)
        # After the commit: the journal lists only objects that exist.
        self._journal.note(upload.container.file, upload.crcs)

    def _remove(self, files: list[str]) -> None:
        for file in files:
            patient(partial(self._fs.rm_file, f"{self._prefix}/{file}"))
