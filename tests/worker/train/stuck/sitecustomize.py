"""On PYTHONPATH of training: rank 1 never gets its third batch.

It may be a fork of the process that imports this.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

if any(argument.endswith("train.py") for argument in sys.orig_argv):
    from smtrain.worker.data.load.loader import TokenLoader

    batch = TokenLoader.batch

    def never(self: Any, samples_consumed: int) -> Any:
        if samples_consumed >= 64 and os.environ["RANK"] == "1":
            time.sleep(600)
        return batch(self, samples_consumed)

    TokenLoader.batch = never  # type: ignore[method-assign]
