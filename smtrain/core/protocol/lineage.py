"""Lineage of checkpoints: each train job writes a separate folder, with a record of the
checkpoint it started from.

    checkpoints/step_00000010/...           of a job without a name
    checkpoints/<job>/line.json             the job's origin, written by rank 0 before its first step
    checkpoints/<job>/step_00000020/...

A line consists of a job's checkpoints, those of the job that it started from up to that step, and
so on. A resume follows one line, so that one checkpoint never has files of two writers, and one run
never mixes checkpoints of two. Pure data, read by client and worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from smtrain.core.digests import verify_record, with_digest
from smtrain.core.files import parse_json, write_atomically
from smtrain.core.protocol.checkpoints import STEP

NAME = "line.json"
FORMAT, VERSION = "smtrain-line", 1
PREFIX = ""
"""Used as the job's name for checkpoints directly below the prefix."""
UNNAMED_FOLDER = "unnamed"
"""The folder of a job without a name, if jobs with names were before it."""
_JOB = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a job started from."""

    number: int
    """Higher than that of all earlier jobs of the run: the highest is the newest line."""
    job: str | None
    """The job whose line it continues, `PREFIX` for checkpoints in the prefix itself; None: it
    started from scratch.
    """
    step: int | None
    """The step in that line."""

    def to_json(self) -> str:
        began = None if self.job is None else {"job": self.job, "step": self.step}
        content = {"format": FORMAT, "version": VERSION, "number": self.number, "from": began}
        return json.dumps(with_digest(content)) + "\n"

    @classmethod
    def parse(cls, text: str | bytes) -> Origin | None:
        """Parse a record; None for other text, and for a damaged one."""
        try:
            content = verify_record(parse_json(text))
            began = content["from"] or {"job": None, "step": None}
            right = (content["format"], content["version"]) == (FORMAT, VERSION)
            return cls(int(content["number"]), began["job"], began["step"]) if right else None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass
class Folder:
    """One job's checkpoints; `origin` is None if its record is missing or damaged."""

    origin: Origin | None = None
    steps: dict[int, str] = field(default_factory=dict)
    """Path relative to the run's prefix by step, complete or not."""


@dataclass(frozen=True)
class LineagePart:
    """The part of a job's checkpoints that belongs to a line."""

    job: str
    last: int | None
    """The last step that belongs to it; None: all."""


class Lines:
    """The lines below a run's prefix, from the relative paths of its contents."""

    def __init__(self, paths: Iterable[str], read: Callable[[str], str | bytes]) -> None:
        """`paths` are of files, or of folders ("step_00000010/", "job/step_00000020"); `read` gives
        a record's text.
        """
        self.folders: dict[str, Folder] = {}
        for path in paths:
            job, *inner_path = path.split("/")
            if inner_path and (match := STEP.fullmatch(job)):
                self._folder(PREFIX).steps[int(match[1])] = job
            elif inner_path == [NAME] and _JOB.fullmatch(job):
                self._folder(job).origin = Origin.parse(read(path))
            elif inner_path and _JOB.fullmatch(job) and (match := STEP.fullmatch(inner_path[0])):
                self._folder(job).steps[int(match[1])] = f"{job}/{inner_path[0]}"

    def _folder(self, job: str) -> Folder:
        return self.folders.setdefault(job, Folder())

    def number(self, job: str) -> int:
        """The order in which lines started; one without a record counts as the last, as its order
        is unknown.
        """
        origin = self.folders[job].origin
        if job == PREFIX or origin:
            return origin.number if origin else 0
        return 1 + max((o.number for f in self.folders.values() if (o := f.origin)), default=0)

    @property
    def newest(self) -> str | None:
        """The job whose line the run continues: the last that started. None without jobs."""

        def rank(job: str) -> tuple[int, int, str]:
            return self.number(job), max(self.folders[job].steps, default=-1), job

        return max(self.folders, key=rank, default=None)

    def parts(self, job: str | None, last: int | None = None) -> tuple[LineagePart, ...]:
        """A job's line, its own checkpoints first, up to step `last`."""
        pieces: list[LineagePart] = []
        while job is not None and job not in [part.job for part in pieces]:
            pieces.append(LineagePart(job, last))
            origin = self.folders[job].origin if job in self.folders else None
            if origin is None:
                break
            job = origin.job
            if origin.step is not None:
                last = origin.step if last is None else min(last, origin.step)
        return tuple(pieces)

    def steps(self, parts: Iterable[LineagePart]) -> list[tuple[int, str]]:
        """(step, relative path) of the checkpoints of a line, complete or not, oldest first."""
        names: dict[int, str] = {}
        for part in parts:
            for step, path in self.folders.get(part.job, Folder()).steps.items():
                if part.last is None or step <= part.last:
                    names.setdefault(step, path)
        return sorted(names.items())

    def all_steps(self, parts: Iterable[LineagePart]) -> list[tuple[int, str]]:
        """The same, with the steps that the line's jobs wrote after those from which it
        continued.
        """
        return sorted(
            (s, path) for p in parts for s, path in self.folders.get(p.job, Folder()).steps.items()
        )


