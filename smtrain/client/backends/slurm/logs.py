"""Read a job's log files: one a node, each line after its time, resuming at the end of the last
reading.

Slurm's own output has no times. Output of earlier attempts is in a file of the same form. That of
the last attempt is read whole; a line gets the time at which the file was written when the line was
first seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smtrain.client.backends.description import matches, milliseconds
from smtrain.client.backends.slurm.remote_shell import Head
from smtrain.client.backends.slurm.script import WORDS, WORDS_LOG

_MAX_BYTES = (
    262_144  # bytes of Slurm's output that are read: its first lines are the nearest to a cause
)
_WORDS = f"""
words=${{folder%/*}}/{WORDS}
if [ -s "$words" ]; then
  at=$(date -u -r "$words" +%FT%TZ)
  text=$(head -c {_MAX_BYTES} "$words"; echo .)  # read once, as another attempt may empty it
  text=${{text%.}}
  printf '{WORDS}@%s %s\\n%s' "$at" "$(printf %s "$text" | wc -c)" "$text"
fi
"""
# Reads all new bytes of all nodes in one call: "NAME BYTES\n" and so many bytes, for each file.
# Slurm's output comes last: the next attempt moves it to the log, and a line must not be in both.
_NEW = f"""
folder=$1
shift
if cd "$folder" 2>/dev/null; then
  for f in algo-*.log {WORDS_LOG}; do
    [ -e "$f" ] || continue
    at=1
    for known in "$@"; do case $known in "$f="*) at=${{known#*=}} ;; esac; done
    new=$(($(wc -c <"$f") - at + 1))
    [ "$new" -gt 0 ] || continue
    printf '%s %s\\n' "$f" "$new"
    tail -c "+$at" "$f" | head -c "$new"
  done
fi
{_WORDS}"""
_LAST = f"""
folder=$1
if cd "$folder" 2>/dev/null; then
  for f in algo-*.log {WORDS_LOG}; do
    [ -e "$f" ] || continue
    size=$(tail -n "$2" "$f" | wc -c)
    printf '%s %s\\n' "$f" "$size"
    tail -n "$2" "$f" | head -c "$size"
  done
fi
{_WORDS}"""


@dataclass
class LogFiles:
    """The log of one job, with the position of each file after the last reading."""

    head: Head
    job: str
    folder: str
    _marks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By file: (newest time in ms, next byte) at the end of every reading."""
    _words: list[tuple[int, str]] = field(default_factory=list)
    """Lines of Slurm's output in the last attempt, each with the time it was given, ms."""
    _times: dict[str, list[int]] = field(default_factory=dict)
    """The times that each line of Slurm's output was given, in all attempts."""

    def since(
        self, start: int, host: str | None = None, pattern: str | None = None
    ) -> list[dict[str, Any]]:
        """Every event from a time (ms) on, as FilterLogEvents gives them; `pattern` is a quoted
        word.
        """
        offsets = [f"{file}={self._offset(file, start) + 1}" for file in self._marks]
        events: list[dict[str, Any]] = []
        for file, content in _blocks(self.head.sh(_NEW, self.folder, *offsets, seconds=None)):
            new, complete_bytes = self._events(file, content)
            if file.startswith(WORDS):
                events += new
                continue
            at = self._offset(file, start) + complete_bytes
            newest = max((event["timestamp"] for event in new), default=0)
            marks = self._marks.setdefault(file, [])
            if complete_bytes and (not marks or at > marks[-1][1]):
                marks.append((max(newest, marks[-1][0] if marks else 0), at))
            events += new
        matching_events = (event for event in events if matches(event, start, host, pattern))
        return sorted(matching_events, key=lambda event: int(event["timestamp"]))

    def last(self, count: int) -> list[dict[str, Any]]:
        """The last so many events of every node."""
        blocks = _blocks(self.head.sh(_LAST, self.folder, str(count), seconds=None))
        return [
            event for file, content in blocks for event in self._events(file, content)[0][-count:]
        ]

    def _offset(self, file: str, start: int) -> int:
        """The first byte of a file that may hold events of this time."""
        return max((at for newest, at in self._marks.get(file, ()) if newest < start), default=0)

    def _events(self, file: str, content: bytes) -> tuple[list[dict[str, Any]], int]:
        """The events of complete lines, and the bytes of those lines."""
        complete_bytes = content.rfind(b"\n") + 1
        if file.startswith(WORDS):
            return self._of_slurm(
                milliseconds(file.partition("@")[2]), content[:complete_bytes]
            ), complete_bytes
        stream, stamp, events = f"{self.job}/{file.removesuffix('.log')}-0", 0, []
        for line in content[:complete_bytes].decode(errors="replace").split("\n")[:-1]:
            time, _, text = line.partition(" ")
            if at := milliseconds(time):
                stamp = at
            else:  # a line without a time belongs to the one before it
                text = line
            if file == WORDS_LOG and (
                times := self._times.get(text)
            ):  # the file has the attempt's last time for all
                stamp = max((line_time for line_time in times if line_time <= stamp), default=stamp)
            events.append(
                {
                    "logStreamName": stream,
                    "timestamp": stamp,
                    "ingestionTime": stamp,
                    "message": text,
                }
            )
        return events, complete_bytes

    def _of_slurm(self, written_ms: int, content: bytes) -> list[dict[str, Any]]:
        """The events of Slurm's output; a line that was seen before keeps its time."""
        texts = content.decode(errors="replace").split("\n")[:-1]
        previous_texts = [text for _, text in self._words]
        if texts[: len(previous_texts)] != previous_texts:  # another attempt's
            self._words = []
        for text in texts[len(self._words) :]:
            self._words.append((written_ms, text))
            self._times.setdefault(text, []).append(written_ms)
        stream = f"{self.job}/{WORDS_LOG.removesuffix('.log')}-0"
        return [
            {"logStreamName": stream, "timestamp": stamp, "ingestionTime": stamp, "message": text}
            for stamp, text in self._words
        ]


def _blocks(output: bytes) -> list[tuple[str, bytes]]:
    blocks = []
    while output:
        heading, _, output = output.partition(b"\n")
        name, _, size = heading.decode().rpartition(" ")
        blocks.append((name, output[: int(size)]))
        output = output[int(size) :]
    return blocks
