"""The form of the manifest.json of prepared data, for all its readers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class _Row(BaseModel):
    """A pair of files, or several."""

    model_config = ConfigDict(strict=True)

    prefix: str
    documents: int
    tokens: int
    shards: list[_Row] = []


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    bytes: int | None = None
    sha256: str | None = None


class _Manifest(BaseModel):
    """Fields that a reader computes with; each may be absent here."""

    model_config = ConfigDict(strict=True)

    vocab_size: int = 0
    model_vocab_size: int | None = None
    tokenizer_sha256: str = ""
    eos_id: int | None = None
    append_eod: bool = False
    seq_len: int = 0
    dtype: str = ""
    documents: int = 0
    tokens: int = 0
    samples: int = 0
    text_column: str = ""
    sources: list[dict[str, Any]] = []
    files: dict[str, _File] = {}
    bad_line_count: int = 0
    bad_lines: list[str] = []
    parts: list[_Row] = []
    dropped: dict[str, int] = {}
    objective: str = ""
    tokenized_by: str = ""
    left_out: list[str] = []
    validation: _Row | None = None
    noted: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    near_duplicates: dict[str, Any] = {}
    unread: dict[str, int] = {}


def manifest_damage(fields: dict[str, Any]) -> str | None:
    """The first key of a manifest whose value has the wrong type, and the reason; None if all can
    be used.
    """
    try:
        _Manifest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return None
