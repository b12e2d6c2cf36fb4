"""Stage train: prepared data in channel `data`, weights in `shards` or `model` -> checkpoints. Run by torchrun."""

from __future__ import annotations

from smtrain.config import JobConfig
from smtrain.contract.container import Container
from smtrain.train.entry import main


def stage(config: JobConfig, container: Container) -> None:
    from smtrain.train.start import start

    start(config, container)


if __name__ == "__main__":
    main(stage)
