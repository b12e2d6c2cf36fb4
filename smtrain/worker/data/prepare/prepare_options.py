"""What `prepare` and `assist` are given, understood: the files of each source, and how they become pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.clean.refiner import refine_versions
from smtrain.worker.data.prepare.part_uploads import Parts
from smtrain.worker.data.prepare.pieces import How
from smtrain.worker.data.read.sources import Format, SourceFile, find_files
from smtrain.worker.data.tokenize.tokenizer import tokenizer_facts


@dataclass(frozen=True)
class AskedText:
    """What the arguments come to: the files of each source, and how they become pieces."""

    files: list[list[SourceFile]]
    how: How
    sources: list[str]
    left_out: list[str]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for part in self.files for file in part)


def named_sources(inputs: Path | str | Sequence[Path | str], holdout: HoldOut | None) -> list[str]:
    """The inputs, of which there may be one alone, and last what is held out whole."""
    sources = [inputs] if isinstance(inputs, (str, Path)) else [*inputs]
    return [str(source) for source in (*sources, *([holdout.path] if holdout and holdout.path else ()))]


def asked_text(
    sources: list[str], tokenizer: Path, seq_len: int, text_column: str, format: Format,
    separator: str | None, cleaning: Cleaning | None, workers: int | None, append_eod: bool, parts: Parts | None,
    holdout: HoldOut | None, output: Path | None, encoding: str | None, say: Callable[[str], None],
    commits: Mapping[str, str] | None = None,
) -> AskedText:  # fmt: skip
    if seq_len < 1:
        raise DataError(f"train.seq_len is {seq_len}; give at least 1.")
    facts = tokenizer_facts(tokenizer, lambda sentence: say(f"prepare: {sentence}"))
    if append_eod and facts.eos_id is None:
        raise DataError(
            f"{tokenizer} names no eos_token in tokenizer_config.json that tokenizer.json knows; "
            "name one, or set append_eod to false."
        )
    left_out: list[str] = []
    files = [find_files(source, format, output, left_out.append, encoding, commits) for source in sources]
    for sentence in left_out:
        say(f"prepare: {sentence}")
    _refuse_split(files, holdout)
    if cleaning and cleaning.refines:
        refine_versions(cleaning)  # which says what is not installed
        if tokens := next((file for part in files for file in part if file.kind == "megatron"), None):
            raise DataError(
                f"{tokens.name} is tokens, which cannot be filtered as text; leave out data.filters, "
                "data.near_duplicates and data.pii, or give the text."
            )
    eos_id = facts.eos_id if append_eod else None
    how = How(
        tokenizer, facts, eos_id, text_column, separator, cleaning or Cleaning(), workers, parts, holdout
    )  # fmt: skip
    return AskedText(files, how, sources, left_out)


def _refuse_split(files: list[list[SourceFile]], holdout: HoldOut | None) -> None:
    """Raises DataError where documents of text would have to be held out by their order."""
    other = next((file for part in files for file in part if file.kind != "megatron"), None)
    if holdout and holdout.split is not None and other is not None:
        raise DataError(
            f"train.validation.split: {other.name} is no Megatron pair, whose documents it goes by; set "
            "train.validation.fraction instead."
        )
