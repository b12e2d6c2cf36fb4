"""Read a job's log through FilterLogEvents: all hosts in one call, every event once, however late.

A token of GetLogEvents is a position, so events that arrive late are never seen, and 64 hosts take
64 calls although the account has 5 to 25 a second. Here every reading goes back some time, and
known events are skipped.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from smtrain.client.backends.base import Backend, TokenExpiredError
from smtrain.client.backends.sagemaker.retry import Patience, short_patience
from smtrain.core.protocol.log_lines import Line, host_of

MINUTE = 60_000
_CACHE_KIB = 16 << 10
_SIGN_OFFSET = 1 << 63
"""SQLite's integers have a sign; keys have none."""
_SELECT_KEY = "SELECT 1 FROM seen WHERE(at = ? AND key = ?)"


class SeenEvents:
    """A set of event keys (64 bits) with their timestamps (ms), in a temporary SQLite file: some 30
    bytes of disk each.

    Memory holds the file's cache only; a job that writes 50 million lines in an hour would need
    gigabytes as a `set`.
    """

    def __init__(self) -> None:
        # "" is a file that SQLite deletes when it is closed. Nothing is ever read back after a
        # crash.
        self._rows = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._restored: set[int] = set()
        self._rows.executescript(
            f"PRAGMA cache_size = -{_CACHE_KIB}; PRAGMA journal_mode = OFF; PRAGMA synchronous ="
            " OFF;CREATE TABLE seen (at INTEGER, key INTEGER, PRIMARY KEY (at, key)) WITHOUT"
            " ROWID; BEGIN"
        )

    def add(self, timestamp: int, key: int) -> bool:
        """True if the key is new; it is remembered. A key belongs to one timestamp (`key_of`)."""
        row = timestamp, key - _SIGN_OFFSET
        if (
            timestamp // MINUTE in self._restored
            and self._rows.execute(_SELECT_KEY, (_floor(timestamp), row[1])).fetchone()
        ):
            return False
        return self._rows.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", row).rowcount == 1

    def forget(self, timestamp: int) -> None:
        """Drop the minutes that end before a timestamp."""
        self._rows.execute("DELETE FROM seen WHERE(at < ?)", (_floor(timestamp),))
        self._restored = {minute for minute in self._restored if minute >= timestamp // MINUTE}

    def start_of_newest(self, timestamp: int, max_keys: int) -> int:
        """This timestamp, or a later one from which on there are at most `max_keys` keys."""
        newest = "SELECT at FROM seen WHERE(at >= ?) ORDER BY at DESC LIMIT 1 OFFSET ?"
        row = self._rows.execute(newest, (timestamp, max_keys)).fetchone()
        return timestamp if row is None else int(row[0]) + 1

    def since(self, timestamp: int) -> dict[int, set[int]]:
        """The keys from a timestamp on, by minute, and some earlier ones of its minute."""
        minutes: dict[int, set[int]] = {}
        query = "SELECT at, key FROM seen WHERE(at >= ? OR at = ?)"
        for at, key in self._rows.execute(query, (timestamp, _floor(timestamp))):
            minutes.setdefault(at // MINUTE, set()).add(key + _SIGN_OFFSET)
        return minutes

    def restore(self, minutes: Mapping[int, Iterable[int]]) -> None:
        """Restore the answer of `since`.

        The exact time of a key is lost: it becomes the start of its minute.
        """
        for minute, keys in minutes.items():
            self._rows.executemany(
                "INSERT OR IGNORE INTO seen VALUES (?, ?)",
                ((minute * MINUTE, key - _SIGN_OFFSET) for key in keys),
            )
            self._restored.add(minute)

    def __len__(self) -> int:
        return int(self._rows.execute("SELECT count(*) FROM seen").fetchone()[0])


def _floor(timestamp: int) -> int:
    """The start of a timestamp's minute."""
    return timestamp // MINUTE * MINUTE


def key_of(stream: str, timestamp: int, text: str, ordinal: int) -> int:
    """An event's identity: its stream, time and text, and its number among equal events.

    CloudWatch's event id does not serve: GetLogEvents has none, and another reading must find the
    same events.
    """
    digest = blake2b(digest_size=8)
    digest.update(f"{stream}\0{timestamp}\0{ordinal}\0".encode())
    digest.update(text.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big")


class Ordinals:
    """Number equal events within one reading; the events of a stream come in the order of time."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, dict[str, int]]] = {}

    def next(self, stream: str, timestamp: int, text: str) -> int:
        stamp, counts = self._at.get(stream, (None, {}))
        if stamp != timestamp:
            counts = {}
            self._at[stream] = (timestamp, counts)
        counts[text] = counts.get(text, -1) + 1
        return counts[text]


@dataclass
class LogReading:
    """A job's log events, each given once."""

    target: Backend
    job_name: str
    host: str | None
    """Read only this host (`algo-2`)."""
    patience: Patience
    seen_events: SeenEvents = field(default_factory=SeenEvents)
    lateness: float = 0.0
    """Longest time so far between an event and its arrival in CloudWatch, in seconds."""
    remember_s: float | None = None
    """Keys of events that are older than the newest by more than this are dropped."""

    def new(self, start: int, pattern: str | None = None) -> Iterator[list[tuple[Line, int]]]:
        """Pages of new lines from a timestamp (ms) on, each line with its key; ordered by time."""
        token: str | None = None
        ordinals = Ordinals()
        while True:
            try:
                page = self.target.log_page(
                    self.job_name, self.host, start, pattern, token, self.patience
                )
            except TokenExpiredError:
                token, ordinals = None, Ordinals()
                continue
            yield list(self._new_events(page["events"], ordinals))
            if (token := page.get("nextToken")) is None:
                return

    def _new_events(
        self, events: list[dict[str, object]], ordinals: Ordinals
    ) -> Iterator[tuple[Line, int]]:
        prefix, newest = f"{self.job_name}/" + (f"{self.host}-" if self.host else ""), 0
        for event in events:
            stream, stamp, text = (
                str(event["logStreamName"]),
                int(str(event["timestamp"])),
                str(event["message"]),
            )
            if not stream.startswith(prefix):
                continue
            key = key_of(stream, stamp, text, ordinals.next(stream, stamp, text))
            if self.seen_events.add(stamp, key):
                self.lateness = max(
                    self.lateness, (int(str(event.get("ingestionTime", stamp))) - stamp) / 1000
                )
                newest = max(newest, stamp)
                yield Line(host_of(stream), stamp, text), key
        if newest and self.remember_s:
            self.seen_events.forget(newest - int(self.remember_s * 1000))


def pages(
    target: Backend, job_name: str, host: str | None, start: int, pattern: str | None = None
) -> Iterator[list[Line]]:
    """All lines so far from a timestamp (ms) on, in the order of time, page by page."""
    reading = LogReading(target, job_name, host, short_patience(target.name), remember_s=60.0)
    for page in reading.new(start, pattern):
        yield [line for line, _ in page]


def last_lines(target: Backend, job_name: str, count: int = 1000) -> list[Line]:
    """The last `count` lines of every host, in the order of time."""
    events = target.last_events(job_name, count, short_patience(target.name))
    lines = [
        Line(host_of(event["logStreamName"]), event["timestamp"], event["message"])
        for event in events
    ]
    return sorted(lines, key=lambda line: line.timestamp)
