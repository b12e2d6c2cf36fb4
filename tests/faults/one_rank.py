"""Stage train as a process by itself, with everything that it imports loaded beforehand."""

from __future__ import annotations

import os

import torch.distributed  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import smtrain.train.start as started
from smtrain.train.entry import main as run


def main(argv: list[str]) -> int:
    (os.environ["SMTRAIN_ML_ROOT"],) = argv
    run(started.start)
    return 0
