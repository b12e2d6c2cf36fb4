"""Imports of a training process before its first step: each costs seconds on a cold disk, in every
process.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IMPORTS = """
import importlib, json, sys, traceback
from importlib.abc import MetaPathFinder

class Importers(MetaPathFinder):
    callers = {}
    def find_spec(self, name, path=None, target=None):
        stack = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe(1))]
        first = next((m for m in stack if m.partition(".")[0] not in ("importlib", "torch", "_frozen_importlib")), "")
        self.callers.setdefault(name, first)

sys.meta_path.insert(0, Importers())
importlib.import_module(sys.argv[1])
print(json.dumps({name: Importers.callers.get(name, "") for name in sys.modules}))
"""
NEVER = frozenset(
    {
        "torchvision",
        "sklearn",
        "pandas",
        "matplotlib",
        "datasets",
        "tensorboard",
        "triton",
        "pyarrow",
    }
)


def importers(module: str) -> dict[str, str]:
    """Each module that `import module` loads in a new process, and the module outside torch that
    imports it.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, module], capture_output=True, text=True, check=True
    )
    loaded: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


def test_the_start_of_a_training_imports_no_compiler_and_no_transformers() -> None:
    loaded = importers("smtrain.worker.train.start")
    assert "torch" in loaded
    assert (
        not (NEVER | {"torch._dynamo", "torch._inductor", "transformers", "scipy", "accelerate"})
        & loaded.keys()
    )


@pytest.mark.full  # five seconds of imports
def test_only_transformers_makes_the_engine_import_the_compiler() -> None:
    loaded = importers("smtrain.worker.engine.native")
    assert "smtrain.worker.engine.native.context_parallel" in loaded
    assert not (NEVER | {"torch._inductor.compile_fx", "torch.nn.attention.bias"}) & loaded.keys()
    # Its masking_utils and deepgemm import torch._dynamo; a model cannot be built without them.
    assert loaded.get("torch._dynamo", "transformers").startswith("transformers.")
