"""The line between the first machine and the others: TCP, a JSON header and bytes a message, nothing that is run.

Like the rendezvous of the training it is for the job's own network: whoever reaches the port can hand in tokens, but a
machine with other text, another tokenizer or other settings is turned away.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from smtrain.data.cluster import wire
from smtrain.data.cluster.dealer import Dealer
from smtrain.data.cluster.shares import Share, spans_of
from smtrain.data.encoder import MismatchError
from smtrain.errors import DataError

_HEAD = struct.Struct("<IQ")
COMES_WITHIN = 900.0
"""Seconds that a machine tries to reach the first one, which may still list the text."""
LEAVES_WITHIN = 300.0


class LostError(DataError):
    """The first machine is gone."""


class EndedError(Exception):
    """The first machine has all it needs; what is under way is for nothing."""


def _quick(line: socket.socket) -> None:
    """Small messages go at once, and a machine that is gone without a word is noticed in the end."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send(line: socket.socket, message: dict[str, Any], payload: bytes = b"") -> None:
    """One message. Raises OSError."""
    head = json.dumps(message).encode()
    line.sendall(_HEAD.pack(len(head), len(payload)) + head)
    if payload:
        line.sendall(payload)


def receive(line: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None at the end. Raises OSError, or ValueError for what is none."""
    raw = _exactly(line, _HEAD.size)
    if raw is None:
        return None
    head, size = _HEAD.unpack(raw)
    if head > 1 << 24 or size > wire.LARGEST:
        raise ValueError("not a message")
    about, payload = _exactly(line, head), _exactly(line, size)
    if about is None or payload is None:
        return None
    found = json.loads(about)
    if not isinstance(found, dict):
        raise ValueError("not a message")
    return found, payload


def _exactly(line: socket.socket, count: int) -> bytes | None:
    buffer = bytearray(count)
    view = memoryview(buffer)
    while view:
        got = line.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(buffer)


class Desk:
    """Listens for the other machines on the first one; `dealer` may change when everything begins again."""

    def __init__(self, address: tuple[str, int], settings: str, say: Callable[[str], None]) -> None:
        """`settings` are what every machine must have. Raises DataError where the address cannot be had."""
        self._settings, self._say = settings, say
        self._dealer: Dealer | None = None
        self._encoder, self._epoch = "", 0
        self._open = threading.Condition()
        self._lines: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._closed, self._came = False, 0
        try:
            self._server = socket.create_server(address, backlog=1024)
        except OSError as error:
            raise DataError(
                f"{address[0]}:{address[1]}, where the machines of this job meet, cannot be listened on "
                f"({error.strerror}); end what has that port."
            ) from None
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        threading.Thread(target=self._listen, name="desk", daemon=True).start()

    def deal(self, dealer: Dealer, encoder: str) -> None:
        """From now on these shares, encoded by the encoder of that name."""
        with self._open:
            before, self._dealer = self._dealer, dealer
            self._encoder, self._epoch = encoder, self._epoch + 1
            self._open.notify_all()
        if before is not None:
            before.end()

    def _listen(self) -> None:
        number = 1
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            number += 1
            thread = threading.Thread(target=self._serve, args=(line, number), name=f"line-{number}", daemon=True)
            self._lines[number] = line, thread
            thread.start()

    def _serve(self, line: socket.socket, number: int) -> None:
        name, host = f"{number}", ""
        dealer: Dealer | None = None
        with line:
            _quick(line)
            try:
                found = receive(line)
                if found is None:
                    return
                hello = found[0]
                if hello.get("settings") != self._settings:
                    why = "it has other text, another tokenizer, another smtrain or other settings than the first one"
                    self._say(f"prepare: {hello.get('host')} was turned away: {why}")
                    send(line, {"refused": why})
                    return
                host, ahead = str(hello["host"]), int(hello["shares"])
                while True:
                    with self._open:
                        while self._dealer is None and not self._closed:
                            self._open.wait()
                        if self._dealer is None:
                            return
                        self._came += dealer is None
                        self._open.notify_all()
                        if dealer is not self._dealer:
                            if dealer is not None:
                                dealer.lost(name)
                            dealer = self._dealer
                            dealer.join(name, ahead)
                        epoch, encoder = self._epoch, self._encoder
                    if not self._answer(line, dealer, name, epoch, encoder):
                        break
            except (OSError, ValueError, KeyError, TypeError):
                pass
            finally:
                if dealer is not None:
                    if not dealer.ended:
                        self._say(f"prepare: {host} is gone; its shares go to the others")
                    dealer.lost(name)

    def _answer(self, line: socket.socket, dealer: Dealer, name: str, epoch: int, encoder: str) -> bool:
        """Take one message and answer it; whether there may be another."""
        found = receive(line)
        if found is None:
            return False
        asked, payload = found
        what = asked.get("what")
        if what == "take":
            share = dealer.take(name, bool(asked["wait"]))
            if share is None and asked["wait"]:
                if dealer is not self._dealer:  # it begins again with another
                    send(line, {"again": True})
                    return True
                send(line, {"end": True})
                return True
            send(
                line,
                {} if share is None else {
                    "number": share.number, "part": share.part, "spans": share.as_json(), "bytes": share.bytes,
                    "epoch": epoch, "encoder": encoder,
                },
            )  # fmt: skip
        elif asked.get("epoch") == epoch:
            try:
                if what == "piece":
                    dealer.add(name, asked["number"], payload)
                elif what == "done":
                    dealer.done(name, asked["number"])
                elif what == "fault":
                    kind = MismatchError if asked["mismatch"] else DataError
                    dealer.fault(name, asked["number"], kind(asked["reason"]))
            except OSError as error:  # this machine's own disk
                dealer.fail(error)
                return False
        return True

    def finish(self, others: int, within: float) -> None:
        """All is done: wait, at most so many seconds, until so many other machines have come, so that each hears it."""
        if self._dealer is not None:
            self._dealer.end()
        with self._open:
            self._open.wait_for(lambda: self._came >= others, within)

    def close(self) -> None:
        """Tell all that it is the end, and let them go."""
        with self._open:
            self._closed = True
            if self._dealer is not None:
                self._dealer.end()
            self._open.notify_all()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # or accept() would go on waiting
        self._server.close()
        deadline = time.monotonic() + LEAVES_WITHIN
        for line, thread in list(self._lines.values()):
            with suppress(OSError):  # whoever is in the middle of a share need not finish it
                send(line, {"end": True})
            thread.join(max(0.0, deadline - time.monotonic()))


class DeskLine:
    """The table of another machine than the first: everything goes over its line."""

    def __init__(
        self, address: tuple[str, int], hello: dict[str, Any], pack: Callable[[Any], bytes],
        encoder: Callable[[str], None], within: float = COMES_WITHIN,
    ) -> None:  # fmt: skip
        """Reach the first machine within so many seconds; `encoder` hears by which name it encodes.

        Raises LostError where nobody is there.
        """
        self._pack, self._encoder, self._hello = pack, encoder, hello
        self._epochs: dict[int, int] = {}
        self._where = f"{address[0]}:{address[1]}"
        deadline = time.monotonic() + within
        while True:
            try:
                self._line = socket.create_connection(address, timeout=60)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LostError(
                        f"{self._where}, where the job's first machine listens, cannot be reached ({first(error)}); "
                        "let the job's machines reach one another (security group), and see the log of the first."
                    ) from None
                time.sleep(0.2)
        self._line.settimeout(None)
        _quick(self._line)
        self._ended = False
        self._tell(hello)

    def _tell(self, message: dict[str, Any], payload: bytes = b"") -> None:
        try:
            send(self._line, message, payload)
        except OSError:
            raise self._gone() from None

    def _share_tell(self, number: int, what: str, payload: bytes = b"", **more: Any) -> None:
        """Raises EndedError where the first machine has said that it is the end."""
        if select.select([self._line], [], [], 0)[0]:  # nothing else comes unasked
            found = self._answer()
            if "end" in found:
                raise EndedError
        self._tell({"what": what, "number": number, "epoch": self._epochs[number], **more}, payload)

    def _answer(self) -> dict[str, Any]:
        try:
            found = receive(self._line)
        except (OSError, ValueError):
            found = None
        if found is None:
            raise self._gone()
        return found[0]

    def _gone(self) -> LostError:
        return LostError(f"{self._where}, the job's first machine, is gone; its log says why. Start the job again.")

    def take(self, wait: bool) -> Share | None:
        while not self._ended:
            self._tell({"what": "take", "wait": wait})
            said = self._answer()
            if "refused" in said:
                raise DataError(f"the first machine has turned this one away: {said['refused']}.")
            if "end" in said:
                self._ended = True
            elif "again" not in said:
                if "number" not in said:
                    return None
                self._encoder(said["encoder"])
                self._epochs[said["number"]] = said["epoch"]
                return Share(said["number"], said["part"], tuple(spans_of(said["spans"])), said["bytes"])
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


def first(error: OSError) -> str:
    """What the system says of it."""
    return error.strerror or type(error).__name__
