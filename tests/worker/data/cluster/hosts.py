"""Several machines as threads of this process; each can be ended on demand."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.prepare.cluster import working
from smtrain.worker.data.prepare.cluster.coordinator import MeetingPoint
from smtrain.worker.data.prepare.prepare import assist, prepare
from smtrain.worker.data.prepare.prepare_options import PrepareOptions


class KilledError(BaseException):
    """The error that ends a machine."""


def free_address() -> tuple[str, int]:
    """A loopback address that no other test uses, with a free port."""
    host = f"127.{random.SystemRandom().randrange(1, 255)}.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    with socket.create_server((host, 0)) as server:
        return host, server.getsockname()[1]


def on_machines(
    count: int, sources: list[Path], out: Path, tokenizer: Path, options: PrepareOptions, *, share_bytes: int = 512,
    progress: Callable[[Any], None] = lambda _: None, say: Callable[[str], None] = lambda _: None,
    other: Callable[[Callable[[], object]], object] = lambda run: run(),
    address: tuple[str, int] | None = None, first: Callable[..., DatasetManifest] = prepare,
    others: Callable[..., int] = assist,
) -> DatasetManifest:  # fmt: skip
    """Prepare `sources` on `count` machines; all but the first run inside `other`."""
    machines = MeetingPoint(address or free_address(), count, share_bytes, leaves_within=60)
    faults: list[BaseException] = []

    def help_() -> None:
        try:
            other(lambda: others(sources, tokenizer, options, machines, say=lambda _: None))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=help_) for _ in range(count - 1)]
    for thread in threads:
        thread.start()
    try:
        made = first(sources, out, tokenizer, options, machines=machines, progress=progress, say=say)
    except BaseException:
        _nobody_is_there(machines.address, threads)
        raise
    for thread in threads:
        thread.join()
    unexpected = [fault for fault in faults if not isinstance(fault, KilledError)]
    if unexpected:
        raise unexpected[0]
    return made


def _nobody_is_there(address: tuple[str, int], others: list[threading.Thread]) -> None:
    """Close all connections, as the first machine has ended."""
    with socket.create_server(address) as server:
        server.settimeout(0.05)
        while any(thread.is_alive() for thread in others):
            try:
                server.accept()[0].close()
            except TimeoutError:
                pass


def ends_after(patch: Any, draw: random.Random) -> None:
    """Make some machines, not the first, end in the middle of a share."""
    real = working.do_shares

    def mortal(table: Any, work: working.ShareWork) -> int:
        if threading.current_thread().name != "own-shares" and draw.random() < 0.7:
            left = draw.randrange(6)
            add = table.add

            def dying(number: int, piece: Any) -> None:
                nonlocal left
                left -= 1
                if left < 0:
                    raise KilledError
                add(number, piece)

            table.add = dying
        return real(table, work)

    patch.setattr("smtrain.worker.data.prepare.cluster.coordination.do_shares", mortal)


def until_done(
    draw: random.Random, run: Callable[[Callable[[Any], None]], object], after: list[int], times: int
) -> None:
    """Call `run(progress)` until it succeeds; interrupt the first `times` calls after some blocks."""
    for attempt in range(200):
        left = draw.choice(after) if attempt < times else 1 << 30

        def stop(_: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise InterruptedError

        try:
            run(stop)
            return
        except InterruptedError:
            pass
    raise AssertionError("it never ends")
