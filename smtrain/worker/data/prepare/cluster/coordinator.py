"""The first machine's server: the others ask it for shares and hand in the results.

Like the rendezvous of the training it is for the job's own network: any process that reaches the port can hand in
tokens, but a machine with other text, another tokenizer or other settings is turned away.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.cluster.dealer import STRAGGLES_S, Dealer
from smtrain.worker.data.prepare.cluster.shares import SHARE_BYTES
from smtrain.worker.data.prepare.cluster.wire import quick, receive, send
from smtrain.worker.data.tokenize.encoder import MismatchError

LEAVES_WITHIN = 300.0
"""Seconds that the others may take to hear of the end."""


@dataclass(frozen=True)
class MeetingPoint:
    """The address at which the `count` machines of a preparation meet, the size of shares, and time limits."""

    address: tuple[str, int]
    count: int = 1
    share_bytes: int | None = None
    straggles_s: float = STRAGGLES_S
    comes_within: float = 900.0
    """Seconds that a machine tries to reach the first one, which may still list the text."""
    leaves_within: float = LEAVES_WITHIN

    @property
    def name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def size(self) -> int:
        return self.share_bytes or SHARE_BYTES


class Coordinator:
    """Listens for the other machines; gets another dealer when everything begins again."""

    def __init__(self, machines: MeetingPoint, say: Callable[[str], None], commits: Mapping[str, str]) -> None:
        """Tell `commits` of hub datasets to machines that ask. Raises DataError if the address is taken."""
        self.machines = machines
        self._commits, self._say = dict(commits), say
        self._settings: str | None = None
        self._dealer: Dealer | None = None
        self._encoder, self._epoch = "", 0
        self._open = threading.Condition()
        self._lines: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._closed, self._came = False, 0
        try:
            self._server = socket.create_server(machines.address, backlog=1024)
        except OSError as error:
            raise DataError(
                f"{machines.name}, where the machines of this job meet, cannot be listened on "
                f"({error.strerror}); end what has that port."
            ) from None
        threading.Thread(target=self._listen, name="coordinator", daemon=True).start()

    def expect(self, settings: str) -> None:
        """Set the digest that every machine must have; machines that came earlier have waited for it."""
        with self._open:
            self._settings = settings
            self._open.notify_all()

    def deal(self, dealer: Dealer, encoder: str) -> None:
        """Deal these shares from now on, encoded by the encoder of that name."""
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
            with self._open:  # close() ends the lines that are there, and waits for their threads
                if self._closed:
                    line.close()
                    return
                number += 1
                thread = threading.Thread(target=self._serve, args=(line, number), name=f"line-{number}", daemon=True)
                self._lines[number] = line, thread
                thread.start()

    def _serve(self, line: socket.socket, number: int) -> None:
        name, host = f"{number}", ""
        dealer: Dealer | None = None
        with line:
            quick(line)
            try:
                received = receive(line)
                if received is None:
                    return
                hello = received[0]
                if hello.get("what") == "commits":
                    send(line, {"commits": self._commits})
                    return
                with self._open:
                    while self._settings is None and not self._closed:
                        self._open.wait()
                if self._settings is None:
                    return
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
        """Take one message and answer it; False after the last."""
        received = receive(line)
        if received is None:
            return False
        request, payload = received
        what = request.get("what")
        if what == "take":
            share = dealer.take(name, bool(request["wait"]))
            if share is None and request["wait"]:
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
        elif request.get("epoch") == epoch:
            try:
                if what == "piece":
                    dealer.add(name, request["number"], payload)
                elif what == "done":
                    dealer.done(name, request["number"])
                elif what == "fault":
                    kind = MismatchError if request["mismatch"] else DataError
                    dealer.fault(name, request["number"], kind(request["reason"]))
            except OSError as error:  # this machine's own disk
                dealer.fail(error)
                return False
        return True

    def finish(self) -> None:
        """End the dealing, and give the other machines time to come and hear of it."""
        if self._dealer is not None:
            self._dealer.end()
        with self._open:
            self._open.wait_for(lambda: self._came >= self.machines.count - 1, self.machines.leaves_within)

    def close(self) -> None:
        """Tell all machines that it is the end, and close their lines."""
        with self._open:
            self._closed = True
            if self._dealer is not None:
                self._dealer.end()
            self._open.notify_all()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # or accept() would keep waiting
        self._server.close()
        deadline = time.monotonic() + LEAVES_WITHIN
        for line, thread in list(self._lines.values()):
            with suppress(OSError):  # a machine in the middle of a share need not finish it
                send(line, {"end": True})
            thread.join(max(0.0, deadline - time.monotonic()))
