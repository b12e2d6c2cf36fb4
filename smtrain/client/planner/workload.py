"""The workload of a config for the planner: the model's shape, the work of a step, the size of the
text.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.planner.machines import Recompute, Work, named_shape
from smtrain.core.config import JobConfig
from smtrain.core.config.machine_defaults import Kind, compiles, is_deterministic, kind_of
from smtrain.core.errors import ConfigError, JobError, SmtrainError, first_line
from smtrain.core.facts import table
from smtrain.core.facts.engines import EngineName, is_neuron
from smtrain.core.facts.name_suggestions import positions
from smtrain.core.facts.trainium2 import flash_lack
from smtrain.core.files import read_object
from smtrain.core.model.extension import positions_after, remarks_of
from smtrain.core.model.hf_config import positions_named
from smtrain.core.model.lora import Lora, targets_of
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.uris import JUMPSTART, JUMPSTART_MODEL, RUN
from smtrain.core.suggest import hint
from smtrain.core.targets import TARGETS

if TYPE_CHECKING:
    from smtrain.client.jobs.jumpstart import JumpStartModel
    from smtrain.client.jobs.parents import Parent

# Recomputations that an engine supports, and whether its backward pass gathers again.
_ENGINES: dict[str, tuple[tuple[Recompute, ...], bool]] = {
    "native": (("none", "full"), False),
    "nxd": (("selective", "full"), True),
}


def work_of(
    config: JobConfig,
    shape: ModelShape,
    engine: EngineName | None = None,
    *,
    neuron: bool | None = None,
) -> tuple[Work, tuple[Recompute, ...]]:
    """The work of a config, and the recomputations that its engine (or `engine`) supports.

    neuron: whether it runs on Neuron cores, whose attention is another. Default: whether the
    config's machines do.
    """
    engine = engine or config.train.engine
    recompute, gathers_again = _ENGINES[engine]
    train = config.train
    adapter, lora = train.adapter, None
    if adapter is not None:
        lora = Lora(
            adapter.rank,
            adapter.alpha,
            adapter.dropout,
            targets_of(shape, adapter.targets),
            adapter.rslora,
            adapter.quantize,
        )
    work = Work(
        shape,
        train.seq_len,
        train.global_batch_size,
        train.precision,
        gathers_again=gathers_again,
        lora=lora,
        separates_documents=config.needs_attention_mask,
        capacity=config.parallel.expert_capacity if shape.experts else None,
        shards_fully=config.parallel.shard == "full",
        saves_rows=config.checkpoint.format == "dcp",
    )
    if neuron is None:
        entry = config.own_machine
        neuron = entry.kind == "neuron" if entry else is_neuron(config.compute.instance_type)
    has_fused_attention = not (
        engine == "nxd" and config.needs_attention_mask
    )  # NxD's kernel knows no samples
    if neuron and engine == "native":
        has_fused_attention = (
            flash_lack(
                train.seq_len,
                shape.widest_head,
                has_mask=work.has_mask,
                is_compiled=bool(train.compile),
            )
            is None
        )
    kind: Kind = "neuron" if neuron else kind_of(config)
    kind = (
        "gpu" if kind == "neuron" and not neuron else kind
    )  # machines that were named in place of the config's
    if (
        shape.rules.sinks and engine == "native"
    ):  # which only FlashAttention computes without scores
        has_fused_attention = kind == "gpu"
    return (
        replace(
            work,
            fused_attention=has_fused_attention,
            is_compiled=compiles(train, kind),
            deterministic=kind == "gpu" and is_deterministic(train, kind),
            document=mean_document(config),
        ),
        recompute,
    )


def mean_document(config: JobConfig) -> float | None:
    """Mean tokens of a document or sample by the manifest of data that are prepared on this
    machine, else None.
    """
    if not config.needs_attention_mask or config.data.prepared is None:
        return None
    try:
        manifest = read_object(Path(config.data.prepared) / "manifest.json")
        return float(manifest["tokens"]) / float(manifest["documents"])
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def shape_of(config: JobConfig) -> ModelShape:
    """The shape of a config's model: from its local folder or the run that exported it, else by its
    name.

    Raises `ConfigError` if unknown.
    """
    if (parent := parent_of(config)) is not None:
        return ModelShape.from_config(parent.model_config)
    if "://" not in config.model.path:
        file = Path(config.model.path) / "config.json"
        try:
            return ModelShape.from_config(read_object(file))
        except SmtrainError as error:
            raise ConfigError(f"model.path: {error}", code=error.code) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.path: {file} cannot be read ({first_line(error)}); mend it there, or copy"
                " this file again",
                code="config.unreadable",
            ) from None
    if config.model.path.startswith("demo://"):
        from smtrain.core.demo import inputs as demo

        if (hf_config := demo.demo_config(config.model.path)) is not None:
            return ModelShape.from_config(hf_config)
    shape = named_shape(config.model.path.partition("@")[0])
    if shape is None:
        name = config.model.path.partition("@")[0].rstrip("/").rpartition("/")[2]
        raise ConfigError(
            f"model.path: nothing is known about the model in {config.model.path}; give --model a"
            " folder that holds its config.json, or the name of a known model;"
            f" {hint(name, table('models')['models'])}",
            code="model.not_found",
        )
    return shape


def parent_of(config: JobConfig) -> Parent | JumpStartModel | None:
    """The run or the JumpStart model that a config starts from; None for any other model.

    Raises `ConfigError` if it is not known.
    """
    if config.model.path.startswith(JUMPSTART):
        return _jumpstart_model(config)
    if not config.model.path.startswith(RUN):
        return None
    from smtrain.client.jobs.parents import (
        planned_parent,
    )  # brings the backends, which a plan does not need otherwise

    try:
        return planned_parent(config, config.model.path)
    except JobError as error:
        raise ConfigError(
            f"{error}; or give --model a folder that holds its config.json", code="model.not_found"
        ) from None


def _jumpstart_model(config: JobConfig) -> JumpStartModel | None:
    """The JumpStart model of a config; None if its path is wrong, which the checks of it say."""
    if not JUMPSTART_MODEL.fullmatch(config.model.path) or not TARGETS[config.target].sagemaker:
        return None
    from smtrain.client.jobs.jumpstart import planned_model

    try:
        return planned_model(config)
    except JobError as error:
        raise ConfigError(
            f"model.path: {config.model.path} could not be looked up: {error}; or give --model a"
            " folder that holds its config.json",
            code="model.not_found",
        ) from None


def model_name(config: JobConfig) -> str:
    """The model's name in a plan: the last part of its path, or a run and the job that exported
    it.
    """
    if (parent := parent_of(config)) is not None:
        return str(parent)
    return config.model.path.rstrip("/").rsplit("/", 1)[-1]


def about_model(config: JobConfig) -> list[str]:
    """Remarks on the model, and a warning if `shape_of` used only the last part of a path, which
    any model may have.
    """
    if (hf_config := described_of(config)) is not None:
        return remarks_of(hf_config, config.extend_rope(hf_config), config.train.seq_len)
    scheme, _, name_path = config.model.path.partition("@")[0].rstrip("/").partition("://")
    local_names = {
        row["source"].removeprefix("config.json of ") for row in table("models")["models"].values()
    }
    is_requested = name_path.startswith("known-models/")  # --model NAME
    if (
        not name_path
        or scheme in ("demo", "run")
        or is_requested
        or name_path in local_names
        or named_shape(name_path) is None
    ):
        return []
    name = name_path.rsplit("/", 1)[-1]
    return [
        f"the model's size is that of the published {name}, by its name alone: {config.model.path}"
        " was not read"
    ]


def described_of(config: JobConfig) -> dict[str, Any] | None:
    """The config.json of a model whose folder is on this machine, or of a run's, else None."""
    if (parent := parent_of(config)) is not None:
        return parent.model_config
    try:
        return read_object(Path(config.model.path) / "config.json")
    except (OSError, ValueError):
        return None


