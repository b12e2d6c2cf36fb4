"""The two sides of a preparation on several machines: the first puts all pieces in order, the others help."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.cluster import wire
from smtrain.worker.data.prepare.cluster.dealer import STRAGGLES_S, Dealer
from smtrain.worker.data.prepare.cluster.desk import LEAVES_WITHIN, Desk
from smtrain.worker.data.prepare.cluster.line import COMES_WITHIN, DeskLine, EndedError, ask_commits
from smtrain.worker.data.prepare.cluster.shares import SHARE_BYTES, Share
from smtrain.worker.data.prepare.cluster.working import ShareWork, Table, do_shares
from smtrain.worker.data.prepare.progress import LINE_SECONDS
from smtrain.worker.data.read.hub import commits_of, floating
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.tokenize.encoder import MismatchError


@dataclass(frozen=True)
class MeetingPoint:
    """Where the `count` machines of a preparation meet, and how its text is dealt: shares of about `share_bytes`."""

    address: tuple[str, int]
    count: int = 1
    share_bytes: int | None = None
    straggles_s: float = STRAGGLES_S
    comes_within: float = COMES_WITHIN
    leaves_within: float = LEAVES_WITHIN

    @property
    def size(self) -> int:
        """Of a share, in bytes."""
        return self.share_bytes or SHARE_BYTES


@contextmanager
def open_desk(
    machines: MeetingPoint | None, sources: Sequence[object], say: Callable[[str], None]
) -> Iterator[tuple[Desk | None, dict[str, str]]]:
    """The first machine's desk, and the commits at which all machines read data sets of the hub: asked for once.

    Of one machine (None) there is no desk, and the sources ask for themselves.
    """
    if machines is None:
        yield None, {}
        return
    commits = commits_of(sources)
    desk = Desk(machines.address, say, commits)
    try:
        yield desk, commits
    finally:
        desk.close()


def agreed_commits(machines: MeetingPoint, sources: Sequence[object]) -> dict[str, str]:
    """The commits at which the first machine reads them; it is asked only where a path leaves one open."""
    return ask_commits(machines.address, machines.comes_within) if floating(sources) else {}


class _Own:
    """The dealer as the table of the first machine's own cores."""

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
    """Have all shares done, by this machine's cores too, and give `take` their pieces in the order of the text.

    `before` and `after` hear of every share, `waiting` is called now and then while the next one is not there.
    Raises what a share's text is at fault with, when its turn comes.
    """
    own_table = _Own(dealer, {file: number for number, file in enumerate(files)})
    table = _Counted(own_table, socket.gethostname(), say)

    def own() -> None:
        try:
            do_shares(table, work)
        except BaseException as error:  # raised where the shares are waited for
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
    """Do shares for the first machine until it has all; how many were done here.

    `encoder` is told by which name it encodes, and raises DataError for one that this machine has not. Raises DataError
    where the first machine cannot be reached, is gone, or turns this one away.
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
    """A table whose machine says now and then how fast it is."""

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
