"""All pods of a job begin together, and if one is lost all begin again.

Kubernetes replaces a pod without telling the other pods, whose processes would wait for a process
that no longer exists. So each pod holds a connection to the first pod: the first says `go` when all
are there, and `bye` when all are done. A connection that ends earlier means that a pod is lost.
Standard library only: no package is there yet.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable

RETRY_SECONDS = 1.0
SAY_SECONDS = 60.0
RESTART_STATUS = 75
"""Exit status of a pod that ends because another one is lost (EX_TEMPFAIL of sysexits.h)."""


class Gang:
    """The pods of a job. If one is lost, `on_loss` is called once, in a thread, and must return."""

    def __init__(
        self, rank: int, hosts: int, place: tuple[str, int], say: Callable[[str], object]
    ) -> None:
        """`place`: host and port of the first pod."""
        self.rank, self.hosts, self.place, self._say = rank, hosts, place, say
        self.on_loss: Callable[[str], object] = lambda _reason: None
        self._done: set[int] = set()
        self._changed = threading.Condition()
        self._peers: dict[int, socket.socket] = {}
        self._is_over = self._is_lost = False
        self._bye = threading.Event()

    def begin(self) -> None:
        """Wait until all pods are there."""
        if self.hosts == 1:
            return
        if self.rank:
            self._join()
        else:
            self._gather()

    def end(self) -> None:
        """Wait until all pods are done, each with its results stored."""
        if self.hosts == 1:
            return
        if self.rank:
            with contextlib.suppress(OSError):  # `_follow` sees that the first pod is lost
                self._peers[0].sendall(b"done\n")
            self._bye.wait()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._is_lost or len(self._done) == self.hosts - 1)
            if self._is_lost:
                return
            self._is_over = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.sendall(b"bye\n")

    # ---- the first pod
    def _gather(self) -> None:
        server = self._listen()
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        said_at = time.monotonic()
        with self._changed:
            while len(self._peers) < self.hosts - 1:
                self._changed.wait(RETRY_SECONDS)
                if time.monotonic() - said_at > SAY_SECONDS:
                    said_at = time.monotonic()
                    self._say(f"{len(self._peers) + 1} of {self.hosts} pods are there")
            peers = list(self._peers.items())
        for rank, peer in peers:
            with contextlib.suppress(OSError):  # its loss is seen by the thread that reads from it
                peer.sendall(b"go\n")
            threading.Thread(target=self._hear, args=(rank, peer), daemon=True).start()

    def _listen(self) -> socket.socket:
        while True:
            try:
                return socket.create_server(self.place, backlog=2048)
            except OSError as error:  # its own name may not resolve yet
                self._say(f"the first pod cannot listen yet ({error})")
                time.sleep(RETRY_SECONDS)

    def _accept(self, server: socket.socket) -> None:
        while True:
            peer, _ = server.accept()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.settimeout(10)
            try:
                text = peer.makefile("rb").readline().decode()
                rank = int(text.split()[1]) if text.startswith("smtrain ") else 0
            except (OSError, ValueError, IndexError):
                rank = 0
            if not 0 < rank < self.hosts:
                peer.close()
                continue
            peer.settimeout(None)
            with self._changed:
                has_begun = len(self._peers) == self.hosts - 1
                self._peers[rank] = peer if not has_begun else self._peers[rank]
                self._changed.notify_all()
            if has_begun:
                self._lose(f"pod {rank} was replaced")

    def _hear(self, rank: int, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if peer.makefile("rb").readline() == b"done\n":
                with self._changed:
                    self._done.add(rank)
                    self._changed.notify_all()
                peer.recv(1)  # it stays until `bye`
        self._lose(f"pod {rank} is lost")

    # ---- any other pod
    def _join(self) -> None:
        said_at = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                peer = socket.create_connection(self.place, timeout=10)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                peer.sendall(f"smtrain {self.rank}\n".encode())
                peer.settimeout(None)
                lines = peer.makefile("rb")
                if lines.readline() == b"go\n":
                    self._peers[0] = peer
                    threading.Thread(target=self._follow, args=(lines,), daemon=True).start()
                    return
            if time.monotonic() - said_at > SAY_SECONDS:
                said_at = time.monotonic()
                self._say("waiting for the first pod")
            time.sleep(RETRY_SECONDS)

    def _follow(self, lines: object) -> None:
        with contextlib.suppress(OSError):
            if lines.readline() == b"bye\n":  # type: ignore[attr-defined]
                self._bye.set()
                return
        self._lose("the first pod is lost")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
        self.on_loss(reason)
        with self._changed:
            self._is_lost = True
            self._changed.notify_all()
        self._bye.set()


def stop_tree(parent: int, children: Callable[[int], list[int]]) -> None:
    """Kill all processes below one, so that nothing writes to its folders any more."""
    for child in children(parent):
        stop_tree(child, children)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
