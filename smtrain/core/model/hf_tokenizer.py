"""Load tokenizers that transformers 4 or 5 saved; 4 cannot read a tokenizer_config.json of 5.

A tokenizer in smtrain always gives the same ids for a text, and all of them: random sampling,
truncation and padding that a folder switches on are switched off (`settle`), and reported. It may
have more ids than the model, as published ones do: only a text that gets one of them is refused
(`unknown_token`).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from smtrain.core.errors import SmtrainError
from smtrain.core.files import read_object
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import text_part

Say = Callable[[str], None]
_RANDOM_SETTINGS = ("dropout", "alpha", "nbest_size")
"""Attributes of a `tokenizers` model that make it random: BPE dropout, and sampling of Unigram."""
_SWITCHES: dict[str, Any] = {
    "enable_sampling": False,
    "dropout": None,
    "truncation": False,
    "padding": False,
}
"""Settings of tokenizer_config.json, and their values when off."""
_SAMPLING = ("enable_sampling", "nbest_size", "alpha")
"""Settings that sentencepiece takes from `sp_model_kwargs`."""
_MORE_TOKENS = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")
"""Keys of tokenizer_config.json with several tokens."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_reported_folders: set[Path] = set()
_GENERIC = "PreTrainedTokenizerFast"  # transformers 5 writes TokenizersBackend; both read this name


def for_everyone(config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a tokenizer_config.json, with class and special tokens under names that both
    know.
    """
    out = dict(config)
    if out.get("tokenizer_class") == "TokenizersBackend":
        out["tokenizer_class"] = _GENERIC
    if isinstance(out.get("extra_special_tokens"), list):
        extra_tokens = out.get("additional_special_tokens") or []
        out["additional_special_tokens"] = list(
            dict.fromkeys([*extra_tokens, *out.pop("extra_special_tokens")])
        )
    return out


class SettledTokenizer(NamedTuple):
    """A `tokenizers.Tokenizer`, the settings that were switched off in it, and whether it differs
    from its file.
    """

    tokenizer: Any
    switches: tuple[str, ...]
    changed: bool


def read_backend(content: bytes, tokenizer_config: Mapping[str, Any]) -> SettledTokenizer:
    """The tokenizer of a tokenizer.json, settled; `tokenizer_config` is the file, for the tokens
    that it names.

    Only this function makes one, so that all commands and stages give a text the same ids. Raises
    Exception, as tokenizers does.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content.decode())
    switches = tuple(settle(tokenizer))
    tokens = _named_tokens(tokenizer, tokenizer_config)
    tokenizer.add_tokens(tokens)
    return SettledTokenizer(tokenizer, switches, bool(switches or tokens))


def _named_tokens(tokenizer: Any, tokenizer_config: Mapping[str, Any]) -> list[Any]:
    """Tokens that tokenizer_config.json names (its eos_token...) and tokenizer.json has as pieces
    only.

    transformers makes them whole; else a text that has one would get the ids of its letters.
    """
    from tokenizers import AddedToken

    added_tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    token_values = [value for key, value in tokenizer_config.items() if key.endswith("_token")]
    for key in _MORE_TOKENS:
        entry = tokenizer_config.get(key)
        token_values += (
            entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else []
        )
    tokens = {}
    for token in token_values:
        token_entry = token if isinstance(token, dict) else {"content": token}
        text = token_entry.get("content")
        if (
            isinstance(text, str)
            and text not in added_tokens
            and tokenizer.token_to_id(text) is not None
        ):
            flags = {
                key: token_entry[key] for key in _FLAGS if isinstance(token_entry.get(key), bool)
            }
            tokens[text] = AddedToken(text, **{"special": True, "normalized": False, **flags})
    return [*tokens.values()]


def load(folder: Path, say: Say | None = None) -> Any:
    """Load the tokenizer of a folder, settled, in transformers' class; raises what transformers
    raises.

    What was switched off is reported to `say`, or once per process on stderr.
    """
    tokenizer = _load_tokenizer(folder)
    hf_backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    switches: tuple[str, ...] = ()
    if hf_backend is not None and (folder / "tokenizer.json").is_file():
        backend = read_backend((folder / "tokenizer.json").read_bytes(), _tokenizer_config(folder))
        tokenizer._tokenizer, switches = (
            _complete_tokenizer(backend.tokenizer, hf_backend),
            backend.switches,
        )
    elif hf_backend is not None:
        switches = tuple(settle(hf_backend))
    name_switches(folder, [*switches], say)
    return tokenizer


def _complete_tokenizer(file_tokenizer: Any, hf_tokenizer: Any) -> Any:
    """The tokenizer of a folder's tokenizer.json with what its tokenizer_config.json adds by
    transformers' reading.

    transformers 5 builds many classes with built-in rules and takes only the vocabulary from
    the file: Llama 2 then gets other ids for a text that begins with a space, or follows a special
    token. Data is prepared by the file.
    """
    file_tokenizer.post_processor = (
        hf_tokenizer.post_processor
    )  # the tokens that begin a text, which add_bos_token decides
    added_tokens = sorted(hf_tokenizer.get_added_tokens_decoder().items())
    file_tokenizer.add_tokens(
        [token for _, token in added_tokens if file_tokenizer.token_to_id(token.content) is None]
    )
    return file_tokenizer


