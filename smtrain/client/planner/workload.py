"""What a config trains, as the planner counts it: the model's shape, the work of a step, the size of the text."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

from smtrain.client.planner.machines import Recompute, Work, named_shape
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError, first_line
from smtrain.core.facts import table
from smtrain.core.facts.engines import EngineName
from smtrain.core.facts.models import positions
from smtrain.core.model.families import ModelShape
from smtrain.core.model.hf_config import positions_named
from smtrain.core.model.lora import Lora, targets_of
from smtrain.core.near import hint

# What an engine can leave to be computed again, and whether its backward pass gathers once more.
_ENGINES: dict[str, tuple[tuple[Recompute, ...], bool]] = {
    "native": (("none", "full"), False),
    "nxd": (("selective", "full"), True),
}


def work_of(
    config: JobConfig, shape: ModelShape, engine: EngineName | None = None
) -> tuple[Work, tuple[Recompute, ...]]:
    """What a config trains, and which recomputations its engine (or `engine`) knows."""
    recompute, again = _ENGINES[engine or config.train.engine]
    train = config.train
    asked, lora = train.adapter, None
    if asked is not None:
        lora = Lora(asked.rank, asked.alpha, asked.dropout, targets_of(shape, asked.targets), asked.rslora)
    return Work(
        shape, train.seq_len, train.global_batch_size, train.precision, gathers_again=again, lora=lora
    ), recompute  # fmt: skip


def shape_of(config: JobConfig) -> ModelShape:
    """The shape of a config's model: from its folder, or by name for what lies elsewhere. Raises `ConfigError`."""
    if "://" not in config.model.path:
        file = Path(config.model.path) / "config.json"
        try:
            return ModelShape.from_config(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(
                [f"model.path: {file} cannot be read ({first_line(error)}); mend it there, or copy this file again"]
            ) from None
    if config.model.path.startswith("demo://"):
        from smtrain.core.demo import inputs as demo

        if (told := demo.described(config.model.path)) is not None:
            return ModelShape.from_config(told)
    shape = named_shape(config.model.path.partition("@")[0])
    if shape is None:
        name = config.model.path.partition("@")[0].rstrip("/").rpartition("/")[2]
        raise ConfigError(
            [
                f"model.path: nothing is known about the model in {config.model.path}; give --model a folder "
                f"that holds its config.json, or the name of a known model; {hint(name, table('models')['models'])}"
            ]
        )
    return shape


def taken_by_name(config: JobConfig) -> list[str]:
    """A warning where `shape_of` goes by the last part of a path alone, which anyone may give to any model."""
    where, _, rest = config.model.path.partition("@")[0].rstrip("/").partition("://")
    known = {row["source"].removeprefix("config.json of ") for row in table("models")["models"].values()}
    asked = rest.startswith("known-models/")  # --model NAME
    if not rest or where == "demo" or asked or rest in known or named_shape(rest) is None:
        return []
    name = rest.rsplit("/", 1)[-1]
    return [f"the model's size is that of the published {name}, by its name alone: {config.model.path} was not read"]


def described_of(config: JobConfig) -> dict[str, Any] | None:
    """The config.json of a model whose folder is on this machine."""
    try:
        told = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def positions_of(config: JobConfig) -> int | None:
    """The longest sequence of a model whose config.json lies on this machine, or is known as published."""
    if config.model.path.startswith("demo://"):
        from smtrain.core.demo import inputs as demo

        described: Any = demo.described(config.model.path)
    elif "://" in config.model.path:
        return positions(config.model.path)
    else:
        try:
            described = json.loads((Path(config.model.path) / "config.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None  # told elsewhere
    found = positions_named(described) if isinstance(described, dict) else None
    return found if found is not None and found > 1 else None


def text_bytes(config: JobConfig) -> float | None:
    """Of text on this machine; what lies elsewhere is not looked at."""
    paths = [source.path for source in config.data.all_sources]
    if config.data.prepared or not paths or any("://" in path for path in paths):
        return None
    roots = [Path(p) for path in paths for p in (glob.glob(path, recursive=True) if glob.has_magic(path) else [path])]
    files = [f for root in roots for f in (root.rglob("*") if root.is_dir() else [root])]
    return float(sum(f.stat().st_size for f in files if f.is_file()))
