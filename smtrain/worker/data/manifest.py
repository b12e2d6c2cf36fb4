"""`manifest.json` of a prepared dataset: what the tokens are, so that training can check them. Written last."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.core.errors import DataError, first_line
from smtrain.core.files import write_atomically
from smtrain.core.protocol.container import PREPARED_FORMAT
from smtrain.worker.data.checksums import SUFFIX

NAME = "manifest.json"
PREFIX = "tokens"
MASK = f"{PREFIX}_mask"
VALIDATION = "validation"
VALIDATION_MASK = f"{VALIDATION}_mask"


def refuse_others(*places: Path) -> None:
    """Raises DataError where one of these files is there already: what was not asked to be replaced is not."""
    found = [str(place) for place in places if place.exists()]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(
            f"{found[0]}{more} is there already; give another place, or replace it with --overwrite (overwrite=True)."
        )


def files_of(folder: Path) -> list[Path]:
    """What a dataset prepared in `folder` consists of, manifest first."""
    names = (PREFIX, MASK, VALIDATION, VALIDATION_MASK)
    return [folder / NAME, *(folder / f"{name}{end}" for name in names for end in (".bin", ".idx", SUFFIX))]


@dataclass(frozen=True)
class DatasetManifest:
    """What `prepare` made. The folder is a prepared dataset once this file is in it.

    `vocab_size` is the tokenizer's largest id + 1, `model_vocab_size` that of the config.json beside the tokenizer
    (None without one). `samples` are windows of `seq_len` + 1 tokens, one every `seq_len`. `sources` has a row
    {name, bytes, documents} per file; `files` the size and SHA-256 of what was written; `bad_lines` the first few of
    `bad_line_count`. `parts` has a row {prefix, documents, tokens, samples} per source, in the order of the config;
    `left_out` says which files of the sources were not read, and why; `dropped` counts documents left out on purpose,
    by reason; `objective` sft means that the tokens to learn are in MASK, the same documents in uint8. `validation` is
    a row like those of `parts` for the documents that training does not see, which no other count includes. `noted`
    counts what filters and patterns found beside what was dropped, `examples` shows some by reason, and
    `near_duplicates` says how they were found and how many there were; the three are absent where nobody asked.
    `unread` counts what the sources hold and nothing here reads: the records with text in a field, by its name.
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
        """What is trained on: `files` without what is held out, and without what follows from the others."""
        return {
            name: about
            for name, about in self.files.items()
            if not name.endswith(SUFFIX) and name.partition(".")[0] not in (VALIDATION, VALIDATION_MASK)
        }

    def check_objective(self, folder: Path, objective: str) -> None:
        """Raises DataError where the dataset was prepared for another objective."""
        if self.objective != objective:
            raise DataError(
                f"{folder} was prepared for train.objective: {self.objective} and it is {objective} here; "
                f"prepare it again, or set train.objective: {self.objective}."
            )

    def save(self, folder: Path) -> None:
        fields = dataclasses.asdict(self)
        for name in ("noted", "examples", "near_duplicates", "unread"):
            if not fields[name]:
                del fields[name]
        write_atomically(folder / NAME, json.dumps(fields, indent=1, sort_keys=True) + "\n")

    @classmethod
    def load(cls, folder: Path) -> DatasetManifest:
        """Raises DataError where `folder` is not a prepared dataset, or one of a format not known here."""
        path = folder / NAME
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DataError(
                f"{folder} is not a prepared dataset (it has no {NAME}); run the prepare stage and give its output."
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({first_line(error)}); prepare the data again.") from error
        version = fields.get("format_version") if isinstance(fields, dict) else None
        if version != PREPARED_FORMAT:
            raise DataError(
                f"{path} has format_version {version} and this smtrain reads {PREPARED_FORMAT}; prepare the data again."
            )
        known = dataclasses.fields(cls)
        needed = {
            f.name for f in known if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        if missing := sorted(needed - fields.keys()):
            raise DataError(f"{path} lacks {', '.join(missing)}; prepare the data again.")
        return cls(**{f.name: fields[f.name] for f in known if f.name in fields})
