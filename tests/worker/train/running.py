"""Stage train in the processes of a world, which need no start of Python: importable by them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.engine.native import NativeEngine


def run(
    rank: int, root: Path, config: dict[str, Any], strike: tuple[str, int, int] | None = None
) -> None:
    """Train in the folder `root`; `strike` (method, n, signal) sends the last rank a signal in its
    n-th such call.
    """
    from smtrain.worker.train.start import start

    os.environ["SMTRAIN_ML_ROOT"] = str(root)
    job = JobConfig.model_validate(config)
    engine: Any = NativeEngine
    kept = {
        name: getattr(engine, name)
        for name in ("close", "evaluate", "begin_step", "log_probabilities")
    }
    calls = 0
    engine.close = lambda self: None  # the world keeps its process group

    def struck(name: str, number: int, sent: int) -> Any:
        def call(self: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and self.rank == self.world_size - 1:
                os.kill(os.getpid(), sent)
            return kept[name](self, *args)

        return call

    if strike:
        setattr(engine, strike[0], struck(*strike))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        start(job, Container.from_files())
    finally:
        signal.signal(signal.SIGTERM, handler)
        for name, method in kept.items():
            setattr(engine, name, method)
