"""Validation: the loss on what is held out, between two steps; nothing of the training's own state is touched."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smtrain.core.config.validation import Validation
from smtrain.worker.data.load.heldout import HeldOut
from smtrain.worker.engine.base import Engine


@dataclass(frozen=True)
class Judged:
    """How the model does on the held-out text, the same numbers on every rank."""

    loss: float
    """Mean over the held-out tokens (sft: those of answers)."""
    tokens: int
    accuracy: float | None
    """Share of these tokens that the model finds likeliest; None for a pre-training."""
    seconds: float

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def numbers(self) -> dict[str, float]:
        """By the names that a step's line has."""
        found = {"val_loss": self.loss, "val_ppl": self.perplexity}
        return found if self.accuracy is None else {**found, "val_accuracy": self.accuracy}


class Validator:
    """Judges the model at the steps that `options.interval` names, and at a run's first and last.

    `before` is what the checkpoint that a run goes on from kept of its validations. `answers`, if given, writes
    samples of what the model says into the log. Its methods are collective, but for `kept`, `spared` and `saved`.
    """

    def __init__(
        self, engine: Engine, held_out: HeldOut, options: Validation, last_step: int, *, accuracy: bool,
        before: Mapping[str, Any] | None = None, answers: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._held_out, self._options, self._last_step = engine, held_out, options, last_step
        self._accuracy, self._answers = accuracy, answers
        self._at: tuple[int, float] | None = None
        self._best: dict[str, Any] | None = None
        self._spared: set[str] = set()
        if before:
            self._at = before["step"], before["loss"]
            self._best = dict(before["best"]) if before.get("best") else None
            self._spared = {self._best["name"]} if self._best else set()

    def due(self, step: int) -> bool:
        """Whether the model is to be judged after a step, and has not been."""
        at = self._at[0] if self._at else None
        return at != step and (at is None or step % self._options.interval == 0 or step == self._last_step)

    def judge(self, step: int, beat: Callable[[str], None], stopped: Callable[[], bool]) -> Judged | None:
        """The loss on the held-out text after `step`; None where it was `stopped` on the way."""
        began, total, tokens, correct = time.perf_counter(), 0.0, 0, 0
        for number in range(self._held_out.batches):
            if stopped():
                return None
            found = self._engine.evaluate(*self._held_out.batch(number))
            total, tokens, correct = total + found.loss * found.tokens, tokens + found.tokens, correct + found.correct
            beat(f"validation at step {step}")
        if self._answers is not None and not stopped():
            self._answers(step)
            beat(f"validation at step {step}")
        loss = total / max(1, tokens)
        self._at = step, loss
        share = correct / max(1, tokens) if self._accuracy else None
        return Judged(loss, tokens, share, time.perf_counter() - began)

    def kept(self, step: int, name: str) -> dict[str, Any] | None:
        """What the checkpoint `name` of a step keeps of the validations so far; it may be the best."""
        if self._at is None:
            return None
        candidate = self._options.keep_best and self._at[0] == step and math.isfinite(self._at[1])
        if candidate and (self._best is None or self._at[1] < self._best["loss"]):
            self._best = {"name": name, "step": step, "loss": self._at[1]}
            self._spared.add(name)
        return {"step": self._at[0], "loss": self._at[1], "best": self._best}

    @property
    def spared(self) -> set[str]:
        """Names of the checkpoints that are kept whatever their age: the best, and the one before until it is safe."""
        return set(self._spared)

    def saved(self, name: str) -> None:
        """A later checkpoint than the best became whole: none but the best is spared from then on."""
        if self._best and name != self._best["name"]:
            self.settled()

    def settled(self) -> None:
        """The best checkpoint is safe: the one before it is spared no more."""
        if self._best:
            self._spared = {self._best["name"]}

    @property
    def best(self) -> Mapping[str, Any] | None:
        """Name, step and loss of the best checkpoint, where it is kept."""
        return self._best

    def close(self) -> None:
        """Close the held-out text."""
        self._held_out.close()
