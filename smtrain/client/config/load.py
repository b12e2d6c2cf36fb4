"""Merge YAML, keyword arguments and `--set key=value` into one typed draft of a config, with all
its faults.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from smtrain.client.config.checks import combination_faults, model_faults, secret_faults
from smtrain.client.config.yaml_file import parse_yaml, read_yaml
from smtrain.core.config.annotations import section_in
from smtrain.core.config.error_messages import format_value, key_meant, key_of, sentence_of
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.secrets import hide
from smtrain.core.config.section import kinds
from smtrain.core.config.training import REFERENCES
from smtrain.core.errors import ConfigError, Sentence
from smtrain.core.protocol.uris import meant
from smtrain.core.targets import TARGETS
from smtrain.core.text import with_article
from smtrain.core.yaml_text import MOST_DEPTH, YamlError, parse, placeholder_fault

Source = JobConfig | Mapping[str, Any] | str | Path
_DIGITS = 100
_LARGEST = 10**_DIGITS
_MOST_FAULTS = 50
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
_OTHER_FORMATS = (".toml", ".ini", ".cfg", ".py")
_KINDS = {str: "text", list: "list", bool: "word", int: "number", float: "number"}
# Of `run` and `launch`. Other functions take only sections beyond their own parameters.
_PARAMETERS = frozenset({"wait", "again", "check", "stage", "say", "view", "on_line"})
_LOCAL_PATHS = (
    ("model", "path"),
    ("model", "weights"),
    ("data", "path"),
    ("data", "prepared"),
    ("evaluate", "data"),
    ("evaluate", "text"),
)


@dataclass
class Draft:
    """A typed config without the values that its machines decide, and the faults found so far."""

    config: JobConfig | None
    """None if no typed config could be made."""
    faults: list[str]
    left_out: set[str]
    """Invalid keys; checks that depend on them are skipped."""
    auto: bool
    """Whether `parallel` was the word auto."""


def draft(
    source: Source | None = None,
    *,
    set_: Sequence[str] = (),
    target: str | None = None,
    **sections: Any,
) -> Draft:
    """Merge the sources of a config: the file, then the sections, then `set_`, as `load_config`
    says.
    """
    if "set" in sections:
        raise ConfigError(
            "set: the parameter is set_, with texts such as set_=['train.lr=3e-4']",
            code="call.invalid",
        )
    if parameters := sorted(_PARAMETERS & sections.keys()):
        raise ConfigError(
            f"{parameters[0]}: is a parameter of another call, and no key of a config; leave it out",
            code="call.invalid",
        )
    raw = _read(source)
    _merge(raw, _absolute(_plain(sections), Path.cwd()))
    faults: list[str] = []
    for text in set_:
        faults += _assign(raw, text)
    targets = get_args(JobConfig.model_fields["target"].annotation)
    if target is not None and raw.get("target", target) in (
        *targets,
        target,
    ):  # a wrong target stays, to be reported
        raw["target"] = target
    if wrong := [*_text_faults(raw), *_name_faults(raw)]:
        raise ConfigError(
            [" ".join(fault.splitlines()) for fault in wrong[:_MOST_FAULTS]],
            code="config.wrong_value",
        )
    _mark_remote_paths(raw)
    auto = raw.get("parallel") == "auto"
    config, removed_keys, validation_faults = _validate(
        {key: value for key, value in raw.items() if not auto or key != "parallel"}
    )
    return Draft(config, faults + validation_faults, removed_keys, auto)


def faults_of(config: JobConfig, left_out: set[str], *, shape_alone: bool = False) -> Iterator[str]:
    """The faults of a whole config, without those that depend on the keys left out; `shape_alone`:
    the model's folder needs only its config.json.
    """
    for keys, text in combination_faults(config):
        if not left_out & keys:
            yield text if isinstance(text, Sentence) else Sentence(text, "config.combination")
    yield from (text for _, text in secret_faults(config))
    yield from (
        text for keys, text in model_faults(config, shape_alone=shape_alone) if not left_out & keys
    )


def _read(source: Source | None) -> dict[str, Any]:
    if source is None:
        return {}
    if isinstance(source, JobConfig):
        return source.model_dump(mode="json", exclude_unset=True)
    if isinstance(source, Mapping):
        return _absolute(_plain(source), Path.cwd())
    if not str(source):
        raise ConfigError(
            "the config file is an empty name; name a YAML file", code="config.unreadable"
        )
    path = Path("the YAML text") if is_yaml_text(source) else Path(source)
    content = parse_yaml(str(source), path) if is_yaml_text(source) else _read_file(path)
    if content is None:
        raise ConfigError(
            f"{path}: is empty; a config needs at least model.path", code="config.unreadable"
        )
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: must hold keys and values at the top, such as `name: my-run`, not"
            f" {with_article(_KINDS.get(type(content), 'value'))}",
            code="config.unreadable",
        )
    if content and not content.keys() & JobConfig.model_fields.keys():
        key_names = ", ".join(JobConfig.model_fields)
        suggestions = [
            meant_key for key in content if (meant_key := key_meant(JobConfig, str(key)))
        ]
        hint = f"did you mean {suggestions[0]}?" if suggestions else "is this the file you meant?"
        raise ConfigError(
            f"{path}: holds no key of a config ({key_names}); {hint}", code="config.unreadable"
        )
    return _absolute(content, Path.cwd() if is_yaml_text(source) else path.resolve().parent)


def _read_file(path: Path) -> Any:
    """The value of a config file; a TOML, INI or Python file is refused by its ending."""
    if path.suffix.lower() in _OTHER_FORMATS and path.is_file():
        raise ConfigError(
            f"{path}: a config is a YAML or JSON file, not {path.suffix}; write its keys as YAML,"
            " as `smtrain init` does",
            code="config.unreadable",
        )
    return read_yaml(path)


def is_yaml_text(source: object) -> bool:
    """Whether a source is the text of a config, not the path of its file."""
    return isinstance(source, str) and "\n" in source.strip("\n")


def _plain(value: Any, key: str = "", depth: int = 1) -> Any:
    """Make plain mappings of sections, so that all sources merge in the same way.

    Raises `ConfigError` for what no file of settings can hold: a value that contains itself, a key
    of another type than text, a number of a hundred digits.
    """
    key_prefix = f"{key}: " if key else ""
    if depth > MOST_DEPTH:
        raise ConfigError(
            f"{format_value(key)}: its values are nested too deeply, or it holds itself; give plain"
            " values",
            code="config.wrong_value",
        )
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        plain = {}
        for name, item in value.items():
            if not isinstance(name, str | int | float | NoneType):
                raise ConfigError(
                    f"{key_prefix}the key {format_value(repr(name))} is"
                    f" {with_article(type(name).__name__)}; a key is text",
                    code="config.wrong_value",
                )
            plain[str(name)] = _plain(item, f"{key}.{name}" if key else str(name), depth + 1)
        return plain
    if isinstance(value, (list, tuple)):
        return [_plain(item, key, depth + 1) for item in value]
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ConfigError(
            f"{key_prefix}a number has over {_DIGITS} digits; give a smaller one",
            code="config.wrong_value",
        )
    return str(value) if isinstance(value, Path) else value


def _text_faults(value: Any, key: str = "") -> Iterator[str]:
    """Texts with characters that no file name, variable or request can hold."""
    if isinstance(value, dict):
        for name, item in value.items():
            inner = f"{key}.{name}" if key else name
            yield from _text_faults(
                name, f"{key}: the key {name!r}" if key else f"the key {name!r}"
            )
            yield from _text_faults(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _text_faults(item, key)
    elif isinstance(value, str) and not value.isprintable():
        if "\0" in value and key != "data.separator":
            yield f"{key}: holds the character U+0000; take it out"
        elif any("\ud800" <= letter <= "\udfff" for letter in value):
            yield f"{key}: holds a byte outside UTF-8; write the text in UTF-8"


def _name_faults(raw: dict[str, Any]) -> Iterator[str]:
    """Paths that are too long for a file system."""
    for mapping, field in _paths(raw):
        value = mapping.get(field) if isinstance(mapping, dict) else None
        if not isinstance(value, str):
            continue
        path_bytes = value.encode("utf-8", "surrogatepass")
        if len(path_bytes) > _LONGEST_PATH or any(
            len(part) > _LONGEST_NAME for part in path_bytes.split(b"/")
        ):
            section = next((f"{name}." for name, section in raw.items() if section is mapping), "")
            yield (
                f"{section}{field}: {format_value(value)} is too long for a path (at most"
                f" {_LONGEST_NAME} bytes between two slashes, {_LONGEST_PATH:,} in all); name a"
                " shorter one"
            )


def _paths(raw: dict[str, Any]) -> list[tuple[Any, str]]:
    """Sections, and the key of each that holds a path."""
    places = [(raw.get(section), field) for section, field in _LOCAL_PATHS]
    data = raw.get("data")
    sources = data.get("sources") if isinstance(data, dict) else None
    places += [(source, "path") for source in sources] if isinstance(sources, list) else []
    train = raw.get("train")
    validation, dpo = (
        train.get(name) if isinstance(train, dict) else None for name in ("validation", "dpo")
    )
    if isinstance(dpo, dict) and dpo.get("reference") not in REFERENCES:
        places.append((dpo, "reference"))
    return [*places, (validation, "path")]


def _absolute(raw: dict[str, Any], base: Path) -> dict[str, Any]:
    for mapping, field in _paths(raw):
        value = mapping.get(field) if isinstance(mapping, dict) else None
        if (
            isinstance(mapping, dict)
            and isinstance(value, str)
            and value
            and not _is_address(value, base)
        ):
            mapping[field] = str((base / _home_of(value)).absolute())
    return raw


def _mark_remote_paths(raw: dict[str, Any]) -> None:
    """Make file:// URIs of absolute paths that the jobs see and this machine does not: those that
    do not exist here, if the target's section names a host to reach by ssh, which checks them
    later; and those below a mount of `data`.
    """
    record = TARGETS.get(str(raw.get("target")))
    section = raw.get(record.section or "") if record else None
    if not isinstance(section, dict):
        return
    mounts = section.get("data")
    mount_list = (
        mounts if isinstance(mounts, (list, tuple)) else ()
    )  # another type is refused later
    folders = [
        mount["path"]
        for mount in mount_list
        if isinstance(mount, dict) and isinstance(mount.get("path"), str)
    ]
    for mapping, field in _paths(raw):
        value = mapping.get(field) if isinstance(mapping, dict) else None
        if not (isinstance(mapping, dict) and isinstance(value, str) and value.startswith("/")):
            continue
        is_mounted = any(f"{value}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)
        if is_mounted or (
            section.get("host") and not glob.has_magic(value) and not Path(value).exists()
        ):
            mapping[field] = "file://" + value.rstrip("/")


def _is_address(value: str, base: Path) -> bool:
    """Whether this is a URI, or was probably meant as one and does not exist as a path."""
    return "://" in value or (meant(value) is not None and not (base / value).exists())


def _home_of(text: str) -> Path:
    """A path with `~` expanded; unchanged if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _merge(into: dict[str, Any], section: Mapping[str, Any]) -> None:
    for key, value in section.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _assign(raw: dict[str, Any], text: str) -> list[str]:
    try:
        parts, value = parse_assignment(text)
    except ConfigError as error:
        return [f"--set {fault}" for fault in error.faults]
    node = raw
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            return [
                f"--set {format_value(text)}: {part} holds a value, not keys; leave out what"
                f" follows it, or set {part} itself"
            ]
        node = child
    node[parts[-1]] = value
    _absolute(raw, Path.cwd())
    return []


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """The parts of the key and the value in `a.b=value`. Raises `ConfigError` for other text."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{format_value(text)}: must look like train.lr=2e-4", code="config.wrong_value"
        )
    if len(parts) > MOST_DEPTH:
        raise ConfigError(
            f"{format_value(text)}: a key has at most {MOST_DEPTH} parts; write such as"
            " train.lr=2e-4",
            code="config.wrong_value",
        )
    text_key = _is_text(parts)
    try:
        parsed_value = parse(value)
    except YamlError as error:
        fault = placeholder_fault([value]) or (
            "" if error.syntax or (text_key and value.lstrip()[:1] not in "[{") else error.message
        )
        if fault:
            raise ConfigError(hide(f"{format_value(text)}: {fault}")) from None
        parsed_value = value
    return parts, value if isinstance(parsed_value, int | float) and text_key else parsed_value


def _is_text(parts: list[str]) -> bool:
    """Whether a key takes only text, such as `name`: `--set name=123` means the characters."""
    model: Any = JobConfig
    for part in parts[:-1]:
        field = model.model_fields.get(part) if model else None
        model = section_in(field.annotation) if field else None
    if not model or parts[-1] not in model.model_fields:
        return False
    return kinds(model, parts[-1]) <= {str, NoneType}


def _validate(raw: dict[str, Any]) -> tuple[JobConfig | None, set[str], list[str]]:
    """The config, the keys that were left out to build it, and the faults of those keys.

    Faulty keys are dropped until the rest is valid, so that the rules for combinations can check
    the rest.
    """
    raw = json.loads(json.dumps(raw, default=str))
    removed_keys: set[str] = set()
    faults: list[str] = []
    for _ in range(3):
        try:
            return JobConfig.model_validate(raw), removed_keys, faults
        except ValidationError as error:
            for number, detail in enumerate(error.errors()):
                loc, key = key_of(detail)
                if number >= _MOST_FAULTS:
                    _drop(raw, loc)
                    continue
                if key not in removed_keys:
                    faults.append(sentence_of(JobConfig, key, detail))
                removed_keys.add(key)
                _drop(raw, loc)
                if detail["type"] == "missing" and key in ("model", "model.path"):
                    raw["model"] = {**(raw.get("model") or {}), "path": "demo://tiny-llama"}
                    removed_keys.add("model.path")
    return None, removed_keys, faults


def _drop(raw: dict[str, Any], loc: list[str]) -> None:
    node: Any = raw
    for part in loc[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict) and loc:
        node.pop(loc[-1], None)
