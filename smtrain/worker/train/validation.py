"""Validation on held-out text between two steps, which leaves the state of the training as it
is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smtrain.core.config.training import Validation
from smtrain.worker.data.load.heldout import HeldOut
from smtrain.worker.data.load.rows import Samples
from smtrain.worker.data.tokenizer import load_tokenizer
from smtrain.worker.engine.base import Engine
from smtrain.worker.output import log_line

_MAX_QUESTION_CHARS = 300  # characters of a question


@dataclass(frozen=True)
class ValidationResult:
    """Loss and accuracy on the held-out text, the same numbers on every rank."""

    loss: float
    """Mean over the held-out tokens (sft: the tokens of answers; dpo: the pairs), and with
    train.dpo.sft_weight that of the chosen answers' tokens.
    """
    tokens: int
    """The number of those tokens or pairs."""
    accuracy: float | None
    """Share of these tokens that the model finds likeliest, or of the pairs whose chosen answer has
    the larger reward; None in pre-training.
    """
    seconds: float
    margin: float | None = None
    """dpo: mean of the chosen answers' rewards minus those of the rejected ones."""

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def numbers(self) -> dict[str, float]:
        """The numbers under their names in a step's line."""
        if (
            self.margin is not None and self.accuracy is not None
        ):  # the loss of a pair is no loss of a token
            return {
                "val_loss": self.loss,
                "val_accuracy": self.accuracy,
                "val_margins": self.margin,
            }
        losses = {"val_loss": self.loss, "val_ppl": self.perplexity}
        return losses if self.accuracy is None else {**losses, "val_accuracy": self.accuracy}