def lines_in(root: Path) -> Lines:
    """The lines of a folder."""

    def paths() -> Iterable[str]:
        for top in root.iterdir() if root.is_dir() else ():
            if not top.is_dir():
                continue
            yield f"{top.name}/"
            if _JOB.fullmatch(top.name):
                yield from (
                    f"{top.name}/{p.name}" for p in top.iterdir() if p.is_dir() or p.name == NAME
                )

    return Lines(paths(), lambda path: (root / path).read_bytes())


@dataclass(frozen=True)
class Lineage:
    """The line that a job continues, on one host's disk."""

    root: Path
    """The run's prefix on this disk."""
    parts: tuple[LineagePart, ...]
    """The parts of the line, the job's own first."""

    @classmethod
    def of(cls, root: Path, job: str) -> Lineage:
        """The line of a job: the one that it started earlier, else a new one that continues the
        run's newest.
        """
        lines = lines_in(root)
        if job == PREFIX and set(lines.folders) - {PREFIX}:
            job = UNNAMED_FOLDER
        if job in lines.folders or lines.newest is None:
            return cls(root, lines.parts(job))
        return cls(root, (LineagePart(job, None), *lines.parts(lines.newest)))

    @property
    def job_folder(self) -> Path:
        """The folder that the job writes to."""
        return self.root / self.parts[0].job

    def checkpoints(self) -> list[tuple[int, Path]]:
        """(step, folder) of the checkpoints of the line on this disk, complete or not, oldest
        first.
        """
        return [(step, self.root / path) for step, path in lines_in(self.root).steps(self.parts)]

    def name(self, checkpoint: Path) -> str:
        """A checkpoint's path relative to the run's prefix, the same on every host."""
        return checkpoint.relative_to(self.root).as_posix()

    def after_resume(self, step: int | None) -> Lineage:
        """The line after training resumes from `step` of it; None: from scratch."""
        if step is None:
            return Lineage(self.root, self.parts[:1])
        limits = (step if part.last is None else min(part.last, step) for part in self.parts[1:])
        older = (
            LineagePart(part.job, last) for part, last in zip(self.parts[1:], limits, strict=True)
        )
        return Lineage(self.root, (self.parts[0], *older))

    def record(self) -> None:
        """Write the job's origin unless it is there. Called by rank 0 before the first step."""
        record, job = self.job_folder / NAME, self.parts[0].job
        if job == PREFIX or (record.exists() and Origin.parse(record.read_bytes())):
            return
        lines = lines_in(self.root)
        number = 1 + max(
            (lines.number(other_job) for other_job in lines.folders if other_job != job), default=0
        )
        predecessor = self.parts[1] if len(self.parts) > 1 else None
        origin = (
            Origin(number, predecessor.job, predecessor.last)
            if predecessor
            else Origin(number, None, None)
        )
        self.job_folder.mkdir(parents=True, exist_ok=True)
        write_atomically(record, origin.to_json())
