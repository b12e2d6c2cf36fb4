"""The section `data`: the text, and how it is read."""

from __future__ import annotations

import codecs
from typing import Literal

from pydantic import Field, field_validator

from smtrain.config.section import Section


class TextSource(Section):
    """One source of a mixture."""

    path: str
    """Text of this source, in every form that data.path takes."""
    weight: float | None = Field(None, gt=0)
    """Its share of the samples, relative to the others'; for all sources or for none (every sample once an epoch)."""


class Data(Section):
    """The text, and how it is read."""

    path: str | None = None
    """Text to prepare: a file, folder or glob, s3://..., hf://NAME[:CONFIG][@SPLIT], demo://python-stdlib,
    demo://python-questions or demo://python-help; on AWS also fsx://fs-ID/FOLDER (FSx for Lustre) and
    efs://fs-ID/FOLDER."""
    sources: tuple[TextSource, ...] = Field((), max_length=15)
    """Instead of `path`: several sources, mixed by weight."""
    prepared: str | None = None
    """A dataset that `prepare` wrote earlier, as an s3:// URI or a folder, on AWS also fsx:// or efs://; the
    prepare stage is then skipped."""
    format: Literal[
        "auto", "jsonl", "parquet", "arrow", "text", "megatron", "json", "csv", "mediawiki", "wikiextractor", "warc",
        "tar", "alpaca", "messages",
    ] = "auto"  # fmt: skip
    """How to read the files; `auto` goes by their names. Records of train.objective sft are told apart by their fields
    unless this says `alpaca` (instruction, input, output) or `messages` (also ShareGPT's conversations)."""
    text_column: str = "text"
    """The field or column that holds the text, a nested one as `meta.text`, or a template over several, such as
    `{title} {text}`."""
    encoding: str | None = None
    """What the text is in where it is not UTF-8, e.g. cp1252; UTF-16 with a byte order mark is seen by itself."""
    separator: str | None = Field(None, min_length=1)
    """What stands between documents in plain text files; default: a file is a document."""
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalization of the text."""
    strip_control: bool = False
    """Remove control and zero-width characters and the carriage returns of line ends."""
    min_characters: int = Field(0, ge=0)
    """Leave out documents with fewer characters; the log says how many."""
    deduplicate: bool = False
    """Leave out documents that are exactly like an earlier one; the first 25 million are remembered."""
    document_mask: bool = False
    """Pre-training: keep attention and positions within each document; sft always keeps its samples apart."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """Whether an sft sample of more than train.seq_len + 1 tokens is cut or left out."""
    max_bad: int = Field(0, ge=0)
    """How many unreadable records to skip, each reported, before the job gives up."""
    workers: int | None = Field(None, ge=1)
    """Threads that tokenize; default: one per CPU core."""

    machines: int = Field(1, ge=1)
    """Machines that prepare together, of `compute.cpu_instance_type`; the result is the same for any number."""
    spot: bool = True
    """Whether several machines are spot instances; what they have done outlives an interruption."""

    @field_validator("encoding")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                codecs.lookup(name)
            except LookupError:
                raise ValueError(f"{name!r} is not an encoding that Python knows; name one such as cp1252") from None
        return name

    @property
    def all_sources(self) -> tuple[TextSource, ...]:
        """`sources`, or `path` as the only one."""
        return self.sources or ((TextSource(path=self.path),) if self.path else ())

    @property
    def weights(self) -> list[float] | None:
        """One for each source; None where there are none."""
        found = [source.weight for source in self.sources if source.weight is not None]
        return found or None
