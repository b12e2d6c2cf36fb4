"""The form of the manifest.json of prepared data, for all its readers."""

from __future__ import annotations

from collections.abc import Mapping
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


def size_words(manifest: Mapping[str, Any]) -> str:
    """Say how many tokens and samples a prepared dataset has: windows of text, conversations or
    pairs.

    Only windows have `seq_len` tokens each; several conversations or pairs share a row of so many.
    """
    forms = {"sft": "conversations for rows of", "dpo": "pairs for rows of"}
    form = forms.get(manifest.get("objective", ""), "samples of")
    tokens, samples = manifest.get("tokens", 0), manifest.get("samples", 0)
    return f"{tokens:,} tokens, {samples:,} {form} {manifest.get('seq_len')}"


def vocabulary_fault(
    manifest: Mapping[str, Any], vocabulary: int, same_tokenizer: bool | None
) -> str | None:
    """Explain why a prepared dataset does not fit a model with so many token ids; None if it fits.

    Models of one family share a tokenizer and pad the vocabulary to different sizes (Qwen 2.5:
    151,936 to 152,064), so another size is a fault only if the model's tokenizer is another one.
    `same_tokenizer` is None if it is not known.
    """
    end, prepared_size = manifest.get("eos_id"), manifest.get("model_vocab_size")
    ids = max(manifest.get("vocab_size", 0), -1 if end is None else end + 1)
    if ids > vocabulary:
        return f"the data has token ids up to {ids - 1}, and the model's vocabulary is {vocabulary}"
    if prepared_size not in (None, vocabulary) and same_tokenizer is False:
        return (
            f"the data was prepared for a model of vocab_size {prepared_size} with another"
            f" tokenizer, and the model's is {vocabulary}"
        )
    return None
