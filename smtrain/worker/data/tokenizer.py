"""The model's own tokenizer in a Hugging Face folder, and its facts about ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from smtrain.core.errors import DataError, first_line
from smtrain.core.files import parse_json, read_value
from smtrain.core.model import hf_tokenizer
from smtrain.core.model.hf_folder import tokenizer_digest, tokenizer_in
from smtrain.core.model.hf_tokenizer import Say
from smtrain.core.model.remedies import file_kind, file_misfit
from smtrain.core.suggest import near_path
from smtrain.worker.data.indexed import token_dtype
from smtrain.worker.object_store import is_of_machine, retry, unreadable_error


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts of a tokenizer folder; `eos_id` is None if no file names an end of document.

    `vocab_size` is the largest id that a text may get + 1, including `eos_id`: that of the
    tokenizer, at most that of the model, which is `model_vocab_size` - 1.
    """

    sha256: str
    vocab_size: int
    model_vocab_size: int | None
    eos_id: int | None

    @property
    def dtype(self) -> np.dtype:
        return token_dtype(self.vocab_size)

    def check(self, ids: NDArray[Any], file: Path | str) -> None:
        """Raise DataError if a file of tokens has an id that the tokenizer or its model lacks."""
        if not len(ids) or 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            return
        odd = int(ids.max()) if ids.min() >= 0 else int(ids.min())
        owner = "model" if self.vocab_size == self.model_vocab_size else "tokenizer"
        raise DataError(
            f"{file} has the id {odd}, and the {owner} has the ids 0 to {self.vocab_size - 1}; give"
            f" the {owner} that the tokens were made for."
        )

    def in_manifest(self) -> dict[str, Any]:
        """The fields on the tokenizer in a `DatasetManifest`."""
        return {
            "vocab_size": self.vocab_size,
            "model_vocab_size": self.model_vocab_size,
            "tokenizer_sha256": self.sha256,
            "eos_id": self.eos_id,
            "dtype": self.dtype.name,
        }


def load_tokenizer(folder: Path, say: Say | None = None) -> Tokenizer:
    """The tokenizer of a folder, without settings that make ids random, cut or pad them.

    Do not change it.

    `say` receives those that were on; default: stderr, once per process.
    """
    backend = _backend(folder, tokenizer_json(folder))
    hf_tokenizer.name_switches(folder, [*backend.switches], say)
    tokenizer: Tokenizer = backend.tokenizer
    return tokenizer


def settled_json(folder: Path) -> tuple[bytes, Tokenizer]:
    """The tokenizer of a folder as `load_tokenizer` reads it, and its tokenizer.json for other
    libraries.
    """
    content = tokenizer_json(folder)
    backend = _backend(folder, content)
    return (
        str(backend.tokenizer.to_str()).encode() if backend.changed else content
    ), backend.tokenizer


def _backend(folder: Path, content: bytes) -> hf_tokenizer.SettledTokenizer:
    try:
        return _read(content, json.dumps(_json(folder / "tokenizer_config.json")))
    except DataError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        path = folder / "tokenizer.json"
        raise DataError(
            f"{path} is not a tokenizer that the tokenizers library reads ({error}); save it again."
        ) from error


@lru_cache(maxsize=1)  # a preparation needs it twice, and a large one takes a second
def _read(content: bytes, config_text: str) -> hf_tokenizer.SettledTokenizer:
    return hf_tokenizer.read_backend(content, parse_json(config_text))


def tokenizer_facts(folder: Path, say: Say | None = None) -> TokenizerFacts:
    """Read a tokenizer folder: its tokenizer, and tokenizer_config.json and config.json if they
    exist.

    `say` receives settings that were switched off, and a sentence on tokens that the model lacks.
    Raises DataError if the model lacks the end of document.
    """
    tokenizer = load_tokenizer(folder, say)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    config = _json(folder / "config.json")
    model_vocab_size = hf_tokenizer.vocabulary_of(config)
    eos_id = hf_tokenizer.end_of_document(
        _json(folder / "tokenizer_config.json"), config, tokenizer.token_to_id
    )
    vocab_size = max(vocab.values(), default=-1) + 1
    if fault := hf_tokenizer.eos_fault(eos_id, model_vocab_size or vocab_size):
        raise DataError(f"{folder}: {fault}.")
    if say is not None and (remark := hf_tokenizer.surplus_remark(vocab, model_vocab_size)):
        say(remark)
    sha256 = tokenizer_digest(folder)
    assert sha256 is not None  # it was read above
    vocab_size = max(vocab_size, -1 if eos_id is None else eos_id + 1)
    vocab_size = vocab_size if model_vocab_size is None else min(vocab_size, model_vocab_size)
    return TokenizerFacts(sha256, vocab_size, model_vocab_size, eos_id)


def model_vocabulary(folder: Path) -> int | None:
    """The number of ids of the model in a tokenizer's folder; None without a config.json that names
    it.
    """
    return hf_tokenizer.vocabulary_of(_json(folder / "config.json"))


def unknown_token(ids: NDArray[Any], vocabulary: int | None, folder: Path) -> str:
    """The reason to refuse a text with these ids if a model of `vocabulary` ids lacks one; else
    empty.
    """
    if vocabulary is None or not len(ids) or int(ids.max()) < vocabulary:
        return ""
    number = int(ids[ids >= vocabulary][0])
    tokenizer = load_tokenizer(folder, lambda _: None)
    is_added = number in tokenizer.get_added_tokens_decoder()
    return hf_tokenizer.unknown_token(
        tokenizer.decode([number], False), number, vocabulary, is_added=is_added
    )


def tokenizer_json(folder: Path) -> bytes:
    """The content of tokenizer.json, converted by transformers if the folder has a tokenizer in
    another form.

    Raises DataError for a folder without a tokenizer, or with one that transformers does not read.
    """
    files = tokenizer_in(path.name for path in folder.iterdir()) if folder.is_dir() else ()
    if not folder.exists():
        raise DataError(
            f"{folder} does not exist; {near_path(folder)}give the folder of a model, for its"
            " tokenizer.",
            code="data.not_found",
        )
    if folder.is_file():
        raise DataError(
            f"{folder} is a file, and {file_kind(folder)}; give the folder of a model, for its"
            " tokenizer."
        )
    if not files:
        raise DataError(
            f"{folder} has no tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model;"
            " give the model's folder, or save a tokenizer into it with"
            " AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    if fault := next(filter(None, (file_misfit(folder / name) for name in files)), None):
        raise DataError(f"{fault}.")
    if files == ("tokenizer.json",):
        return retry((folder / files[0]).read_bytes)
    return _convert_backend(folder, tuple((folder / name).stat().st_mtime_ns for name in files))


@lru_cache(maxsize=4)
def _convert_backend(folder: Path, _file_stamps: tuple[int, ...]) -> bytes:
    files = " and ".join(tokenizer_in(path.name for path in folder.iterdir()))
    try:
        tokenizer = hf_tokenizer.load(folder, lambda _: None)
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # transformers', tokenizers' and sentencepiece's own
        raise DataError(
            f"transformers cannot make a fast tokenizer of {files} in {folder}"
            f" ({first_line(error)}); name its class (tokenizer_class) in tokenizer_config.json, or"
            " save a tokenizer.json with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        ) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = retry(lambda: read_value(path))
    except (OSError, ValueError) as error:
        if is_of_machine(error):
            raise unreadable_error(path, error, "") from error
        raise DataError(f"{path} is not JSON ({error}); copy the model's again.") from error
    return content if isinstance(content, dict) else {}
