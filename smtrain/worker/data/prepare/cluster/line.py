"""The connection of another machine to the first one's desk (desk.py)."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.cluster.shares import Share, spans_of
from smtrain.worker.data.prepare.cluster.wire import quick, receive, send
from smtrain.worker.data.tokenize.encoder import MismatchError


class LostError(DataError):
    """The first machine is gone."""


class EndedError(Exception):
    """The first machine has all shares; work in progress is not needed."""


def reach(address: tuple[str, int], within: float) -> socket.socket:
    """Connect to the first machine. Raises LostError if it does not answer for so many seconds."""
    deadline = time.monotonic() + within
    while True:
        try:
            line = socket.create_connection(address, timeout=60)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = error.strerror or type(error).__name__
                raise LostError(
                    f"{address[0]}:{address[1]}, where the job's first machine listens, cannot be reached ({why}); "
                    "let the job's machines reach one another (security group), and see the log of the first."
                ) from None
            time.sleep(0.2)
    line.settimeout(None)
    quick(line)
    return line


def _gone(address: tuple[str, int]) -> LostError:
    return LostError(
        f"{address[0]}:{address[1]}, the job's first machine, is gone; its log says why. Start the job again."
    )


def ask_commits(address: tuple[str, int], within: float) -> dict[str, str]:
    """The commits at which the first machine reads hub datasets. Raises LostError if it does not answer."""
    with reach(address, within) as line:
        try:
            send(line, {"what": "commits"})
            answer = receive(line)
        except (OSError, ValueError):
            answer = None
    if answer is None or not isinstance(answer[0].get("commits"), dict):
        raise _gone(address)
    return {str(uri): str(commit) for uri, commit in answer[0]["commits"].items()}


class DeskLine:
    """The first machine's shares, for another machine: everything goes over a TCP connection.

    `encoder` is told the name of the encoder to use.
    """

    def __init__(
        self, address: tuple[str, int], hello: dict[str, Any], pack: Callable[[Any], bytes],
        encoder: Callable[[str], None], within: float,
    ) -> None:  # fmt: skip
        """Raises LostError if the first machine does not answer for `within` seconds."""
        self._pack, self._encoder, self._hello = pack, encoder, hello
        self._epochs: dict[int, int] = {}
        self._address = address
        self._line = reach(address, within)
        self._ended = False
        self._tell(hello)

    def _tell(self, message: dict[str, Any], payload: bytes = b"") -> None:
        try:
            send(self._line, message, payload)
        except OSError:
            raise _gone(self._address) from None

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
            raise _gone(self._address)
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
