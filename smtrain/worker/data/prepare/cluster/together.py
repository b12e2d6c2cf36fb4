"""The two sides of a preparation on several machines: the first puts all pieces in order, the others help."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.cluster import wire
from smtrain.worker.data.prepare.cluster.dealer import Dealer
from smtrain.worker.data.prepare.cluster.desk import Desk, MeetingPoint
from smtrain.worker.data.prepare.cluster.line import DeskLine, EndedError, ask_commits
from smtrain.worker.data.prepare.cluster.shares import Share
from smtrain.worker.data.prepare.cluster.working import ShareWork, Table, do_shares
from smtrain.worker.data.prepare.progress import LINE_SECONDS
from smtrain.worker.data.read.hub import commits_of, floating
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.tokenize.encoder import MismatchError


@contextmanager
def open_desk(
    machines: MeetingPoint | None, sources: Sequence[object], say: Callable[[str], None]
) -> Iterator[tuple[Desk | None, dict[str, str]]]:
    """The first machine's desk, and the commits at which all machines read hub datasets: looked up once.

    For a single machine (None) there is no desk, and the sources look up commits themselves.
    """
    if machines is None:
        yield None, {}
        return
    commits = commits_of(sources)
    desk = Desk(machines, say, commits)
    try:
        yield desk, commits
    finally:
        desk.close()


def agreed_commits(machines: MeetingPoint, sources: Sequence[object]) -> dict[str, str]:
    """The commits at which the first machine reads hub datasets; it is asked only if a path names none."""
    return ask_commits(machines.address, machines.comes_within) if floating(sources) else {}


class _Own:
    """The shares of the first machine's own cores, which pass by the network."""

    def __init__(self, dealer: Dealer, number_of: dict[SourceFile, int]) -> None:
        self._dealer, self._number_of = dealer, number_of

    def take(self, wait: bool) -> Share | None:
        return self._dealer.take("1", wait)

    def add(self, number: int, piece: Any) -> None:
        self._dealer.add("1", number, wire.pack(piece, self._number_of))

    def done(self, number: int) -> None:
        self._dealer.done("1", number)

    def fault(self, number: int, error: DataError | MismatchError) -> None:
        self._dealer.fault("1", number, error)


def put_together(
    desk: Desk, dealer: Dealer, encoder: str, work: ShareWork, kind: type[Any], files: Sequence[SourceFile],
    before: Callable[[Share], None], take: Callable[[Any], None], after: Callable[[Share], None],
    waiting: Callable[[], None], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Have all shares done, by this machine's cores too, and pass their pieces to `take` in the order of the text.

    `before` and `after` are called for every share, `waiting` now and then until the next one is there. The error of a
    share is raised when its turn comes.
    """
    own_table = _Own(dealer, {file: number for number, file in enumerate(files)})
    table = _Counted(own_table, socket.gethostname(), say)

    def own() -> None:
        try:
            do_shares(table, work)
        except BaseException as error:  # in_order raises it
            dealer.fail(error)

    def wait() -> None:
        waiting()
        if late := dealer.slowest():
            share, seconds = late
            name = files[share.spans[0][0]].name
            place = f"{share.number + 1} of {len(dealer.shares)} ({name})"
            say(f"prepare: waiting for share {place}, begun {seconds:.0f} s ago")

    dealer.join("1", work.shares)
    desk.deal(dealer, encoder)
    thread = threading.Thread(target=own, name="own-shares", daemon=True)
    thread.start()
    try:
        for share, path in dealer.in_order(wait):
            before(share)
            for piece in _pieces(path, kind, files):
                take(piece)
            after(share)
    finally:
        dealer.end()
        thread.join()
        table.tell()


def _pieces(path: Path, kind: type[Any], files: Sequence[SourceFile]) -> Any:
    try:
        yield from wire.read_pieces(path, kind, files)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{path} is not what a machine has handed in ({error}); start again.") from None


def help_others(
    machines: MeetingPoint, settings: str, work: ShareWork, files: Sequence[SourceFile], encoder: Callable[[str], None],
    say: Callable[[str], None],
) -> int:  # fmt: skip
    """Do shares for the first machine until it has all; return the number done here.

    `encoder` is told the name of the encoder to use, and raises DataError if this machine does not have it. Raises
    DataError if the first machine cannot be reached, is gone, or turns this one away.
    """
    number_of = {file: number for number, file in enumerate(files)}
    host = socket.gethostname()
    hello = {"settings": settings, "host": host, "shares": work.shares}
    line = DeskLine(machines.address, hello, lambda piece: wire.pack(piece, number_of), encoder, machines.comes_within)
    counted = _Counted(line, host, say)
    try:
        return do_shares(counted, work)
    except EndedError:
        return counted.shares
    finally:
        counted.tell()
        line.close()


class _Counted:
    """A table that reports now and then how fast its machine is."""

    def __init__(self, table: Table, host: str, say: Callable[[str], None]) -> None:
        self._table, self._host, self._say = table, host, say
        self._began = self._said = time.monotonic()
        self._bytes: dict[int, int] = {}
        self.shares = self.done_bytes = 0

    def take(self, wait: bool) -> Share | None:
        share = self._table.take(wait)
        if share is not None:
            self._bytes[share.number] = share.bytes
        return share

    def add(self, number: int, piece: Any) -> None:
        self._table.add(number, piece)

    def done(self, number: int) -> None:
        self._table.done(number)
        self.shares += 1
        self.done_bytes += self._bytes.pop(number)
        if time.monotonic() - self._said >= LINE_SECONDS:
            self.tell()

    def fault(self, number: int, error: DataError | MismatchError) -> None:
        self._table.fault(number, error)

    def tell(self) -> None:
        self._said = time.monotonic()
        rate = self.done_bytes / 1e6 / max(self._said - self._began, 1e-9)
        self._say(f"prepare: host={self._host} shares={self.shares} mb={self.done_bytes / 1e6:.1f} mb_per_s={rate:.1f}")
