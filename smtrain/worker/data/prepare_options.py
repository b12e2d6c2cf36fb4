"""The options of a preparation, and the files and tokenizer that they resolve to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal

from smtrain.core.config import JobConfig
from smtrain.core.errors import DataError
from smtrain.core.machine import cores_here
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.manifest import PREFIX, VALIDATION
from smtrain.worker.data.read.shards import SHARD_BYTES, TextShard, cut_shards
from smtrain.worker.data.read.sources import SourceFile, find_files
from smtrain.worker.data.tokenizer import TokenizerFacts, tokenizer_facts


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options for turning inputs into tokens; all machines of a preparation get the same ones.

    `format` is a format of files; for instruction data also how a record spells a conversation
    (alpaca, messages). `text_column`, `separator`, `cleaning` and `append_eod` are for text;
    `overlong`, `columns` {ours: theirs} and `chat_template_kwargs`, values for the chat template,
    for instruction data. `workers` defaults to one per core. `objective` decides what `prepare_sft`
    makes of records: samples or pairs of them. `holdout` selects the documents for validation. At
    most `max_bad` bad records are skipped. Text of more than `shard_bytes` becomes several pairs of
    files. `listings` changes with the text, if its files alone do not tell, as in a channel.
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
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    holdout: HoldOut | None = None
    max_bad: int = 0
    workers: int | None = None
    shard_bytes: int = SHARD_BYTES
    objective: Literal["sft", "dpo"] = "sft"
    overwrite: bool = True
    listings: str = ""

    @classmethod
    def of(cls, config: JobConfig, **options: Any) -> PrepareOptions:
        """The options that a config has; `options` are those of one preparation."""
        data, train = config.data, config.train
        return cls(
            seq_len=train.seq_len,
            format=data.format,
            encoding=data.encoding,
            text_column=data.text_column,
            separator=data.separator,
            cleaning=Cleaning.of(data),
            overlong=data.overlong,
            columns=dict(data.columns.items()),
            holdout=HoldOut.of(train.validation),
            chat_template_kwargs=config.model.chat_template_kwargs,
            max_bad=data.max_bad,
            workers=data.workers,
            shard_bytes=round(data.shard_size * 1e9),
            objective="dpo" if train.objective == "dpo" else "sft",
            **options,
        )

    @property
    def file_format(self) -> str:
        """The format of the files; `auto` if `format` spells conversations."""
        return "auto" if self.format in ("alpaca", "messages") else self.format

    @property
    def worker_count(self) -> int:
        return self.workers or cores_here()

    def sources(self, inputs: Path | str | Sequence[Path | str]) -> list[str]:
        """The inputs, then the text held out whole, if any."""
        sources = [inputs] if isinstance(inputs, (str, Path)) else [*inputs]
        held_out = [self.holdout.path] if self.holdout and self.holdout.path else []
        return [str(source) for source in (*sources, *held_out)]


@dataclass(frozen=True)
class Corpus:
    """The files of each source, the facts of the tokenizer, and a sentence for each excluded file.

    A sample of records is `sequences` documents in a row; 0 stands for text. Text held out whole is
    the last source.
    """

    options: PrepareOptions
    files: list[list[SourceFile]]
    facts: TokenizerFacts
    left_out: list[str]
    sequences: int = 0

    @property
    def flat(self) -> list[SourceFile]:
        return [file for part in self.files for file in part]

    @cached_property
    def shards(self) -> list[TextShard]:
        """The cut of the files; records are one part.

        Raises DataError for a Parquet file that cannot be read.
        """
        parts = [self.flat] if self.sequences else self.files
        return cut_shards(parts, self.options.separator, self.options.shard_bytes)

    @property
    def _own_text(self) -> bool:
        """Whether the last source is held out whole."""
        return self.options.holdout is not None and not self.options.holdout.from_sources

    @property
    def heldout_files(self) -> frozenset[int]:
        """The numbers of the files of records that are held out whole."""
        last = self.files[-1] if self.sequences and self._own_text else []
        return frozenset(file.number for file in last)

    @property
    def has_sides(self) -> bool:
        """Whether held-out text is written along with each part, and has no separate part."""
        return self.options.holdout is not None and (self.sequences > 0 or not self._own_text)

    @property
    def prefixes(self) -> list[str]:
        """The prefix of each part's files."""
        count = 1 if self.sequences else len(self.files) - self._own_text
        training_prefixes = (
            [PREFIX] if count == 1 else [f"{PREFIX}_{number}" for number in range(count)]
        )
        return training_prefixes + [VALIDATION] * (not self.sequences and self._own_text)

    @property
    def held_names(self) -> list[str]:
        """The names that end the files of what is held out along with the parts: one, or one for
        each shard.
        """
        several = any(shard.name for shard in self.shards)
        return [f"-{number:05}" for number in range(len(self.shards))] if several else [""]


def resolve(
    sources: list[str],
    tokenizer: Path,
    options: PrepareOptions,
    format: Any,
    output: Path | None,
    commits: Mapping[str, str],
    say: Callable[[str], None],
    file_lists: Mapping[str, list[SourceFile]] | None = None,
) -> Corpus:
    """Find the files of all sources, except those under `output`, and read the tokenizer.

    Raises DataError.

    `file_lists` has the objects of s3:// sources that the caller has listed.
    """
    if options.seq_len < 1:
        raise DataError(f"train.seq_len is {options.seq_len}; give at least 1.")
    facts = tokenizer_facts(tokenizer, lambda sentence: say(f"prepare: {sentence}"))
    left_out: list[str] = []
    numbers = count()
    files = [
        [
            replace(file, number=next(numbers))
            for file in find_files(
                source,
                format,
                output,
                left_out.append,
                options.encoding,
                commits,
                (file_lists or {}).get(source),
            )
        ]
        for source in sources
    ]
    for sentence in left_out:
        say(f"prepare: {sentence}")
    return Corpus(options, files, facts, left_out)
