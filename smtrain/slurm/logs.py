"""Lines from a job's log files: one file a node, each line behind its time, read from where the last reading ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from smtrain.slurm.head import Head

# Everything that was not read yet in one call, however many nodes: "NAME BYTES\n" and so many bytes, for each file.
_NEW = """
cd "$1" 2>/dev/null || exit 0
shift
for f in algo-*.log; do
  [ -e "$f" ] || continue
  at=1
  for known in "$@"; do case $known in "$f="*) at=${known#*=} ;; esac; done
  new=$(($(wc -c <"$f") - at + 1))
  [ "$new" -gt 0 ] || continue
  printf '%s %s\\n' "$f" "$new"
  tail -c "+$at" "$f" | head -c "$new"
done
"""
_LAST = """
cd "$1" 2>/dev/null || exit 0
for f in algo-*.log; do
  [ -e "$f" ] || continue
  size=$(tail -n "$2" "$f" | wc -c)
  printf '%s %s\\n' "$f" "$size"
  tail -n "$2" "$f" | head -c "$size"
done
"""


@dataclass
class LogFiles:
    """The log of one job; remembers how far each file was read, so that a following reads what is new."""

    head: Head
    job: str
    folder: str
    _marks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By file: (newest time in ms, byte that follows) at the end of every reading."""

    def since(self, start: int, host: str | None = None, pattern: str | None = None) -> list[dict[str, Any]]:
        """Every event from a time (ms) on, as FilterLogEvents gives them; `pattern` is a quoted word."""
        known = [f"{file}={self._offset(file, start) + 1}" for file in self._marks]
        events: list[dict[str, Any]] = []
        for file, content in _blocks(self.head.sh(_NEW, self.folder, *known, seconds=None)):
            found, whole = self._events(file, content)
            at = self._offset(file, start) + whole
            newest = max((event["timestamp"] for event in found), default=0)
            marks = self._marks.setdefault(file, [])
            if whole and (not marks or at > marks[-1][1]):
                marks.append((max(newest, marks[-1][0] if marks else 0), at))
            events += found
        wanted = (pattern or "").strip('"')
        return sorted(
            (e for e in events if e["timestamp"] >= start and wanted in e["message"] and _is_of(e, host)),
            key=lambda event: event["timestamp"],
        )

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last so many events of every node."""
        blocks = _blocks(self.head.sh(_LAST, self.folder, str(count), seconds=None))
        return [event for file, content in blocks for event in self._events(file, content)[0]]

    def _offset(self, file: str, start: int) -> int:
        """From which byte on a file may hold events of this time."""
        return max((at for newest, at in self._marks.get(file, ()) if newest < start), default=0)

    def _events(self, file: str, content: bytes) -> tuple[list[dict[str, Any]], int]:
        """The events of whole lines, and how many bytes those are."""
        whole = content.rfind(b"\n") + 1
        stream, stamp, events = f"{self.job}/{file.removesuffix('.log')}-0", 0, []
        for line in content[:whole].decode(errors="replace").split("\n")[:-1]:
            time, _, text = line.partition(" ")
            if found := _milliseconds(time):
                stamp = found
            else:  # a line without a time is of the one before
                text = line
            events.append({"logStreamName": stream, "timestamp": stamp, "ingestionTime": stamp, "message": text})
        return events, whole


def _blocks(told: bytes) -> list[tuple[str, bytes]]:
    blocks = []
    while told:
        heading, _, told = told.partition(b"\n")
        name, _, size = heading.decode().rpartition(" ")
        blocks.append((name, told[: int(size)]))
        told = told[int(size) :]
    return blocks


def _milliseconds(text: str) -> int:
    try:
        return round(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1000)
    except ValueError:
        return 0


def _is_of(event: dict[str, Any], host: str | None) -> bool:
    return host is None or event["logStreamName"].rpartition("/")[2].startswith(f"{host}-")
