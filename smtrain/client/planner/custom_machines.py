"""Machines that the user describes: in the config, or in a file, which `smtrain plan --probe`
writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from smtrain.client.config.yaml_file import read_yaml
from smtrain.client.planner.machines import Machine
from smtrain.client.prices import Price
from smtrain.core.config import JobConfig
from smtrain.core.config.compute import MachineEntry, MachineName
from smtrain.core.config.error_messages import key_of, sentence_of
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.facts.engines import lnc_of
from smtrain.core.facts.name_suggestions import instance_meant
from smtrain.core.files import home_path

_FORM: TypeAdapter[dict[MachineName, MachineEntry]] = TypeAdapter(dict[MachineName, MachineEntry])
_HINT = "`smtrain help gpus` shows the form"


def machines_known(config: JobConfig, file: str | Path | None = None) -> dict[str, MachineEntry]:
    """The described machines by name: those of `file` (default: machines.yaml in $SMTRAIN_HOME),
    then the config's.

    Raises `ConfigError` for a file in another format.
    """
    usual = home_path() / "machines.yaml"
    path = Path(file) if file else usual if usual.is_file() else None
    return {**(read_machines(path) if path else {}), **config.machines}


def read_machines(path: Path) -> dict[str, MachineEntry]:
    """The machines of a file. Raises `ConfigError` if it cannot be read or has another format."""
    content = read_yaml(path, "machines", f"it must be YAML, {_HINT}")
    if isinstance(content, Mapping):
        content = content.get(
            "machines", {} if content.keys() & JobConfig.model_fields.keys() else content
        )
    if not content:
        raise ConfigError(f"{path}: describes no machine; {_HINT}", code="config.unreadable")
    try:
        return _FORM.validate_python(content)
    except ValidationError as error:
        raise ConfigError(
            [f"{path}: {_sentence(detail)}" for detail in error.errors()], code="config.wrong_value"
        ) from None


def _sentence(detail: Any) -> str:
    """A fault that pydantic found in a file of machines, worded as for a config."""
    key = ".".join(["machines", *key_of(detail)[0]])
    # A config's sentence would send the reader to the config.
    return (
        f"{key}: is missing; {_HINT}"
        if detail["type"] == "missing"
        else sentence_of(JobConfig, key, detail)
    )


def machine_of(
    type_: str,
    count: int,
    entries: Mapping[str, MachineEntry],
    environment: Mapping[str, str] | None = None,
) -> Machine:
    """A known instance type or a described machine, with the LNC that a job's environment says.
    Raises `ConfigError` for any other name.
    """
    if type_ in entries:
        return Machine.from_entry(type_, count, entries[type_])
    if type_.startswith("ml.") or instance(type_):
        return Machine.of(type_, count, lnc=lnc_of(type_, environment or {}))
    if suggestion := instance_meant(type_):
        raise ConfigError(
            f"machines: {type_} is no instance type; did you mean {suggestion}?",
            code="config.wrong_value",
        )
    if type_ == "here":
        raise ConfigError(
            "machines: here is no machine of a plan; leave it out and set target: local to plan for"
            " this machine",
            code="config.wrong_value",
        )
    names = f"name {', '.join(sorted(entries))}" if entries else f"describe it ({_HINT})"
    raise ConfigError(
        f"machines: {type_} is an unknown instance type; {names}, or name a type such as"
        " ml.p5.48xlarge",
        code="config.wrong_value",
    )


def own_price_rows(entries: Mapping[str, MachineEntry]) -> list[Price]:
    """Price rows of the described machines; the same price on demand and as spot."""
    return [
        Price(name, option, "your own", entry.dollars_per_hour, "today", "machines")
        for name, entry in entries.items()
        if entry.dollars_per_hour is not None
        for option in ("on_demand", "spot")
    ]


def check_name(name: str) -> None:
    """Raise `ConfigError` for a name that a machine cannot have."""
    try:
        TypeAdapter(MachineName).validate_python(name)
    except ValidationError:
        raise ConfigError(
            f"--probe {name}: a name begins with a small letter, and has small letters, digits and"
            " hyphens only",
            code="config.wrong_value",
        ) from None


def entry_of(name: str, measurements: Mapping[str, object]) -> MachineEntry:
    """The entry of a machine from its measurements."""
    return _FORM.validate_python({name: dict(measurements)})[name]
