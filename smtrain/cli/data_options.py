"""Options of `smtrain data`, checked before anything is read."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import ValidationError

from smtrain.core.errors import ConfigError

FLAGS = {
    "train.seq_len": "--seq-len", "seq_len": "--seq-len", "train.objective: sft": "--objective sft",
    "train.objective: dpo": "--objective dpo",
    "train.objective: pretrain": "--objective pretrain", "train.objective": "--objective", "model.path": "--model",
    "data.format": "--format", "data.text_column": "--text-column", "data.separator": "--separator",
    "train.validation.fraction": "--validation-fraction", "train.validation.path": "--validation-path",
    "train.validation.split": "--validation-split", "data.max_bad": "--max-bad", "data.encoding": "--encoding",
    "set append_eod to false": "give --no-eod", "shares": "SHARE", "data.filters": "--filter",
    "data.near_duplicates": "--near-duplicates", "data.pii": "--pii", "data.workers": "--workers",
    "data.shard_size": "--shard-size", "data.ray_address": "--ray-address", "data.max_crashed": "--max-crashed",
    "filters": "--filter", "near_duplicates.similarity": "--near-duplicates", "pii": "--pii",
    "phone_region": "--phone-region", "unicode": "--unicode", "data.language.model": "--language-model",
    "data.language": "--language", "language.keep": "--language", "data.fix_mojibake": "--fix-mojibake",
    "data.decontaminate": "--decontaminate", "data.decontaminate.text_column": "--decontaminate-column",
    "data.language.keep": "--language", "language": "--language",
}  # fmt: skip
Filters = Annotated[
    list[str] | None,
    typer.Option("--filter", help="Quality filter: gopher_quality, gopher_repetition, c4 or fineweb; repeatable."),
]
Near = Annotated[
    float | None, typer.Option("--near-duplicates", help="Similarity from which documents are near duplicates.")
]
Pii = Annotated[str | None, typer.Option("--pii", help="Personal data: mask, drop or count.")]
PhoneRegion = Annotated[
    str | None, typer.Option("--phone-region", help="Country of phone numbers without their code: US...")
]
FixMojibake = Annotated[bool, typer.Option("--fix-mojibake", help="Put right text decoded with a wrong encoding.")]
Language = Annotated[
    list[str] | None, typer.Option("--language", help="Language to keep, by its code (en, de...); repeatable.")
]
LanguageModel = Annotated[str | None, typer.Option("--language-model", help="Another fastText model (.bin, .ftz).")]


def holdout(fraction: float | None, path: str | None, split: str | None) -> Any:
    """The held-out part; None for nothing. Raises `ConfigError` if two options name one, or for an invalid share."""
    from smtrain.core.config.training import parts

    flags = {"--validation-fraction": fraction, "--validation-path": path, "--validation-split": split}
    used = [flag for flag, value in flags.items() if value is not None]
    if len(used) > 1:
        raise ConfigError(
            f"{used[0]}, {used[1]}: both say what is held out; leave one of them out", code="config.combination"
        )
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError(
            f"--validation-fraction {fraction}: must be above 0 and below 1, such as 0.01", code="config.wrong_value"
        )
    if path is not None:
        named("--validation-path", path)
    try:
        shares = parts(split) if split is not None else None
    except ValueError as error:
        raise ConfigError(f"--validation-split {split}: {error}", code="config.wrong_value") from None
    from smtrain.worker.data.clean.holdout import HoldOut

    return HoldOut(fraction, shares, path) if used else None


def cleaning(
    near_duplicates: float | None, language: list[str] | None, language_model: str | None, **values: Any
) -> Any:
    """The cleaning of documents; `values` are other keys of section data, by name.

    Raises `ConfigError` for values that the section would refuse.
    """
    from smtrain.core.config.data import Data
    from smtrain.core.config.error_messages import key_of, sentence_of
    from smtrain.worker.data.clean.cleaning import Cleaning

    values["near_duplicates"] = {"similarity": near_duplicates} if near_duplicates is not None else None
    values["language"] = {"keep": language, "model": language_model} if language else None
    try:
        data = Data.model_validate({**values, "filters": values["filters"] or ()})
    except ValidationError as error:
        raise ConfigError([sentence_of(Data, key_of(fault)[1], fault) for fault in error.errors()]) from None
    for option, needed, given, has in (
        ("--phone-region", "--pii", data.phone_region, data.pii),
        ("--language-model", "--language", language_model, language),
    ):
        if given and not has:
            raise ConfigError(f"{option} has no effect without {needed}; give it too", code="config.combination")
    return Cleaning.of(data)


def refuse_without_effect(objective: str, **given: object) -> None:
    """Raise `ConfigError` for options that do nothing here; `given` has their values by name."""
    flags = {name: f"--{name.replace('_', '-')}" for name in given}
    without = [
        (flags[name], flags[needed])
        for name, needed in (("decontaminate_column", "decontaminate"), ("max_crashed", "ray_address"))
        if given.pop(name) and not given.get(needed)
    ]
    if without:
        option, needed = without[0]
        raise ConfigError(f"{option} has no effect without {needed}; give it too", code="config.combination")
    del given["ray_address"]
    of_records = [flags[name] for name in ("overlong", "chat_template_kwargs") if given.pop(name, None)]
    if objective == "pretrain":
        used, of = of_records, "sft and dpo"
    else:
        used, of = [flags[name] for name, value in given.items() if value], "pretrain"
    if used:
        verb, them = ("are", "them") if len(used) > 1 else ("is", "it")
        raise ConfigError(
            f"{', '.join(used)}: {verb} for --objective {of}; leave {them} out", code="config.combination"
        )


def unescaped(separator: str | None) -> str | None:
    """The separator with escapes such as `\\n` resolved."""
    try:
        return separator.encode().decode("unicode_escape") if separator else None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--separator {separator}: {error.reason}; write such as \\n\\n for an empty line",
            code="config.wrong_value",
        ) from None


def named(word: str, text: str) -> None:
    """Raise `ConfigError` for an empty name, which would mean the working directory, and for tokens elsewhere."""
    if not text.strip():
        raise ConfigError(f"{word} is an empty name; name a file or a folder", code="config.wrong_value")
    if text.startswith("demo://") and word.split()[0] in ("DATASET", "PREFIX", "SOURCE"):
        raise ConfigError(
            f"{word}: {text} is no tokens; `smtrain data prepare {text} OUT --model FOLDER` makes some",
            code="config.wrong_value",
        )
    if "://" in text and word.split()[0] in ("DATASET", "PREFIX", "SOURCE"):
        raise ConfigError(
            f"{word}: {text} is not a folder of this machine; copy the tokens here (`aws s3 sync`) first",
            code="config.wrong_value",
        )