def positions_of(config: JobConfig) -> int | None:
    """The longest sequence of a model by its local config.json, or as published; None if
    unknown.
    """
    if config.model.path.startswith((RUN, JUMPSTART)):
        try:
            hf_config: Any = described_of(config)
        except ConfigError:  # reported by the checks of model.path
            return None
    elif config.model.path.startswith("demo://"):
        from smtrain.core.demo import inputs as demo

        hf_config = demo.demo_config(config.model.path)
    elif "://" in config.model.path:
        shape, rope = named_shape(config.model.path.partition("@")[0]), config.model.rope
        published_positions = positions(config.model.path) or (shape.positions if shape else None)
        return (
            positions_after(published_positions, rope.settings, 0)
            if published_positions and rope
            else published_positions
        )
    else:
        try:
            hf_config = read_object(Path(config.model.path) / "config.json")
        except (OSError, ValueError):
            return None  # reported by the checks of model.path
    if isinstance(hf_config, dict) and config.model.rope is not None:
        try:
            hf_config = config.extend_rope(hf_config)
        except SmtrainError:  # reported by the checks of model.path and model.rope
            return None
    longest = positions_named(hf_config) if isinstance(hf_config, dict) else None
    return longest if longest is not None and longest > 1 else None


def text_bytes(config: JobConfig) -> float | None:
    """Bytes of text on this machine; None if any of it is elsewhere."""
    paths = [source.path for source in config.data.all_sources]
    return None if config.data.prepared or not paths else files_bytes(paths)


def files_bytes(paths: Sequence[str]) -> float | None:
    """Bytes of the files below local paths or globs; None if any is elsewhere."""
    if any("://" in path for path in paths):
        return None
    roots = [
        Path(p)
        for path in paths
        for p in (glob.glob(path, recursive=True) if glob.has_magic(path) else [path])
    ]
    files = [f for root in roots for f in (root.rglob("*") if root.is_dir() else [root])]
    return float(sum(f.stat().st_size for f in files if f.is_file()))