def _load_tokenizer(folder: Path) -> Any:
    import transformers

    tokenizer_config = _tokenizer_config(folder)
    off, _ = _deterministic_overrides(tokenizer_config)
    overrides = {
        key: value
        for key, value in for_everyone(tokenizer_config).items()
        if tokenizer_config.get(key) != value
    }
    if not overrides or int(transformers.__version__.split(".")[0]) >= 5:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **off)
    generic = overrides.pop("tokenizer_class", None) is not None
    if "additional_special_tokens" in overrides:
        overrides["extra_special_tokens"] = {}
    loader: Any = transformers.PreTrainedTokenizerFast if generic else transformers.AutoTokenizer
    return loader.from_pretrained(folder, local_files_only=True, **overrides, **off)


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty without one.

    Raises ValueError if it is no JSON object.
    """
    path = folder / "tokenizer_config.json"
    return read_object(path) if path.is_file() else {}


def settle(tokenizer: Any) -> list[str]:
    """Switch off sampling, truncation and padding of a `tokenizers.Tokenizer`; returns the settings
    that were on.
    """
    off = []
    for name in _RANDOM_SETTINGS:
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
        switches = [*switches, *_deterministic_overrides(_tokenizer_config(folder))[1]]
    except ValueError:
        pass  # not JSON, which its reader reports
    folder = folder.resolve()
    first = (
        folder not in _reported_folders
        and multiprocessing.parent_process() is None
        and os.environ.get("RANK", "0") == "0"
    )
    if switches and (say is not None or first):
        sentence = (
            f"tokenizer: {', '.join(switches)} is switched off, as every text is to get all of its"
            " tokens, always"
        )
        (say or _to_stderr)(sentence)
    _reported_folders.add(folder)


def _to_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _deterministic_overrides(
    tokenizer_config: Mapping[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    """Overrides for the settings of a tokenizer_config.json, and the settings that were on."""
    off = {name: value for name, value in _SWITCHES.items() if tokenizer_config.get(name)}
    changes = [f"{name} {tokenizer_config[name]}" for name in off]
    inner = tokenizer_config.get("sp_model_kwargs")
    if isinstance(inner, dict) and inner.get("enable_sampling"):
        off["sp_model_kwargs"] = {
            key: value for key, value in inner.items() if key not in _SAMPLING
        }
        changes.append("sp_model_kwargs.enable_sampling True")
    return off, changes


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Number of ids of a model by its config.json; None if unknown."""
    try:
        return ModelShape.from_config(config).vocab
    except SmtrainError:
        size = text_part(config).get("vocab_size")
        return size if isinstance(size, int) and not isinstance(size, bool) else None


def vocab_in(folder: Path) -> dict[str, int]:
    """Tokens and ids from the JSON files of a folder; empty if they have another format, or are
    damaged.
    """
    try:
        if (folder / "tokenizer.json").is_file():
            content = read_object(folder / "tokenizer.json")
            vocab_entries = content["model"]["vocab"]
            vocab = (
                dict(vocab_entries)
                if isinstance(vocab_entries, dict)
                else {entry[0]: i for i, entry in enumerate(vocab_entries)}
            )
            return vocab | {
                token["content"]: token["id"] for token in content.get("added_tokens") or ()
            }
        return dict(read_object(folder / "vocab.json"))
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def end_fault(folder: Path, config: Mapping[str, Any]) -> str:
    """The fault, with its remedy, if a model lacks the id that ends documents, from its folder's
    files; else empty.
    """
    try:
        eos_id = end_of_document(_tokenizer_config(folder), config, vocab_in(folder).get)
    except (OSError, ValueError):
        return ""
    return eos_fault(eos_id, vocabulary_of(config))


def end_of_document(
    tokenizer_config: Mapping[str, Any],
    config: Mapping[str, Any],
    id_of: Callable[[str], int | None],
) -> int | None:
    """The id that ends a document: that of tokenizer_config.json's eos_token, else config.json's
    (first) eos_token_id.

    `id_of` gives a token's id. None if nothing names one, or the tokenizer does not know the token.
    """
    token = tokenizer_config.get("eos_token")
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
        f"eos_token_id is {eos_id} and the model has the ids 0 to {vocabulary - 1} (vocab_size"
        f" {vocabulary}); name the token that ends its texts as eos_token in tokenizer_config.json,"
        " or correct eos_token_id in config.json"
    )


def surplus_remark(vocab: Mapping[str, int], vocabulary: int | None) -> str:
    """A sentence on tokens of a tokenizer that a model has no ids for; empty without any.

    Such a tokenizer is no fault: Gemma 3 1B has the token of images, and Llama 2 is often given one
    for padding.
    """
    beyond = [
        token for token, number in vocab.items() if vocabulary is not None and number >= vocabulary
    ]
    if not beyond:
        return ""
    tokens = "one token" if len(beyond) == 1 else f"{len(beyond):,} tokens"
    first = min(beyond, key=lambda token: vocab[token])
    return (
        f"the tokenizer has {tokens} beyond the model's vocab_size of {vocabulary} ({first!r} is"
        f" {vocab[first]}); only a text that has such a token is refused"
    )


def unknown_token(token: str, number: int, vocabulary: int, *, is_added: bool) -> str:
    """The reason why a text is refused whose `token` has an id that the model lacks.

    `is_added` tells a token that was added to a tokenizer from the pieces of its vocabulary.
    """
    owner_clause = "" if is_added else "; the tokenizer is that of another model"
    return (
        f"the token {token!r} has the id {number}, and the model has the ids 0 to {vocabulary - 1} "
        f"(vocab_size {vocabulary}){owner_clause}"
    )
