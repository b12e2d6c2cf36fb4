"""Stage train: prepared data in channel `data`, weights in `shards` or `model` -> checkpoints. Run by torchrun."""

from __future__ import annotations

from smtrain.train.entry import main
from smtrain.train.start import start

if __name__ == "__main__":
    main(start)
