"""How far an evaluation has come, said now and then: of a large model, or on a CPU, it takes hours."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

EVERY = 30.0
"""Seconds between two lines."""


class HarnessProgress:
    """What the harness tells of each request that it is done with, by the hook that is there for a cache."""

    def __init__(self, say: Callable[[str], None], every: float = EVERY) -> None:
        self._say, self._every = say, every
        self._whole = self._done = 0
        self._last = time.monotonic()

    def watch(self, model: Any) -> None:
        """Count the requests of a model of the harness from now on; its own bars stay on terminals alone."""
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            setattr(model, kind, self._counted(getattr(model, kind)))
        model.set_cache_hook(self)

    def _counted(self, answers: Callable[..., Any]) -> Callable[..., Any]:
        def counted(requests: list[Any], disable_tqdm: bool = False) -> Any:
            self._whole, self._done = len(requests), 0
            return answers(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

        return counted

    def add_partial(self, _kind: str, _request: Any, _answer: Any) -> None:
        """One request is done."""
        self._done += 1
        now = time.monotonic()
        if now - self._last >= self._every and self._done < self._whole:
            self._last = now
            self._say(f"{self._done:,} of {self._whole:,} requests")
