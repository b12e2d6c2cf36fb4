"""The model's own tokenizer, as a Hugging Face folder holds it, and what it says about ids."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from smtrain.data.indexed import token_dtype
from smtrain.errors import DataError, first_line
from smtrain.model import hf_tokenizer
from smtrain.model.hf_folder import tokenizer_in


@dataclass(frozen=True)
class TokenizerFacts:
    """What the files of a tokenizer folder say; `eos_id` is None where nothing names an end of document."""

    sha256: str
    vocab_size: int
    model_vocab_size: int | None
    eos_id: int | None

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def in_manifest(self) -> dict[str, Any]:
        """What a `DatasetManifest` says of the tokenizer."""
        return {
            "vocab_size": self.vocab_size,
            "model_vocab_size": self.model_vocab_size,
            "tokenizer_sha256": self.sha256,
            "eos_id": self.eos_id,
            "dtype": self.dtype.name,
        }


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, with whatever padding or truncation its file asks for turned off."""
    content = tokenizer_json(folder)
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exception
        path = folder / "tokenizer.json"
        raise DataError(
            f"{path} is not a tokenizer that the tokenizers library reads ({error}); save it again."
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_facts(folder: Path) -> TokenizerFacts:
    """Read a tokenizer folder: its tokenizer, and tokenizer_config.json and config.json where they are.

    Raises DataError where the model's vocabulary is smaller than the tokenizer's.
    """
    tokenizer = load_tokenizer(folder)
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    config = _json(folder / "config.json")
    model_vocab_size = config.get("vocab_size")
    if model_vocab_size is not None and model_vocab_size < vocab_size:
        raise DataError(
            f"{folder / 'config.json'} has vocab_size {model_vocab_size} and the tokenizer beside it has ids up to "
            f"{vocab_size - 1}; use the tokenizer of this very model, or a model with a larger vocabulary."
        )
    files = tokenizer_in(path.name for path in folder.iterdir())
    sha256 = hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()
    return TokenizerFacts(sha256, vocab_size, model_vocab_size, _eos_id(folder, tokenizer, config))


def tokenizer_json(folder: Path) -> bytes:
    """The content of tokenizer.json, made by transformers where the folder has a tokenizer in another form.

    Raises DataError for a folder without one, or with one that transformers does not read.
    """
    files = tokenizer_in(path.name for path in folder.iterdir()) if folder.is_dir() else ()
    if not files:
        raise DataError(
            f"{folder} has no tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model; give the model's "
            "folder, or save a tokenizer into it with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    if files == ("tokenizer.json",):
        return (folder / files[0]).read_bytes()
    return _converted(folder, tuple((folder / name).stat().st_mtime_ns for name in files))


@lru_cache(maxsize=4)
def _converted(folder: Path, _changed: tuple[int, ...]) -> bytes:
    files = " and ".join(tokenizer_in(path.name for path in folder.iterdir()))
    try:
        tokenizer = hf_tokenizer.load(folder)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # transformers', tokenizers' and sentencepiece's own
        raise DataError(
            f"transformers cannot make a fast tokenizer of {files} in {folder} ({first_line(error)}); name its class "
            "(tokenizer_class) in tokenizer_config.json, or save a tokenizer.json with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        ) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not JSON ({error}); copy the model's again.") from error
    return content if isinstance(content, dict) else {}


def _eos_id(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> int | None:
    token = _json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        return tokenizer.token_to_id(token)
    ids = config.get("eos_token_id")
    return ids[0] if isinstance(ids, list) and ids else ids if isinstance(ids, int) else None
