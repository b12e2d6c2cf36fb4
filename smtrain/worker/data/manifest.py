"""`manifest.json` of a prepared dataset, which training checks. Written last."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.digests import verify_record, with_digest
from smtrain.core.errors import DataError
from smtrain.core.files import read_object, write_atomically
from smtrain.core.protocol.container import PREPARED_FORMAT
from smtrain.core.protocol.prepared import manifest_damage
from smtrain.worker.data.checksums import SUFFIX
from smtrain.worker.object_store import retry, unreadable_error

NAME = "manifest.json"
PREFIX = "tokens"
MASK = f"{PREFIX}_mask"
VALIDATION = "validation"
VALIDATION_MASK = f"{VALIDATION}_mask"
_SHARD = re.compile(r"(tokens(_mask|_\d+)?|validation(_mask)?)-\d{5,}\.(bin|idx|sums)")
_NUMBERED_NAME = re.compile(r"(.*?)(-\d{5,}|)", re.DOTALL)


def refuse_others(*places: Path) -> None:
    """Refuse to replace files that exist. Raises DataError."""
    present = [str(place) for place in places if place.exists()]
    if present:
        suffix = f" and {len(present) - 1} more" if len(present) > 1 else ""
        raise DataError(
            f"{present[0]}{suffix} is there already; give another place, or replace it with"
            " --overwrite (overwrite=True)."
        )


def files_of(folder: Path) -> list[Path]:
    """All files that a dataset prepared in `folder` may have, manifest first."""
    names = (PREFIX, MASK, VALIDATION, VALIDATION_MASK)
    shards = (
        [path for path in folder.glob("*-*") if _SHARD.fullmatch(path.name)]
        if folder.is_dir()
        else []
    )
    ends = (".bin", ".idx", SUFFIX)
    return [
        folder / NAME,
        *(folder / f"{name}{end}" for name in names for end in ends),
        *sorted(shards),
    ]


@dataclass(frozen=True)
class ShardRow:
    """One pair of files of a row of the manifest."""

    prefix: str
    documents: int
    tokens: int

    @property
    def mask(self) -> str:
        """The prefix of the mask of an sft dataset."""
        return mask_of(Path(self.prefix)).name


def mask_of(prefix: Path) -> Path:
    """The prefix of the mask of a pair: `x_mask` of `x`, `x_mask-00003` of the shard `x-00003`."""
    name, number = _NUMBERED_NAME.fullmatch(prefix.name).groups()  # type: ignore[union-attr]
    return prefix.with_name(f"{name}_mask{number}")


def is_marked(prefix: Path) -> bool:
    """Whether a mask of answers is next to a pair."""
    mask = mask_of(prefix)
    return mask.with_name(f"{mask.name}.idx").is_file()


def shards_of(row: Mapping[str, Any]) -> list[ShardRow]:
    """The pairs of a row of `parts` or `validation`, in the order of the text: its `shards`, or the
    row itself.
    """
    rows: list[dict[str, Any]] = row.get("shards") or [dict(row)]
    return [ShardRow(pair["prefix"], pair["documents"], pair["tokens"]) for pair in rows]


@dataclass(frozen=True)
class DatasetManifest:
    """The description of a prepared dataset.

    A folder is a prepared dataset once this file is in it.

    Args:
        vocab_size: The tokenizer's largest id + 1.
        model_vocab_size: The vocabulary of the config.json in the tokenizer's folder; None without
            one.
        samples: The number of windows of `seq_len` + 1 tokens, one every `seq_len`.
        sources: A row {name, bytes, documents} per file.
        files: Size and SHA-256 of each written file, by name.
        bad_lines: The first few of the `bad_line_count` bad lines.
        parts: A row {prefix, documents, tokens, samples} per source, in the order of the config. If
            a source has several pairs of files, `shards` lists {prefix, documents, tokens} of each
            in the order of the text.
        dropped: The number of documents left out on purpose, by reason.
        objective: If sft or dpo, MASK holds the same documents in uint8, 1 for each token to learn.
            If dpo, a document is a pair: two sequences in a row, chosen and rejected, each with its
            prompt.
        left_out: The files of the sources that were not read, and why.
        validation: A row as in `parts` for the documents held out of training, which no other count
            includes.
        noted: Counts of findings of filters and patterns that were not dropped; absent without any,
            as the next two.
        examples: Examples of what was dropped and noted, by reason.
        near_duplicates: Settings and counts of near duplicates.
        unread: Counts of unread text in the sources: records with text in a field, by its
            name.
    """

    vocab_size: int
    model_vocab_size: int | None
    tokenizer_sha256: str
    eos_id: int | None
    append_eod: bool
    seq_len: int
    dtype: str
    documents: int
    tokens: int
    samples: int
    text_column: str
    sources: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]
    bad_line_count: int
    bad_lines: list[str]
    parts: list[dict[str, Any]]
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)
    objective: str = "pretrain"
    tokenized_by: str = ""
    left_out: list[str] = dataclasses.field(default_factory=list)
    validation: dict[str, Any] | None = None
    noted: dict[str, int] = dataclasses.field(default_factory=dict)
    examples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    near_duplicates: dict[str, Any] = dataclasses.field(default_factory=dict)
    unread: dict[str, int] = dataclasses.field(default_factory=dict)
    format_version: int = PREPARED_FORMAT

    @property
    def content(self) -> dict[str, dict[str, Any]]:
        """The files that are trained on, without those for validation and without checksums."""
        return {
            name: facts
            for name, facts in self.files.items()
            if not name.endswith(SUFFIX)
            and re.split("[-.]", name)[0] not in (VALIDATION, VALIDATION_MASK)
        }

    def check_objective(self, folder: Path, objective: str) -> None:
        """Refuse a dataset that was prepared for another objective. Raises DataError."""
        if self.objective != objective:
            raise DataError(
                f"{folder} was prepared for train.objective: {self.objective} and it is {objective}"
                f" here; prepare it again, or set train.objective: {self.objective}."
            )

    def save(self, folder: Path) -> None:
        fields = dataclasses.asdict(self)
        for name in ("noted", "examples", "near_duplicates", "unread"):
            if not fields[name]:
                del fields[name]
        text = json.dumps(with_digest(fields), indent=1, sort_keys=True)
        write_atomically(folder / NAME, f"{text}\n")

    @classmethod
    def load(cls, folder: Path) -> DatasetManifest:
        """Raises DataError if `folder` is not a prepared dataset, or has another format version."""
        path = folder / NAME
        try:
            fields = verify_record(retry(lambda: read_object(path)))
        except FileNotFoundError:
            raise DataError(
                f"{folder} is not a prepared dataset (it has no {NAME}); give the output of stage"
                " prepare, or of `smtrain data prepare`.",
                code="data.not_found",
            ) from None
        except (OSError, ValueError) as error:
            raise unreadable_error(path, error, "prepare the data again") from error
        version = fields.get("format_version")
        if version != PREPARED_FORMAT:
            raise DataError(
                f"{path} has format_version {version} and this smtrain reads {PREPARED_FORMAT};"
                " prepare the data again."
            )
        manifest_fields = dataclasses.fields(cls)
        required_names = {
            f.name
            for f in manifest_fields
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        if absent_names := sorted(required_names - fields.keys()):
            raise DataError(f"{path} lacks {', '.join(absent_names)}; prepare the data again.")
        if damage := manifest_damage(fields):
            raise DataError(f"{path} is damaged ({damage}); prepare the data again.")
        return cls(**{f.name: fields[f.name] for f in manifest_fields if f.name in fields})
