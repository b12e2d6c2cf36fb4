"""Real processes over gloo for engine tests: started once, they run one function after another.

A fork server that has imported torch and transformers forks them.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

CONTEXT = mp.get_context("forkserver")
# A process has one fork server, and the last list that was set before it started counts: this is
# the only one.
CONTEXT.set_forkserver_preload(["tests.worker.engine.preload"])
PATIENCE = 180  # seconds for one function on a busy machine


class Died(Exception):
    """A process of the world was killed while it ran a function."""


class World:
    """`size` processes that form a torch.distributed job for each function they are given.

    On the device `neuron` (tests/worker/engine/neuron), on the CPU, or all on one GPU: then their
    messages go through the host.
    """

    def __init__(
        self,
        size: int,
        device: Literal["cpu", "neuron", "cuda"] = "cpu",
        is_through_host: bool = False,
    ) -> None:
        self.size, self.device = size, device
        self.is_through_host = is_through_host or device == "cuda"
        self._ranks: list[tuple[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._numbers = itertools.count()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(rank, *args)` in every process; returns the results by rank."""
        folder = self._started()
        store = str(folder / f"store-{next(self._numbers)}")
        for _, pipe in self._ranks:
            pipe.send((function, args, store))
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            left: dict[Any, int] = {
                pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers
            }
            ready: list[Any] = wait(left, timeout=PATIENCE)
            try:
                if not ready:
                    stacks = self._stacks(sorted(left.values()), folder)
                    raise TimeoutError(
                        f"ranks {sorted(left.values())} gave no answer in {PATIENCE} s\n{stacks}"
                    )
                for pipe in ready:
                    answers[left[pipe]] = pipe.recv()
            except (EOFError, ConnectionError, TimeoutError) as error:
                self.stop()
                raise error if isinstance(error, TimeoutError) else Died from None
            if any(not fine for fine, _ in answers.values()):
                self.stop()  # the rest may wait for the one that failed
                raise AssertionError(
                    "\n".join(f"rank {r}: {a}" for r, (fine, a) in answers.items() if not fine)
                )
        return [answers[rank][1] for rank in range(self.size)]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    def _started(self) -> Path:
        """Start the processes; returns their folder, which a closing store still reads."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
            for rank in range(self.size):
                ours, theirs = CONTEXT.Pipe()
                stacks = Path(self._folder.name) / f"stacks-{rank}"
                process = CONTEXT.Process(
                    target=_serve,
                    args=(rank, self.size, self.device, self.is_through_host, theirs, stacks),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
        return Path(self._folder.name)

    def _stacks(self, ranks: list[int], folder: Path) -> str:
        """The stacks of these ranks."""
        for rank in ranks:
            os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(2)
        return "\n".join(
            f"rank {rank}: {(folder / f'stacks-{rank}').read_text()}" for rank in ranks
        )


def _serve(
    rank: int, size: int, device: str, is_through_host: bool, pipe: Connection, stacks: Path
) -> None:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if device == "neuron":
        from tests.worker.engine.neuron import imitation

        imitation.start()
        backend = "neuron"
    elif is_through_host:
        from tests.worker.engine import through_host

        through_host.register(device)
        backend = through_host.NAME

    torch.set_num_threads(1)
    file = open(stacks, "w")  # noqa: SIM115 - as long as the process
    faulthandler.register(signal.SIGUSR1, file)
    while True:
        try:
            function, args, store = pipe.recv()
        except EOFError:
            return
        os.environ["LOCAL_RANK"] = "0" if device == "cuda" else str(rank)
        dist.init_process_group(
            backend, store=dist.FileStore(store, size), rank=rank, world_size=size
        )
        if device == "neuron":
            imitation.start()  # the limits of the last function do not hold
            torch.accelerator.set_device_index(rank)
        # a rank that fails at once must not close connections that another still opens
        dist.barrier()
        try:
            answer = True, function(rank, *args)
        except BaseException:  # the test fails with it
            answer = False, traceback.format_exc()
        pipe.send(answer)
        if answer[0]:
            dist.destroy_process_group()
