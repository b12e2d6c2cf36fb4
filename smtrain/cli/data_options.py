"""Options of `smtrain data`: keys of a config by their flags, with the config's bounds, defaults
and checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import typer

from smtrain.core.config import JobConfig
from smtrain.core.config.annotations import section_in
from smtrain.core.config.data import Data, DecontaminateOptions, LanguageOptions
from smtrain.core.config.section import descriptions, kinds
from smtrain.core.config.training import Train
from smtrain.core.errors import ConfigError

_NO_OPTIONS = {"path", "sources", "prepared", "columns", "document_mask", "machines", "spot"}
"""Keys of section data that are no options: INPUT is the text, --map-keys its columns; the rest is
for jobs.
"""
_IN_SECTIONS: dict[str, Any] = {
    "near_duplicates": float,
    "language": list[str],
    "decontaminate": str,
}
"""Types of options that set the first key of a section."""
_CLEANING = (
    "filters",
    "near_duplicates",
    "pii",
    "phone_region",
    "fix_mojibake",
    "language",
    "language_model",
)
_HELP = {
    "format": (
        "auto, jsonl, json, parquet, arrow, csv, text, mediawiki, wikiextractor, warc, tar,"
        " megatron, alpaca or messages."
    ),
    "text_column": "Field of the text, also a.b, or a template: '{title} {text}'.",
    "encoding": "Encoding of the text, if it is not UTF-8, e.g. cp1252.",
    "separator": "What separates documents of plain text.",
    "unicode": "Normalization: none, nfc or nfkc.",
    "strip_control": "Remove control characters.",
    "min_characters": "Leave out shorter documents.",
    "deduplicate": "Leave out exact duplicates.",
    "filters": "Quality filter: gopher_quality, gopher_repetition, c4 or fineweb; repeatable.",
    "near_duplicates": "Similarity from which documents are near duplicates.",
    "pii": "Personal data: mask, drop or count.",
    "phone_region": "Country of phone numbers without their code: US...",
    "fix_mojibake": "Put right text decoded with a wrong encoding.",
    "language": "Language to keep, by its code (en, de...); repeatable.",
    "language_model": "Another fastText model (.bin, .ftz).",
    "decontaminate": "Leave out documents that share 13 words in a row with this text of a test.",
    "decontaminate_column": "Field of the test's text, or a template.",
    "max_bad": "Unreadable records to skip before giving up.",
    "workers": "Threads; default: one per core.",
    "shard_size": "GB of text per pair of files; more becomes a set.",
    "overlong": "sft, dpo: truncate or drop longer samples.",
    "ray_address": "Prepare on this Ray cluster, whose machines see INPUT and OUT.",
    "max_crashed": "On a cluster: shares to leave out if they crash.",
    "seq_len": "Tokens per sequence.",
    "objective": "pretrain, sft for instruction data, or dpo for pairs.",
}
"""Help shorter than a description; of another key its first sentence is the help, below
`More options`.
"""


def _flag(key: str) -> str:
    return "--filter" if key == "filters" else f"--{key.replace('_', '-')}"


def _option(name: str) -> tuple[str, Any, Any]:
    """A key as a field of `KeyOptions`: its name, the option with the bounds of the config's field,
    its default.
    """
    section, key = _FIELDS[name]
    field = section.model_fields[key]
    default = field.get_default(call_default_factory=True)
    if kind := _IN_SECTIONS.get(name) or (
        list[str] if get_origin(field.annotation) is tuple else None
    ):
        default = None
    else:
        kind = next(
            (
                kind_of_key
                for kind_of_key in (bool, float, int)
                if kind_of_key in kinds(section, key)
            ),
            str,
        )
    minimum = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    text, panel = _HELP.get(name), None
    if text is None:
        text = " ".join(descriptions(section)[key].split()).partition(". ")[0].rstrip(".") + "."
        panel = "More options"
    option = typer.Option(_flag(name), min=minimum, help=text, rich_help_panel=panel)
    return name, Annotated[kind | None if default is None else kind, option], default


_DATA_KEYS = [
    key
    for key, field in Data.model_fields.items()
    if key in _IN_SECTIONS or (key not in _NO_OPTIONS and section_in(field.annotation) is None)
]
_FIELDS: dict[str, tuple[Any, str]] = {
    "seq_len": (Train, "seq_len"),
    "objective": (Train, "objective"),
    **{key: (Data, key) for key in _DATA_KEYS},
    "language_model": (LanguageOptions, "model"),
    "decontaminate_column": (DecontaminateOptions, "text_column"),
}
if TYPE_CHECKING:
    KeyOptions = Any
    CleaningOptions = Any
else:
    KeyOptions = make_dataclass("KeyOptions", map(_option, _FIELDS))
    CleaningOptions = make_dataclass("CleaningOptions", map(_option, _CLEANING))
"""Options for the keys of a preparation, and for those that `smtrain data report` has too."""
FLAGS = {
    "train.objective: sft": "--objective sft",
    "train.objective: dpo": "--objective dpo",
    "train.objective: pretrain": "--objective pretrain",
    "set data.format: megatron": "give --format megatron",
    "set append_eod to false": "give --no-eod",
    "shares": "SHARE",
    "train.objective": "--objective",
    "data.near_duplicates.similarity": "--near-duplicates",
    "data.language.keep": "--language",
    "data.language.model": "--language-model",
    "data.decontaminate.text_column": "--decontaminate-column",
    "data.decontaminate.path": "--decontaminate",
    "data.columns": "--map-keys",
    "model.path": "--model",
    "model.chat_template_kwargs": "--chat-template-kwargs",
    "train.seq_len": "--seq-len",
    "seq_len": "--seq-len",
    **{f"train.validation.{key}": f"--validation-{key}" for key in ("fraction", "path", "split")},
    **{f"data.{key}": _flag(key) for key in _DATA_KEYS},
}
_NEEDS = {
    "language_model": "language",
    "decontaminate_column": "decontaminate",
    "max_crashed": "ray_address",
}
"""Options that do something only with another one."""


def config_of(
    model: str,
    keys: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    train: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
) -> JobConfig:
    """The config that options mean: those of `KeyOptions` by name, other keys of `data` and
    `train`, the template's.

    Raises `ConfigError` for what would also be a fault in a file.
    """
    usual = {field.name: field.default for field in fields(KeyOptions)}
    used = {key: value for key, value in keys.items() if value not in (usual[key], [])}
    for option, required_option in _NEEDS.items():
        if option in used and required_option not in used:
            raise ConfigError(
                f"{_flag(option)} has no effect without {_flag(required_option)}; give it too",
                code="config.combination",
            )
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": model, "chat_template_kwargs": template or {}}
    }
    for name, section, extra_keys in (("data", Data, data), ("train", Train, train)):
        sections[name] = {
            key: _in_config(key, value, keys)
            for key, value in used.items()
            if key in section.model_fields
        }
        sections[name] |= extra_keys or {}
    from smtrain.client.config.checks.data import text_faults
    from smtrain.client.config.checks.train import validation_faults

    config = JobConfig(**sections)
    if faults := [
        sentence for _, sentence in chain(text_faults(config), validation_faults(config))
    ]:
        raise ConfigError(faults, code="config.combination")
    return config


def _in_config(key: str, value: Any, keys: Mapping[str, Any]) -> Any:
    """The value of a key in a config, by the option with its name and those that go with it."""
    if key == "near_duplicates":
        return {"similarity": value}
    if key == "language":
        return {"keep": value, "model": keys["language_model"]}
    if key == "decontaminate":
        return {"path": value, "text_column": keys["decontaminate_column"]}
    return unescape(value) if key == "separator" else value


def refuse_without_effect(config: JobConfig, no_eod: bool) -> None:
    """Raise `ConfigError` for options that do nothing with the objective, and are no keys of its
    text.
    """
    sft = config.train.objective != "pretrain"
    for option, used, of in (
        ("--no-eod", no_eod and sft, "pretrain"),
        ("--chat-template-kwargs", config.model.chat_template_kwargs and not sft, "sft and dpo"),
    ):
        if used:
            raise ConfigError(
                f"{option}: is for --objective {of}; leave it out", code="config.combination"
            )


def unescape(separator: str) -> str:
    """The separator with escapes such as `\\n` resolved."""
    try:
        return separator.encode().decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--separator {separator}: {error.reason}; write such as \\n\\n for an empty line",
            code="config.wrong_value",
        ) from None


def require_name(word: str, text: str) -> None:
    """Raise `ConfigError` for an empty name, which would mean the working directory, and for tokens
    elsewhere.
    """
    if not text.strip():
        raise ConfigError(
            f"{word} is an empty name; name a file or a folder", code="config.wrong_value"
        )
    if text.startswith("demo://") and word.split()[0] in ("DATASET", "PREFIX", "SOURCE"):
        raise ConfigError(
            f"{word}: {text} is no tokens; `smtrain data prepare {text} OUT --model FOLDER` makes"
            " some",
            code="config.wrong_value",
        )
    if "://" in text and word.split()[0] in ("DATASET", "PREFIX", "SOURCE"):
        raise ConfigError(
            f"{word}: {text} is not a folder of this machine; copy the tokens here (`aws s3 sync`)"
            " first",
            code="config.wrong_value",
        )
