"""A preparation on several machines: the first collects all pieces in order, the others assist."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.cluster import wire
from smtrain.worker.data.prepare.cluster.coordinator import Coordinator, MeetingPoint
from smtrain.worker.data.prepare.cluster.dealer import Dealer
from smtrain.worker.data.prepare.cluster.shares import Share, spans_of
from smtrain.worker.data.prepare.cluster.wire import quick, receive, send
from smtrain.worker.data.prepare.cluster.working import ShareSource, ShareWork, do_shares
from smtrain.worker.data.prepare.progress import LINE_SECONDS
from smtrain.worker.data.read.hub import commits_of, floating
from smtrain.worker.data.read.sources import SourceFile
from smtrain.worker.data.tokenize.encoder import MismatchError


@contextmanager
def open_coordinator(
    machines: MeetingPoint | None, sources: Sequence[object], say: Callable[[str], None]
) -> Iterator[tuple[Coordinator | None, dict[str, str]]]:
    """The first machine's coordinator, and the commits at which all machines read hub datasets: looked up once.

    For a single machine (None) there is no coordinator, and the sources look up commits themselves.
    """
    if machines is None:
        yield None, {}
        return
    commits = commits_of(sources)
    coordinator = Coordinator(machines, say, commits)
    try:
        yield coordinator, commits
    finally:
        coordinator.close()


def agreed_commits(machines: MeetingPoint, sources: Sequence[object]) -> dict[str, str]:
    """The commits at which the first machine reads hub datasets; it is asked only if a path names none."""
    if not floating(sources):
        return {}
    with _connect(machines) as line:
        try:
            send(line, {"what": "commits"})
            answer = receive(line)
        except (OSError, ValueError):
            answer = None
    if answer is None or not isinstance(answer[0].get("commits"), dict):
        raise _gone(machines)
    return {str(uri): str(commit) for uri, commit in answer[0]["commits"].items()}


class LostError(DataError):
    """The first machine is gone."""


class EndedError(Exception):
    """The first machine has all shares; work in progress is not needed."""


def _connect(machines: MeetingPoint) -> socket.socket:
    """Connect to the first machine. Raises LostError if it does not answer in time."""
    deadline = time.monotonic() + machines.comes_within
    while True:
        try:
            line = socket.create_connection(machines.address, timeout=60)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or type(error).__name__
                raise LostError(
                    f"{machines.name}, where the job's first machine listens, cannot be reached ({why}); "
                    "let the job's machines reach one another (security group), and see the log of the first."
                ) from None
            time.sleep(0.2)
    line.settimeout(None)
    quick(line)
    return line


def _gone(machines: MeetingPoint) -> LostError:
    return LostError(f"{machines.name}, the job's first machine, is gone; its log says why. Start the job again.")


class _LocalShares:
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


class _RemoteShares:
    """The first machine's shares, for another machine: everything goes over a TCP connection.

    `encoder` is told the name of the encoder to use.
    """

    def __init__(
        self, machines: MeetingPoint, hello: dict[str, Any], pack: Callable[[Any], bytes],
        encoder: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Raises LostError if the first machine does not answer in time."""
        self._machines, self._pack, self._encoder = machines, pack, encoder
        self._epochs: dict[int, int] = {}
        self._line = _connect(machines)
        self._ended = False
        self._tell(hello)

    def _tell(self, message: dict[str, Any], payload: bytes = b"") -> None:
        try:
            send(self._line, message, payload)
        except OSError:
            raise _gone(self._machines) from None

    def _share_tell(self, number: int, what: str, payload: bytes = b"", **more: Any) -> None:
        """Send a message about a share. Raises EndedError if the first machine has said that it is the end."""
        # only the end comes without a request
        if select.select([self._line], [], [], 0)[0] and "end" in self._answer():
            raise EndedError
        self._tell({"what": what, "number": number, "epoch": self._epochs[number], **more}, payload)

    def _answer(self) -> dict[str, Any]:
        try:
            answer = receive(self._line)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            raise _gone(self._machines)
        return answer[0]

    def take(self, wait: bool) -> Share | None:
        while not self._ended:
            self._tell({"what": "take", "wait": wait})
            answer = self._answer()
            if "refused" in answer:
                raise DataError(f"the first machine has turned this one away: {answer['refused']}.")
            if "end" in answer:
                self._ended = True
            elif "again" not in answer:
                if "number" not in answer:
                    return None
                self._encoder(answer["encoder"])
                self._epochs[answer["number"]] = answer["epoch"]
                return Share(answer["number"], answer["part"], tuple(spans_of(answer["spans"])), answer["bytes"])
        return None

    def add(self, number: int, piece: Any) -> None:
        self._share_tell(number, "piece", self._pack(piece))

    def done(self, number: int) -> None:
        self._share_tell(number, "done")

    def fault(self, number: int, error: DataError | MismatchError) -> None:
        self._share_tell(number, "fault", reason=str(error), mismatch=isinstance(error, MismatchError))

    def close(self) -> None:
        with suppress(OSError):
            self._line.close()


class _Reporting:
    """A source that reports now and then how fast its machine is."""

    def __init__(self, source: ShareSource, host: str, say: Callable[[str], None]) -> None:
        self._source, self._host, self._say = source, host, say
        self._began = self._said = time.monotonic()
        self._bytes: dict[int, int] = {}
        self.shares = self.done_bytes = 0

    def take(self, wait: bool) -> Share | None:
        share = self._source.take(wait)
        if share is not None:
            self._bytes[share.number] = share.bytes
        return share

    def add(self, number: int, piece: Any) -> None:
        self._source.add(number, piece)

    def done(self, number: int) -> None:
        self._source.done(number)
        self.shares += 1
        self.done_bytes += self._bytes.pop(number)
        if time.monotonic() - self._said >= LINE_SECONDS:
            self.tell()

    def fault(self, number: int, error: DataError | MismatchError) -> None:
        self._source.fault(number, error)

    def tell(self) -> None:
        self._said = time.monotonic()
        rate = self.done_bytes / 1e6 / max(self._said - self._began, 1e-9)
        self._say(f"prepare: host={self._host} shares={self.shares} mb={self.done_bytes / 1e6:.1f} mb_per_s={rate:.1f}")


def collect_shares(
    coordinator: Coordinator, dealer: Dealer, encoder: str, work: ShareWork, kind: type[Any],
    files: Sequence[SourceFile], before: Callable[[Share], None], take: Callable[[Any], None],
    after: Callable[[Share], None], waiting: Callable[[], None], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Have all shares done, by this machine's cores too, and pass their pieces to `take` in the order of the text.

    `before` and `after` are called for every share, `waiting` now and then until the next one is there. The error of a
    share is raised when its turn comes.
    """
    local = _LocalShares(dealer, {file: number for number, file in enumerate(files)})
    source = _Reporting(local, socket.gethostname(), say)

    def own() -> None:
        try:
            do_shares(source, work)
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
    coordinator.deal(dealer, encoder)
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
        source.tell()


def _pieces(path: Path, kind: type[Any], files: Sequence[SourceFile]) -> Any:
    try:
        yield from wire.read_pieces(path, kind, files)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"{path} is not what a machine has handed in ({error}); start again.") from None


def assist_coordinator(
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
    remote = _RemoteShares(machines, hello, lambda piece: wire.pack(piece, number_of), encoder)
    source = _Reporting(remote, host, say)
    try:
        return do_shares(source, work)
    except EndedError:
        return source.shares
    finally:
        source.tell()
        remote.close()
