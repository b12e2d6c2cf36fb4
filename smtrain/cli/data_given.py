"""What `smtrain data` is given on the command line, checked before anything is read."""

from __future__ import annotations

from typing import Any

from smtrain.errors import ConfigError


def holdout(fraction: float | None, path: str | None, split: str | None) -> Any:
    """What to hold out; None for nothing. Raises `ConfigError` where that is said twice, or is no share."""
    from smtrain.config.validation import parts

    given = {"--validation-fraction": fraction, "--validation-path": path, "--validation-split": split}
    told = [flag for flag, value in given.items() if value is not None]
    if len(told) > 1:
        raise ConfigError([f"{told[0]}, {told[1]}: both say what is held out; leave one of them out"])
    if fraction is not None and not 0 < fraction < 1:
        raise ConfigError([f"--validation-fraction {fraction}: must be above 0 and below 1, such as 0.01"])
    if path is not None:
        named("--validation-path", path)
    try:
        shares = parts(split) if split is not None else None
    except ValueError as error:
        raise ConfigError([f"--validation-split {split}: {error}"]) from None
    from smtrain.data.holdout import HoldOut

    return HoldOut(fraction, shares, path) if told else None


def unescaped(separator: str | None) -> str | None:
    """`\\n` as one types it becomes the line end."""
    try:
        return separator.encode().decode("unicode_escape") if separator else None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"--separator {separator}: {error.reason}; write such as \\n\\n for an empty line"]
        ) from None


def named(word: str, text: str) -> None:
    """Raises `ConfigError` where what should name a file or folder is empty (it would mean the working directory), or
    where tokens are not on this machine."""
    if not text.strip():
        raise ConfigError([f"{word} is an empty name; name a file or a folder"])
    if "://" in text and word.split()[0] in ("DATASET", "PREFIX", "SOURCE"):
        raise ConfigError(
            [f"{word}: {text} is not a folder of this machine; copy the tokens here (`aws s3 sync`) first"]
        )
