"""Load tokenizers that transformers 4 or 5 saved; 4 cannot read a tokenizer_config.json of 5.

A tokenizer in smtrain always gives the same ids for a text, and all of them: random sampling, truncation and padding
that a folder switches on are switched off (`settle`), and reported.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from smtrain.core.errors import SmtrainError
from smtrain.core.files import read_object, read_value
from smtrain.core.model.families import ModelShape
from smtrain.core.model.text_part import text_part

Say = Callable[[str], None]
_DRAWN = ("dropout", "alpha", "nbest_size")
"""Attributes of a `tokenizers` model that make it random: BPE dropout, and sampling of Unigram."""
_SWITCHES: dict[str, Any] = {"enable_sampling": False, "dropout": None, "truncation": False, "padding": False}
"""Settings of tokenizer_config.json, and their values when off."""
_SAMPLING = ("enable_sampling", "nbest_size", "alpha")
"""Settings that sentencepiece takes from `sp_model_kwargs`."""
_reported: set[Path] = set()
_GENERIC = "PreTrainedTokenizerFast"  # transformers 5 writes TokenizersBackend; both read this name


def for_everyone(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a tokenizer_config.json, with class and special tokens under names that both know."""
    out = dict(config)
    if out.get("tokenizer_class") == "TokenizersBackend":
        out["tokenizer_class"] = _GENERIC
    if isinstance(out.get("extra_special_tokens"), list):
        more = out.get("additional_special_tokens") or []
        out["additional_special_tokens"] = list(dict.fromkeys([*more, *out.pop("extra_special_tokens")]))
    return out


def load(folder: Path, say: Say | None = None) -> Any:
    """Load the tokenizer of a folder, settled, in transformers' class; raises what transformers raises.

    What was switched off is reported to `say`, or once per process on stderr.
    """
    tokenizer = _loaded(folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    name_switches(folder, settle(backend) if backend is not None else [], say)
    return tokenizer


def _loaded(folder: Path) -> Any:
    import transformers

    said = _said(folder)
    off, _ = _settled(said)
    changed = {key: value for key, value in for_everyone(said).items() if said.get(key) != value}
    if not changed or int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **off)
    generic = changed.pop("tokenizer_class", None) is not None
    if "additional_special_tokens" in changed:
        changed["extra_special_tokens"] = {}
    loader: Any = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
    return loader.from_pretrained(folder, local_files_only=True, **changed, **off)


def _said(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    said = read_value(path) if path.is_file() else {}
    return said if isinstance(said, dict) else {}


def settle(tokenizer: Any) -> list[str]:
    """Switch off sampling, truncation and padding of a `tokenizers.Tokenizer`; returns the settings that were on."""
    off = []
    for name in _DRAWN:
        if value := getattr(tokenizer.model, name, None):
            setattr(tokenizer.model, name, None)
            off.append(f"{name} {value:g}")
    if tokenizer.truncation:
        off.append(f"truncation to {tokenizer.truncation.get('max_length')} tokens")
    if tokenizer.padding:
        off.append("padding")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return off


def name_switches(folder: Path, switches: list[str], say: Say | None) -> None:
    """Report the settings that were on: to `say`, or on stderr once per process and folder.

    Worker processes and all ranks but the first stay silent, as each of them loads the same folder.
    """
    try:
        switches = [*switches, *_settled(_said(folder))[1]]
    except ValueError:
        pass  # not JSON, which its reader reports
    folder = folder.resolve()
    first = folder not in _reported and multiprocessing.parent_process() is None and os.environ.get("RANK", "0") == "0"
    if switches and (say is not None or first):
        sentence = (
            f"tokenizer: {', '.join(switches)} is switched off, as every text is to get all of its tokens, always"
        )
        (say or _to_stderr)(sentence)
    _reported.add(folder)


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _settled(said: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Overrides for the settings of a tokenizer_config.json, and the settings that were on."""
    off = {name: value for name, value in _SWITCHES.items() if said.get(name)}
    changed = [f"{name} {said[name]}" for name in off]
    inner = said.get("sp_model_kwargs")
    if isinstance(inner, dict) and inner.get("enable_sampling"):
        off["sp_model_kwargs"] = {key: value for key, value in inner.items() if key not in _SAMPLING}
        changed.append("sp_model_kwargs.enable_sampling True")
    return off, changed


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Number of ids of a model by its config.json; None if unknown."""
    try:
        return ModelShape.from_config(config).vocab
    except SmtrainError:
        size = text_part(config).get("vocab_size")
        return size if isinstance(size, int) and not isinstance(size, bool) else None


def vocab_in(folder: Path) -> dict[str, int]:
    """Tokens and ids from the JSON files of a folder; empty if they have another format, or are damaged."""
    try:
        if (folder / "tokenizer.json").is_file():
            about = read_object(folder / "tokenizer.json")
            listed = about["model"]["vocab"]
            vocab = dict(listed) if isinstance(listed, dict) else {entry[0]: i for i, entry in enumerate(listed)}
            return vocab | {token["content"]: token["id"] for token in about.get("added_tokens") or ()}
        return dict(read_object(folder / "vocab.json"))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def id_faults(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Faults of ids that the folder's tokenizer would write and its model lacks, from the files only."""
    vocab, vocabulary = vocab_in(folder), vocabulary_of(config)
    try:
        eos_id = end_of_document(_said(folder), config, vocab.get)
    except (OSError, ValueError):
        eos_id = None
    return [fault for fault in (vocabulary_fault(vocab, vocabulary), eos_fault(eos_id, vocabulary)) if fault]


def end_of_document(
    said: Mapping[str, Any], config: Mapping[str, Any], id_of: Callable[[str], int | None]
) -> int | None:
    """The id that ends a document: that of tokenizer_config.json's eos_token, else config.json's (first) eos_token_id.

    `id_of` gives a token's id. None if nothing names one, or the tokenizer does not know the token.
    """
    token = said.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        return id_of(token) if isinstance(token, str) else None
    ids = text_part(config).get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    return first if isinstance(first, int) and not isinstance(first, bool) else None


def eos_fault(eos_id: int | None, vocabulary: int | None) -> str:
    """The fault, with its remedy, if a model lacks the id that ends documents; else empty."""
    if eos_id is None or vocabulary is None or 0 <= eos_id < vocabulary:
        return ""
    return (
        f"eos_token_id is {eos_id} and the model has the ids 0 to {vocabulary - 1} (vocab_size {vocabulary}); name the "
        "token that ends its texts as eos_token in tokenizer_config.json, or correct eos_token_id in config.json"
    )


def vocabulary_fault(vocab: Mapping[str, int], vocabulary: int | None) -> str:
    """The fault, with its remedy, if a model lacks ids of a tokenizer's `vocab`; else empty."""
    token = max(vocab, key=lambda name: vocab[name], default=None)
    if token is None or vocabulary is None or vocab[token] < vocabulary:
        return ""
    return (
        f"config.json has vocab_size {vocabulary} and the tokenizer has ids up to {vocab[token]} ({token!r}); use the "
        "tokenizer of this very model, without the tokens that were added to it, or a model with a larger vocabulary"
    )