class Validator:
    """Validates every `options.interval` steps, and at the first and the last step of a run.

    `previous_state` is the state that `checkpoint_state` returned for the checkpoint to resume
    from. `answers` prints sample answers. All methods are collective, except `checkpoint_state`,
    `retained_checkpoints` and `note_saved`.
    """

    def __init__(
        self,
        engine: Engine,
        held_out: HeldOut,
        options: Validation,
        last_step: int,
        *,
        accuracy: bool,
        previous_state: Mapping[str, Any] | None = None,
        answers: Callable[[int], None] | None = None,
    ) -> None:
        self._engine, self._held_out, self._options, self._last_step = (
            engine,
            held_out,
            options,
            last_step,
        )
        self._accuracy, self._answers = accuracy, answers
        self._last_result: tuple[int, float] | None = None
        self._best: dict[str, Any] | None = None
        self._retained_names: set[str] = set()
        if previous_state:
            self._last_result = previous_state["step"], previous_state["loss"]
            self._best = dict(previous_state["best"]) if previous_state.get("best") else None
            self._retained_names = {self._best["name"]} if self._best else set()

    def due(self, step: int) -> bool:
        """Whether a validation is due after a step and has not been done."""
        at = self._last_result[0] if self._last_result else None
        return at != step and (
            at is None or step % self._options.interval == 0 or step == self._last_step
        )

    def judge(
        self, step: int, beat: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> ValidationResult | None:
        """Validate after `step`; None if `is_stopped` was true before the end."""
        began, total, tokens, correct = time.perf_counter(), 0.0, 0, 0
        answer_total, answer_tokens = 0.0, 0
        margins: list[float] = []
        for number in range(self._held_out.batches):
            if is_stopped():
                return None
            batch = self._engine.evaluate(*self._held_out.batch(number))
            total, tokens, correct = (
                total + (batch.loss - batch.answer_loss) * batch.tokens,
                tokens + batch.tokens,
                correct + batch.correct,
            )
            # Not weighted by pairs: a batch of as many pairs may have more tokens of answers.
            answer_total += batch.answer_loss * batch.answer_tokens
            answer_tokens += batch.answer_tokens
            if batch.pairs is not None:
                margins.append(batch.pairs.margin * batch.tokens)
            beat(f"validation at step {step}")
        if self._answers is not None and not is_stopped():
            self._answers(step)
            beat(f"validation at step {step}")
        loss = total / max(1, tokens) + answer_total / max(1, answer_tokens)
        self._last_result = step, loss
        share = correct / max(1, tokens) if self._accuracy else None
        margin = sum(margins) / max(1, tokens) if margins else None
        return ValidationResult(loss, tokens, share, time.perf_counter() - began, margin)

    def checkpoint_state(self, step: int, name: str) -> dict[str, Any] | None:
        """The state of validation that the checkpoint `name` of a step keeps; notes it if it is the
        best.
        """
        if self._last_result is None:
            return None
        candidate = (
            self._options.keep_best
            and self._last_result[0] == step
            and math.isfinite(self._last_result[1])
        )
        if candidate and (self._best is None or self._last_result[1] < self._best["loss"]):
            self._best = {"name": name, "step": step, "loss": self._last_result[1]}
            self._retained_names.add(name)
        return {"step": self._last_result[0], "loss": self._last_result[1], "best": self._best}

    @property
    def retained_checkpoints(self) -> set[str]:
        """Checkpoints to keep whatever their age: the best, and the former best until the best is
        safe.
        """
        return set(self._retained_names)

    def note_saved(self, name: str) -> None:
        """Note that a checkpoint became whole."""
        # A later checkpoint is whole, so the best one before it is too.
        if self._best and name != self._best["name"]:
            self.release_former_best()

    def release_former_best(self) -> None:
        """The best checkpoint is safe, so the former best may go."""
        if self._best:
            self._retained_names = {self._best["name"]}

    @property
    def best(self) -> Mapping[str, Any] | None:
        """Name, step and loss of the best checkpoint, if `keep_best` is set."""
        return self._best

    def close(self) -> None:
        """Close the held-out text."""
        self._held_out.close()


class SampleAnswers:
    """Prints what the model answers to the first `count` held-out questions, at every validation.

    Greedy, and without a KV cache: each token computes the whole text again. `tokenizer` is the
    model's folder. Works with the native engine only.
    """

    def __init__(
        self,
        engine: Any,
        samples: Samples,
        tokenizer: Path,
        *,
        count: int,
        longest: int,
        seq_len: int,
        eos_id: int | None,
    ) -> None:
        self._engine, self._tokenizer = engine, load_tokenizer(tokenizer)
        self._longest, self._seq_len = longest, seq_len
        self._questions = [
            self._cut(*samples.sample(i), eos_id) for i in range(min(count, len(samples.lengths)))
        ]

    def _cut(
        self, tokens: Any, is_answer: Any, eos_id: int | None
    ) -> tuple[list[int], list[int], set[int]]:
        """Split a sample into the question's tokens, the answer in the data, and the tokens that
        end an answer.
        """
        first = int(np.flatnonzero(is_answer)[0])
        answer_ends = np.flatnonzero(is_answer[first:] == 0)
        answer = tokens[
            first : first + int(answer_ends[0]) if len(answer_ends) else len(tokens)
        ].tolist()
        special = {
            i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        return (
            tokens[:first].tolist(),
            answer,
            {t for t in answer if t in special} | {i for i in (eos_id,) if i is not None},
        )

    def __call__(self, step: int) -> None:
        """Print each question, the model's answer and the answer in the data. Collective."""
        for question, reference, ends in self._questions:
            answer: list[int] = []
            while len(answer) < self._longest and len(question) + len(answer) < self._seq_len:
                token = self._engine.next_token(torch.tensor([question + answer]))
                if token in ends:
                    break
                answer.append(token)
            if self._engine.rank == 0:
                text, answer_text, reference_text = map(self._text, (question, answer, reference))
                question_text = (
                    text if len(text) <= _MAX_QUESTION_CHARS else f"…{text[-_MAX_QUESTION_CHARS:]}"
                )
                log_line(
                    f"answer after step {step}: {question_text} -> {answer_text} (the data says"
                    f" {reference_text})"
                )

    def _text(self, ids: list[int]) -> str:
        return json.dumps(
            self._tokenizer.decode(ids, skip_special_tokens=True).strip(), ensure_ascii=False
        )
