"""Real processes over gloo for engine tests: started once, given one function after another.

They come from a fork server that has imported torch and transformers, so a world costs its forks only.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.engine.preload"])
PATIENCE = 180  # seconds for one function on a busy machine


class Died(Exception):
    """A process of the world was killed while it ran a function."""


class World:
    """`size` processes that form a torch.distributed job for each function they are given."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` in every process; gives what each returned, by rank."""
        if not self._ranks:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            for _, pipe in self._ranks:
                pipe.send((function, args, str(Path(folder) / "store")))
            answers: dict[int, Any] = {}
            while len(answers) < self.size:
                left: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
                ready: list[Any] = wait(left, timeout=PATIENCE)
                try:
                    if not ready:
                        raise TimeoutError(f"ranks {sorted(left.values())} gave no answer in {PATIENCE} s")
                    for pipe in ready:
                        answers[left[pipe]] = pipe.recv()
                except (EOFError, ConnectionError, TimeoutError) as error:
                    self.stop()
                    raise error if isinstance(error, TimeoutError) else Died from None
                if any(not fine for fine, _ in answers.values()):
                    self.stop()  # the others may wait for the one that failed
                    raise AssertionError("\n".join(f"rank {r}: {a}" for r, (fine, a) in answers.items() if not fine))
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, self.size, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(rank: int, size: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            function, args, store = pipe.recv()
        except EOFError:
            return
        os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        dist.barrier()  # who fails at once must not close connections that others still make
        try:
            answer = True, function(rank, *args)
        except BaseException:  # told to the test, which fails with it
            answer = False, traceback.format_exc()
        pipe.send(answer)
        if answer[0]:
            dist.destroy_process_group()
