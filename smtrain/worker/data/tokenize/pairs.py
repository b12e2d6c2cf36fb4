"""Pairs of preferences to samples: the prompt with the chosen answer, then with the rejected one.

Tokens are those of TRL 1.16's DPOTrainer, except that each record says by itself which form it has.
TRL looks at the first record only. Text is tokenized with the tokenizer's own special tokens, and
gets the end of text if it lacks one. Conversations take the chat template and its end. The prompt
ends at the first token in which it differs from one of the wholes. A whole longer than half a row
is cut at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import DataError, first_line
from smtrain.core.model import hf_tokenizer
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read.ignored_fields import IgnoredText, ignored_fields
from smtrain.worker.data.read.record_fields import PAIRS
from smtrain.worker.data.tokenize.chat import ChatTemplate
from smtrain.worker.data.tokenize.dialogue import Dialogue, rename_columns
from smtrain.worker.data.tokenize.preference import COLUMNS, Preference, Turns, preference
from smtrain.worker.data.tokenize.samples import (
    OTHER_TURNS,
    Document,
    RecordMaker,
    SampleMaker,
    common_tokens,
    refuse_other_tokens,
)
from smtrain.worker.data.tokenize.template_losses import Rendering
from smtrain.worker.data.tokenize.template_options import KWARGS, OPTIONS
from smtrain.worker.data.tokenize.turns import holds_other_turns
from smtrain.worker.data.tokenizer import load_tokenizer
from smtrain.worker.object_store import is_of_machine, unreadable_error

_CUT = "pairs with an answer cut to {} tokens"
_LONG = "pairs with an answer longer than {} tokens"
_FULL = "pairs whose prompt leaves no room for an answer in {} tokens"
_EMPTY = "pairs with an answer of no tokens"
_EQUAL = "pairs of two equal answers, from which nothing is learned"
_CHANGED_PROMPT = (
    "prompts whose last tokens differ when an answer follows; the answer begins at the difference"
)
TWO_BEGINNINGS = "text prompts that begin with {}, which the tokenizer adds once more, as in TRL"
_RECORDS = 256


class PairMaker(RecordMaker):
    """Turns preferences into pairs of samples."""

    sequences = 2
    known_columns = COLUMNS

    def __init__(self, folder: Path, options: PrepareOptions) -> None:
        super().__init__(folder, options)
        self.limit = options.seq_len // 2 + 1
        """The most tokens of a prompt with its answer: a row has room for two of them, without
        their last tokens.
        """
        try:
            self._tokenizer: Any = hf_tokenizer.load(folder, lambda _: None)
        except (OSError, ValueError, KeyError) as error:
            if is_of_machine(error):
                raise unreadable_error(folder, error, "") from None
            raise DataError(
                f"{folder} holds no tokenizer that transformers loads ({first_line(error)})."
            ) from None
        self.reasons = tuple(reason.format(self.limit) for reason in (_FULL, _LONG, _EMPTY))
        self._twice = TWO_BEGINNINGS.format(self._tokenizer.bos_token)
        self.slips = (OTHER_TURNS, self._twice)
        self.about = (
            f"pairs of a chosen and a rejected answer, each with its prompt in at most {self.limit}"
            " tokens"
        )

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, which only conversations need. Raises DataError without one."""
        template = ChatTemplate(self.folder, self.options.chat_template_kwargs)
        refuse_other_tokens(
            self.folder, template.tokens, load_tokenizer(self.folder, lambda _: None)
        )
        return template

    @property
    def decides(self) -> list[Any]:
        source = str(self._tokenizer.chat_template)
        values = dict(self.options.chat_template_kwargs)
        settings = ["dpo", self.options.seq_len, self._tokenizer.eos_token, self.options.overlong]
        return [source, settings, *([values] if values else [])]

    def _columns_fault(self, names: list[str]) -> str | None:
        column_of = {name: self.options.columns.get(name, name) for name in COLUMNS}
        if any(all(column_of[name] in names for name in pair) for pair in PAIRS):
            return None
        return (
            f" has the columns {', '.join(names)}, and not {' and '.join(PAIRS[0])}; name the"
            " columns of the better and the worse answer in data.columns as chosen and rejected."
        )

    def _read(self, row: dict[str, Any]) -> tuple[Any, IgnoredText]:
        pair = preference(rename_columns(row, self.options.columns))
        texts = self._texts(pair)
        ignored_text = IgnoredText()
        ignored_text.count(self._ignored_names(row, pair, texts))
        return (pair, texts), ignored_text

    def _samples(
        self, read: list[Any], counts: Counter[str]
    ) -> Iterator[tuple[int, Any, list[Document]]]:
        for at, ((pair, _), ids) in enumerate(zip(read, self._encode_texts(read), strict=True)):
            counts[OTHER_TURNS] += any(map(_holds_other_turns, (pair.chosen, pair.rejected)))
            bos, prompt = self._tokenizer.bos_token_id, ids[0][:2]
            has_two_bos = isinstance(pair.prompt, str) and bos is not None and prompt == [bos, bos]
            counts[self._twice] += has_two_bos
            yield at, [{"prompt": pair.prompt}], self._fit_samples(ids, counts)

    @cached_property
    def _end(self) -> str:
        """The token that ends a text. Raises DataError without one that tokenizer.json has."""
        end = self._tokenizer.eos_token
        if end and load_tokenizer(self.folder, lambda _: None).token_to_id(end) is not None:
            return str(end)
        lack = (
            f"has {end!r} as eos_token in tokenizer_config.json only" if end else "has no eos_token"
        )
        raise DataError(
            f"its pairs are text, whose end the model learns, and the tokenizer {lack}; name one in"
            " tokenizer_config.json that tokenizer.json has."
        )

    def _texts(self, pair: Preference) -> list[str]:
        """Prompt, prompt with the chosen answer, and prompt with the rejected one."""
        if isinstance(pair.prompt, str):
            answers = (str(text) for text in (pair.chosen, pair.rejected))
            ended_answers = [
                text if text.endswith(self._end) else text + self._end for text in answers
            ]
            return [pair.prompt, *(pair.prompt + text for text in ended_answers)]
        prompt = self._dialogue(pair, [])
        texts = [self.template.text(prompt, len(prompt.messages), add_generation_prompt=True)]
        for answer in (pair.chosen, pair.rejected):
            dialogue = self._dialogue(pair, answer)
            texts.append(self.template.text(dialogue, len(dialogue.messages)))
        return texts

    def _dialogue(self, pair: Preference, answer: Any, column: str = "messages") -> Dialogue:
        prompt = frozenset(range(len(pair.prompt)))
        return Dialogue(
            [*pair.prompt, *answer], pair.tools, prompt, column=column, options=pair.options
        )  # type: ignore[list-item]

    def _ignored_names(self, row: dict[str, Any], pair: Preference, texts: list[str]) -> list[str]:
        """The text of a record that its pair does not have, and options that the template does not
        read.
        """
        read = {self.options.columns.get(name, name) for name in pair.read}
        names = [
            *ignored_fields(row, read),
            *(name for name in (KWARGS, *OPTIONS) if _is_unused(row, name, read)),
        ]
        for name, answer, full_text in zip(
            PAIRS[0], (pair.chosen, pair.rejected), texts[1:], strict=True
        ):
            if isinstance(answer, list):
                start = next(
                    (
                        i
                        for i, (a, b) in enumerate(zip(texts[0], full_text, strict=False))
                        if a != b
                    ),
                    len(texts[0]),
                )
                rendering = Rendering(full_text, [(start, len(full_text))])
                names += self.template.unwritten_names(
                    self._dialogue(pair, answer, name), [rendering]
                )
        return list(dict.fromkeys(names))

    def _encode_texts(self, pairs: list[tuple[Preference, list[str]]]) -> Iterator[list[list[int]]]:
        """The ids of the texts of each pair."""
        for first in range(0, len(pairs), _RECORDS):
            group = pairs[first : first + _RECORDS]
            wholes: list[list[list[int]]] = [[] for _ in group]
            for plain in (True, False):
                of = [
                    i for i, (pair, _) in enumerate(group) if isinstance(pair.prompt, str) is plain
                ]
                texts = [text for i in of for text in group[i][1]]
                ids = (
                    self._tokenizer(texts, add_special_tokens=plain, verbose=False)["input_ids"]
                    if texts
                    else []
                )
                for number, i in enumerate(of):
                    wholes[i] = ids[3 * number : 3 * number + 3]
            yield from wholes

    def _fit_samples(self, ids: list[list[int]], counts: Counter[str]) -> list[Document]:
        """The two samples of a pair, each its ids and the mask of its answer; none if the pair is
        left out.
        """
        prompt, *wholes = (np.array(tokens, np.int32) for tokens in ids)
        start = min(common_tokens(prompt, sequence) for sequence in wholes)
        counts[_CHANGED_PROMPT] += start < len(prompt)
        if start >= self.limit:
            counts[_FULL.format(self.limit)] += 1
            return []
        if any(len(sequence) > self.limit for sequence in wholes):
            drop = self.options.overlong == "drop"
            counts[(_LONG if drop else _CUT).format(self.limit)] += 1
            if drop:
                return []
        if any(
            len(sequence) < max(start + 1, 2) for sequence in wholes
        ):  # the first token is predicted from nothing
            counts[_EMPTY] += 1
            return []
        cut = [sequence[: self.limit] for sequence in wholes]
        counts[_EQUAL] += np.array_equal(cut[0], cut[1])
        return [
            (sequence, (np.arange(len(sequence)) >= start).astype(np.uint8)) for sequence in cut
        ]


def _is_unused(row: dict[str, Any], name: str, read: set[str]) -> bool:
    return name not in read and row.get(name) not in (None, "", [], {})


def _holds_other_turns(answer: str | Turns) -> bool:
    """Whether an answer has turns that are not the assistant's."""
    if isinstance(answer, str):
        return holds_other_turns(answer)
    return any(
        turn["role"] != "assistant" or holds_other_turns(turn.get("content") or "")
        for turn in answer
    )


def record_maker(folder: Path, options: PrepareOptions) -> RecordMaker:
    """The maker of samples, or of pairs for train.objective dpo."""
    return (PairMaker if options.objective == "dpo" else SampleMaker)(folder, options)
