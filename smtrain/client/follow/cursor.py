"""The position of a follow, kept on disk so that the next one resumes at the same line."""

from __future__ import annotations

import base64
import json
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from smtrain.client.backends.base import JobPlace
from smtrain.core.files import home


@dataclass
class Cursor:
    """The position: everything before `start` (ms) was printed, and after it the events of `keys`, by minute."""

    start: int
    newest: int
    """Timestamp of the youngest line read, ms."""
    changes: int
    """Status transitions shown."""
    keys: dict[int, set[int]] = field(default_factory=dict)

    @staticmethod
    def path(target: JobPlace, job_name: str, host: str | None) -> Path:
        """One file for each job, host filter and region."""
        place = target.name if target.name == "local" else f"{target.name}-{target.region_name()}"
        return home() / "follow" / place / f"{job_name}{f'.{host}' if host else ''}.json"

    @classmethod
    def load(cls, path: Path) -> Cursor | None:
        """The cursor in a file; None if the file is missing or cannot be read."""
        try:
            kept = json.loads(path.read_text("utf-8"))
            keys = {}
            for minute, packed in kept["keys"].items():
                values = array("Q")
                values.frombytes(base64.b64decode(packed))
                keys[int(minute)] = set(values)
            return cls(int(kept["start"]), int(kept["newest"]), int(kept["changes"]), keys)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        packed = {m: base64.b64encode(array("Q", sorted(keys)).tobytes()).decode() for m, keys in self.keys.items()}
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        kept = {"start": self.start, "newest": self.newest, "changes": self.changes, "keys": packed}
        try:
            partial.write_text(json.dumps(kept), "utf-8")
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
