"""On PYTHONPATH of training processes: rank 1 never gets its third batch."""

from __future__ import annotations

import os
import time
from typing import Any

if os.environ.get("RANK") == "1":
    from smtrain.data.loader import TokenLoader

    given = TokenLoader.batch

    def never(self: Any, samples_consumed: int) -> Any:
        if samples_consumed >= 64:
            time.sleep(600)
        return given(self, samples_consumed)

    TokenLoader.batch = never  # type: ignore[method-assign]
