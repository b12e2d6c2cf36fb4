"""Write a first config for a model, a text and machines: a few keys, each with its description from
the schema.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from smtrain.core.config.schema import JobConfig
from smtrain.core.config.section import descriptions
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.facts.name_suggestions import positions
from smtrain.core.facts.trainium2 import torus_chip
from smtrain.core.files import read_object
from smtrain.core.model.hf_config import positions_named
from smtrain.core.targets import TARGETS

THIS_MACHINE = "here"
_MACHINES = re.compile(r"(ml\.[a-z0-9-]+\.[a-z0-9]+)(?:[:x](\d{1,5}))?")
_WIDTH = 100
DPO_LR = 1e-6
"""TRL 1.16's default for preference training, which falls apart at the rates of text."""


@dataclass(frozen=True)
class Machines:
    """The machines of a config: this machine, or instances of a type."""

    instance_type: str | None
    """None for this machine."""
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Parse `here`, `ml.trn1.32xlarge` or `ml.trn1.32xlarge:2`; raises `ConfigError` for other
        text.
        """
        if text.strip().lower() in (THIS_MACHINE, "local", ""):
            return cls(None)
        match = _MACHINES.fullmatch(text.strip())
        if not match or match[2] == "0":
            raise ConfigError(
                f"machines: got {text!r}; say {THIS_MACHINE}, or an instance type and how many: "
                "ml.trn1.32xlarge:2",
                code="config.wrong_value",
            )
        return cls(match[1], int(match[2] or 1))


def values(
    model: str, data: str, machines: Machines, *, mesh: bool, objective: str = "pretrain"
) -> dict[str, Any]:
    """The keys of the config, without those that should follow the machines: the engine and, if the
    planner knows model and machines (`mesh`), mesh and batch.
    """
    is_local, row = machines.instance_type is None, instance(machines.instance_type or "") or {}
    cores = row.get("cores", 1)
    tp = torus_chip(machines.instance_type or "", row.get("logical_cores", 1)) or min(8, cores)
    planned_values: dict[str, Any] = {}
    batch: dict[str, int] = {}
    if is_local:
        batch = {"global_batch_size": 4}
    elif not (mesh and row):
        copies = machines.count * cores // (tp if row else 1)
        batch = {"global_batch_size": -(-64 // copies) * copies}
    if row and not mesh:
        planned_values = {
            "parallel": {"tp": tp, "sequence_parallel": tp > 1, "activation_checkpointing": "full"}
        }
    length = min(512 if is_local else 4096, _positions(model))
    compute: dict[str, Any] = {
        "instance_type": machines.instance_type,
        "instance_count": machines.count,
    }
    return {
        "name": name_of(model),
        "target": "local" if is_local else "aws",
        "model": {"path": model},
        "data": {"path": data},
        **planned_values,
        "train": {
            **({} if objective == "pretrain" else {"objective": objective}),
            "steps": 100 if is_local else 1000,
            **batch,
            "seq_len": length,
            "lr": DPO_LR if objective == "dpo" else 1e-4,
            "warmup_steps": 0.1,
            "precision": "fp32" if is_local else "bf16",
            "save_interval": 50 if is_local else 100,
        },
        **({} if is_local else {"compute": {**compute, "max_run": "1d"}}),
    }


def text_of(content: dict[str, Any], file: str, *, left_open: dict[str, str]) -> str:
    """The config as YAML for `file`.

    `left_open`: examples of keys such as `compute.role`, as comments.
    """
    lines = ["# Every key, its meaning and its default: `smtrain config schema`."]
    if TARGETS[content["target"]].here:
        lines += [
            f"# A trial first:  smtrain run {file} --set name={content['name'][:30]}-trial --set"
            " train.steps=20"
        ]
    lines += [""]
    for key, value in content.items():
        lines += _comment_lines(JobConfig, key, "")
        if not isinstance(value, dict):
            lines += [f"{key}: {_scalar(value)}", ""]
            continue
        lines.append(f"{key}:")
        section = JobConfig.model_fields[key].annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        for field, inner in value.items():
            lines += [*_comment_lines(section, field, "  "), f"  {field}: {_scalar(inner)}"]
        for open_key, example in left_open.items():
            if open_key.startswith(f"{key}."):
                field = open_key.removeprefix(f"{key}.")
                lines += [*_comment_lines(section, field, "  "), f"  # {field}: {example}"]
        lines.append("")
    return "\n".join(lines)


def name_of(model: str) -> str:
    """A run's name from its model: `llama-3-2-1b` for `hf://meta-llama/Llama-3.2-1B@main`."""
    last = model.partition("@")[0].rstrip("/").replace("\\", "/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", last.lower())[:36].strip("-") or "run"


def _positions(model: str) -> int:
    """The longest sequence of a local or published model; unlimited if unknown."""
    try:
        hf_config = read_object(Path(model).expanduser() / "config.json")
        return positions_named(hf_config) or 1 << 30
    except (OSError, ValueError, AttributeError):
        return 512 if model.startswith("demo://") else positions(model) or 1 << 30


def _comment_lines(section: type[BaseModel], field: str, indent: str) -> list[str]:
    # a wheel has no docs folder
    text = re.sub(r" \(smtrain help [^)]*\)", "", " ".join(descriptions(section)[field].split()))
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
        break_on_hyphens=False,
    )


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        # with a decimal point, as YAML 1.1 reads 1e-4 as text
        return f"{value:.1e}" if value < 1e-3 else f"{value:g}"
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
