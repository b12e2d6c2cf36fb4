"""Read files of settings (YAML, TOML) within bounds; each fault is one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smtrain.core.config.secrets import hide
from smtrain.core.errors import ConfigError, first_line
from smtrain.core.facts import parse as parse_toml
from smtrain.core.files import open_named
from smtrain.core.suggest import near_path
from smtrain.core.yaml_text import MOST_BYTES, YamlError, parse

_ADDRESS = re.compile(r"(https?|s3|oss):/+")
_DOWNLOADS = {
    **dict.fromkeys(("http", "https"), "curl -O {}"),
    "s3": "aws s3 cp {} .",
    "oss": "ossutil cp {} .",
}
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read_yaml(
    path: Path, subject: str = "config", remedy: str = "name the YAML file of the config"
) -> Any:
    """The value of a YAML file; None for an empty one.

    Args:
        path: The file, in UTF-8, of at most `MOST_BYTES`.
        subject: The contents of the file, for sentences.
        remedy: The remedy for a file of another kind, as an imperative.

    Raises:
        ConfigError: It does not exist, cannot be read, or is not YAML that settings can use; with
            line and key.
    """
    return parse_yaml(read_settings(path, subject, remedy), path)


def parse_yaml(text: str, path: Path) -> Any:
    """The value of a YAML text; None for an empty one. Faults name `path`.

    Raises `ConfigError` for text of another format, and for YAML that no settings need.
    """
    try:
        return parse(text)
    except YamlError as error:
        raise ConfigError(
            f"{path}: {hide(' '.join(str(error).splitlines()))}", code="config.unreadable"
        ) from None


def read_toml(path: Path, subject: str, remedy: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises `ConfigError` as `read_yaml` does."""
    text = read_settings(path, subject, remedy)
    try:
        return parse_toml(text)
    except RecursionError:
        raise ConfigError(
            f"{path}: its values are nested too deeply; close the brackets earlier",
            code="config.unreadable",
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path}: {subject} cannot be read ({hide(first_line(error))}); it must be TOML",
            code="config.unreadable",
        ) from None


def read_settings(path: Path, subject: str, remedy: str) -> str:
    """The text of a file of settings.

    Raises `ConfigError` if it does not exist, is too long or not UTF-8.
    """
    try:
        with open_named(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        if address := _ADDRESS.match(str(path)):
            uri = f"{address[1]}://{str(path)[address.end() :]}"
            download = _DOWNLOADS[address[1]].format(uri)
            raise ConfigError(
                f"{uri}: {subject} is read from this machine only; `{download}` downloads it",
                code="config.unreadable",
            ) from None
        if subject == "config" and isinstance(error, FileNotFoundError):
            raise ConfigError(
                f"{path}: no such config file; {near_path(path)}`smtrain init{_new_name(path)}`"
                " writes one",
                code="config.unreadable",
            ) from None
        reason = "it is a folder" if path.is_dir() else error.strerror or first_line(error)
        suggestion = near_path(path) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(
            f"{path}: {subject} cannot be read ({reason}); {suggestion}{remedy}",
            code="config.unreadable",
        ) from None
    except ValueError:
        raise ConfigError(
            f"{str(path)!r}: cannot be a file's name; {remedy}", code="config.unreadable"
        ) from None
    if len(content) > MOST_BYTES:
        raise ConfigError(
            f"{path}: is larger than {MOST_BYTES >> 20} MiB, too large for settings; {remedy}",
            code="config.unreadable",
        )
    return decode_text(content, str(path), remedy)


def _new_name(path: Path) -> str:
    """The argument with which `smtrain init` would write this file; empty if it could not."""
    return f" {path}" if path.suffix in (".yaml", ".yml") and path.parent.is_dir() else ""


def decode_text(content: bytes, name: str, remedy: str) -> str:
    """Decode UTF-8. Raises `ConfigError`, with the line, for other bytes."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
    if kind := _MARKS.get(content[:2]):
        hint = f"it begins as {kind} does; save it as UTF-8, or {remedy}"
    elif b"\0" in content:
        hint = remedy
    else:
        hint = f"line {line} holds the byte 0x{byte:02x}, which is not UTF-8; save it as UTF-8"
    raise ConfigError(f"{name}: is not a text file; {hint}", code="config.unreadable")
