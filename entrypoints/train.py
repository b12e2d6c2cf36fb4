"""Stage train: prepared data in channel `data`, weights in `shards` or `model` -> checkpoints.

Run by torchrun.
"""

from __future__ import annotations

from smtrain.core.config import JobConfig
from smtrain.core.protocol.container import Container
from smtrain.worker.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.worker.train.start import start

    start(config, container)


if __name__ == "__main__":
    main(stage)
