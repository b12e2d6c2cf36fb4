"""What a model in training answers to held-out questions: a few lines of the log at every validation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smtrain.worker.data.load.packed import Samples
from smtrain.worker.data.tokenize.tokenizer import load_tokenizer

_SHOWN = 300  # characters of a question


class Answers:
    """Asks the engine the first `count` held-out questions, greedily, by computing the whole text anew for each token.

    `tokenizer` is the model's folder. Only the native engine can be asked.
    """

    def __init__(
        self, engine: Any, samples: Samples, tokenizer: Path, *, count: int, longest: int, seq_len: int,
        eos_id: int | None,
    ) -> None:  # fmt: skip
        self._engine, self._tokenizer = engine, load_tokenizer(tokenizer)
        self._longest, self._seq_len = longest, seq_len
        self._asked = [self._cut(*samples.sample(i), eos_id) for i in range(min(count, len(samples.lengths)))]

    def _cut(self, tokens: Any, learned: Any, eos_id: int | None) -> tuple[list[int], list[int], set[int]]:
        """The question's tokens, the answer that the data has, and the tokens that end one."""
        first = int(np.flatnonzero(learned)[0])
        rest = np.flatnonzero(learned[first:] == 0)
        answer = tokens[first : first + int(rest[0]) if len(rest) else len(tokens)].tolist()
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        return (
            tokens[:first].tolist(),
            answer,
            {t for t in answer if t in special} | {i for i in (eos_id,) if i is not None},
        )

    def __call__(self, step: int) -> None:
        """Print question, answer and the answer of the data. Collective."""
        for question, wanted, ends in self._asked:
            given: list[int] = []
            while len(given) < self._longest and len(question) + len(given) < self._seq_len:
                token = self._engine.next_token(torch.tensor([question + given]))
                if token in ends:
                    break
                given.append(token)
            if self._engine.rank == 0:
                asked, said, known = map(self._text, (question, given, wanted))
                shown = asked if len(asked) <= _SHOWN else f"…{asked[-_SHOWN:]}"
                print(f"answer after step {step}: {shown} -> {said} (the data says {known})", flush=True)

    def _text(self, ids: list[int]) -> str:
        return json.dumps(self._tokenizer.decode(ids, skip_special_tokens=True).strip(), ensure_ascii=False)
