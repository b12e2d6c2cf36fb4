"""A stage in a single process, with all its imports loaded beforehand.

main([ML_ROOT, STAGE])
"""

from __future__ import annotations

import importlib.util
import os

import torch.distributed  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import smtrain.worker.checkpoint.convert
import smtrain.worker.checkpoint.export
import smtrain.worker.data.prepare.prepare
import smtrain.worker.train.start  # noqa: F401
from smtrain.worker.entry import main as run
from tests.faults.zygote import ROOT


def main(argv: list[str]) -> int:
    os.environ["SMTRAIN_ML_ROOT"], stage = argv
    described = importlib.util.spec_from_file_location(stage, ROOT / f"entrypoints/{stage}.py")
    assert described
    assert described.loader
    script = importlib.util.module_from_spec(described)
    described.loader.exec_module(script)
    run(script.stage)
    return 0
