"""The options of a preparation, and the files and tokenizer that they resolve to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from smtrain.core.errors import DataError
from smtrain.core.machine import cores_here
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare.shards import SHARD_BYTES
from smtrain.worker.data.read.sources import SourceFile, find_files
from smtrain.worker.data.tokenize.tokenizer import TokenizerFacts, tokenizer_facts


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options for turning inputs into tokens; all machines of a preparation get the same ones.

    `format` is a format of files; for instruction data also how a record spells a conversation (alpaca, messages).
    `text_column`, `separator`, `cleaning` and `append_eod` are for text; `overlong` and `columns` {ours: theirs} for
    instruction data. `workers` defaults to one per core. `objective` decides what `prepare_sft` makes of records:
    samples or pairs of them. `holdout` selects the documents for validation. At most `max_bad` bad records are skipped.
    Text of more than `shard_bytes` becomes several pairs of files.
    """

    seq_len: int
    format: str = "auto"
    encoding: str | None = None
    text_column: str = "text"
    separator: str | None = None
    cleaning: Cleaning = field(default_factory=Cleaning)
    append_eod: bool = True
    overlong: Literal["truncate", "drop"] = "truncate"
    columns: Mapping[str, str] = field(default_factory=dict)
    holdout: HoldOut | None = None
    max_bad: int = 0
    workers: int | None = None
    shard_bytes: int = SHARD_BYTES
    objective: Literal["sft", "dpo"] = "sft"
    overwrite: bool = True

    @property
    def worker_count(self) -> int:
        return self.workers or cores_here()

    def sources(self, inputs: Path | str | Sequence[Path | str]) -> list[str]:
        """The inputs, then the text that is held out whole, if any."""
        sources = [inputs] if isinstance(inputs, (str, Path)) else [*inputs]
        held_out = [self.holdout.path] if self.holdout and self.holdout.path else []
        return [str(source) for source in (*sources, *held_out)]


@dataclass(frozen=True)
class ResolvedInputs:
    """The files of each source, the facts of the tokenizer, and a sentence for each file that is left out."""

    files: list[list[SourceFile]]
    facts: TokenizerFacts
    left_out: list[str]

    @property
    def flat(self) -> list[SourceFile]:
        return [file for part in self.files for file in part]


def resolve(
    sources: list[str], tokenizer: Path, options: PrepareOptions, format: Any, output: Path | None,
    commits: Mapping[str, str], say: Callable[[str], None],
) -> ResolvedInputs:  # fmt: skip
    """Find the files of all sources, except those under `output`, and read the tokenizer. Raises DataError."""
    if options.seq_len < 1:
        raise DataError(f"train.seq_len is {options.seq_len}; give at least 1.")
    facts = tokenizer_facts(tokenizer, lambda sentence: say(f"prepare: {sentence}"))
    left_out: list[str] = []
    files = [find_files(source, format, output, left_out.append, options.encoding, commits) for source in sources]
    for sentence in left_out:
        say(f"prepare: {sentence}")
    return ResolvedInputs(files, facts, left_out)
