"""On PYTHONPATH of a process: the CPU stand-ins come with the first import of neuronx_distributed,
and not before.
"""

from __future__ import annotations

import importlib.abc
import sys
from pathlib import Path
from typing import Any


class _First(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        if name == "neuronx_distributed":
            sys.meta_path.remove(self)
            sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
            import shim

            sys.path.pop(0)
            shim.install()


sys.meta_path.insert(0, _First())
