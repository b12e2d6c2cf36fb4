"""Complete the config of a job: the planner fills in what is left open, and all faults are reported
at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from smtrain.client.config.checks.local_data import local_data_faults
from smtrain.client.config.checks.machines import missing_type_fault
from smtrain.client.config.checks.weights import reference_faults, shape_faults
from smtrain.client.config.load import Draft, Source, draft, faults_of
from smtrain.client.planner.custom_machines import machines_known
from smtrain.client.planner.fallback import fallback_faults
from smtrain.client.planner.machines import named_config, named_shape
from smtrain.client.planner.resolve_mesh import NO_MESH, with_engine, with_processes, with_sizes
from smtrain.client.planner.routable import torus_faults
from smtrain.client.planner.this_machine import is_here
from smtrain.client.planner.workload import described_of, shape_of
from smtrain.core.config import JobConfig
from smtrain.core.config.schema import is_of_aws
from smtrain.core.config.secrets import hide
from smtrain.core.config.training import RopeSection
from smtrain.core.errors import ConfigError, JobError, Sentence, reword
from smtrain.core.facts import instance, table
from smtrain.core.facts.engines import engine_of, sagemaker_lack
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.requests import stage_of
from smtrain.core.protocol.uris import RUN
from smtrain.core.public_api import public
from smtrain.core.suggest import hint
from smtrain.core.targets import TARGETS

_LOADED_CONFIGS: WeakValueDictionary[int, JobConfig] = WeakValueDictionary()
"""Configs that were loaded, by id: meshes are searched and faults looked for once, not in every
call that takes one.
"""


@public
def load_config(
    source: Source | None = None,
    *,
    set_: Sequence[str] = (),
    target: str | None = None,
    **sections: Any,
) -> JobConfig:
    """Build the config of a job, and report all its faults at once.

    Later sources win: the file, then the sections, then `set_`. Local paths in a file are relative
    to that file, any other path to the working directory. Engine, mesh, batch and sequence length,
    if not drafted, are chosen by the target, the machines and the model.

    Args:
        source: A YAML file's path, a YAML text of several lines, a mapping, or a `JobConfig`. None:
            `sections` are all of it.
        set_: `a.b=value` texts, as for `--set`; the value is read as YAML.
        target: the name of a target; overrides the config.
        **sections: The config's sections as mappings, merged into `source`.

    Returns:
        The config: typed, frozen, with all defaults filled in.

    Raises:
        ConfigError: The config cannot run; `faults` has one sentence for each reason.

    Examples:
        >>> config = smtrain.load_config("llama.yaml", train={"steps": 20}, set_=["train.lr=3e-4"])
        >>> config.train.steps, config.train.lr
        (20, 0.0003)
    """
    if (loaded_config := _as_loaded(source, set_, sections)) and target in (
        None,
        loaded_config.target,
    ):
        return loaded_config
    return _validate(draft(source, set_=set_, target=target, **sections))


@dataclass(frozen=True)
class Earlier:
    """An earlier config of a list, whose model a later one reads."""

    config: JobConfig
    path: str
    """The model that it starts from itself, or the first of those before it: shape and tokenizer
    are the same.
    """
    rope: RopeSection | None
    """The model.rope that its export will have: its own, or that of the last one before it with
    one.
    """


def earlier_of(drafts: Sequence[JobConfig | None]) -> list[dict[str, Earlier]]:
    """For each config of a list the earlier ones that it names as run://NAME, by the key that names
    them.
    """
    earlier_runs: list[dict[str, Earlier]] = []
    by_name: dict[str, Earlier] = {}
    for config in drafts:
        runs = runs_in(config) if config else {}
        earlier_runs.append({key: by_name[run] for key, run in runs.items() if run in by_name})
        if config:
            base = earlier_runs[-1].get("model.path")
            rope = config.model.rope or (base.rope if base else None)
            by_name[config.name] = Earlier(config, base.path if base else config.model.path, rope)
    return earlier_runs


def runs_in(config: JobConfig) -> dict[str, str]:
    """The runs whose models a config reads, by key, also if it names a job of a run."""
    names = {key: path.removeprefix(RUN).rstrip("/") for key, path in _run_paths(config).items()}
    return {key: (stage_of(name) or (name, ""))[0] for key, name in names.items()}


def with_tags(config: JobConfig, **tags: str) -> JobConfig:
    """A loaded config with more tags for its jobs; tags change nothing else, so it counts as loaded
    too.
    """
    return _copy_with(config, tags={**config.tags, **tags})


def with_models(config: JobConfig, paths: Mapping[str, str]) -> JobConfig:
    """A loaded config with other models of the same shape, by key (`runs_in`); it counts as loaded
    too.
    """
    model, train = config.model, config.train
    if (path := paths.get("model.path")) is not None:
        model = model.model_copy(update={"path": path})
    if (path := paths.get("train.dpo.reference")) is not None and train.dpo:
        train = train.model_copy(update={"dpo": train.dpo.model_copy(update={"reference": path})})
    return _copy_with(config, model=model, train=train)


def with_rope(config: JobConfig, rope: RopeSection | None) -> JobConfig:
    """A loaded config with another model.rope; it counts as loaded too."""
    return _copy_with(config, model=config.model.model_copy(update={"rope": rope}))


def _copy_with(config: JobConfig, **values: Any) -> JobConfig:
    copy = config.model_copy(update=values)
    if _LOADED_CONFIGS.get(id(config)) is config:
        _LOADED_CONFIGS[id(copy)] = copy
    return copy


def _as_loaded(
    source: Source | None, set_: Sequence[str], sections: dict[str, Any]
) -> JobConfig | None:
    """The source, if it is a config that `load_config` returned and nothing is to be changed in it;
    else None.
    """
    is_unchanged = (
        isinstance(source, JobConfig)
        and _LOADED_CONFIGS.get(id(source)) is source
        and not set_
        and not sections
    )
    return source if is_unchanged and isinstance(source, JobConfig) else None


def _validate(config_draft: Draft, *, shape_alone: bool = False) -> JobConfig:
    faults, config = config_draft.faults, config_draft.config
    if config is not None:
        if _run_paths(config):
            from smtrain.client.jobs import parents

            parents.forget()
        if fault := missing_type_fault(config):
            faults.append(Sentence(fault, "config.combination"))
            config_draft.left_out.add("compute.instance_type")
        config, undecided_keys = _fill_from_machines(config_draft, config)
        left_out = config_draft.left_out | undecided_keys
        config_faults = list(faults_of(config, left_out, shape_alone=shape_alone))
        if any(
            fault.startswith("model.path:") for fault in config_faults
        ):  # of which the search for a mesh says less
            faults = [fault for fault in faults if not fault.startswith("model.path:")]
        faults += config_faults
        faults += _of_named(config, left_out) if not faults else []
        for key, path in _run_paths(config).items() if not faults else ():
            faults += _of_parent(config, key, path)
        faults += [
            text
            for keys, text in (*torus_faults(config), *fallback_faults(config))
            if not left_out & keys
        ]
        if faults:  # else the data is checked when a job is made (client/launch/inputs.py)
            faulty_keys = {fault.partition(":")[0] for fault in faults}
            faults += [
                fault
                for fault in _of_data(config, left_out)
                if fault.partition(":")[0] not in faulty_keys
            ]
    if faults or config is None:
        error = ConfigError([reword(fault, hide(" ".join(fault.splitlines()))) for fault in faults])
        if config is not None and set(error.codes) == {"package.missing"}:
            error.config = _LOADED_CONFIGS[id(config)] = config  # all else can be checked
        raise error
    _LOADED_CONFIGS[id(config)] = config
    return config


def _run_paths(config: JobConfig) -> dict[str, str]:
    """The run:// paths of a config by key."""
    reference = config.train.preference.folder if config.train.preference else None
    paths = {"model.path": config.model.path, "train.dpo.reference": reference or ""}
    return {key: path for key, path in paths.items() if path.startswith(RUN)}


def _of_parent(config: JobConfig, key: str, path: str) -> list[str]:
    """Faults of a run whose model the config reads; none if its backend does not answer now."""
    from smtrain.client.jobs.parents import planned_parent

    try:
        parent = planned_parent(config, path, key)
    except ConfigError as error:
        return list(error.faults)
    except JobError:  # the request, or a plan that needs the shape, says so
        return []
    if key != "model.path":
        hf_config = described_of(config)
        return (
            [text for _, text in reference_faults(hf_config, parent.model_config, path)]
            if hf_config
            else []
        )
    return [text for _, text in shape_faults(config, parent.model_config)]


def _of_data(config: JobConfig, left_out: set[str]) -> list[str]:
    """Faults of the text on this machine, reported together with those of the config."""
    try:
        return [
            text
            for keys, text in local_data_faults(config, described_of(config))
            if not left_out & keys
        ]
    except (OSError, ConfigError):  # reported when the file or the run is read
        return []


def _fill_from_machines(config_draft: Draft, config: JobConfig) -> tuple[JobConfig, set[str]]:
    """The config with the keys that its machines decide, and the undecided keys; adds the reasons
    to the faults.
    """
    config = with_processes(with_engine(config))
    if not config_draft.left_out and not _engine_cannot_train(config):
        try:
            return with_sizes(config, auto=config_draft.auto), set()
        except ConfigError as error:
            if not TARGETS[config.target].rented or not sagemaker_lack(
                config.compute.instance_type
            ):  # which is reported instead
                config_draft.faults += error.faults
    undecided_keys = {"train.seq_len", "train.global_batch_size"} - {
        f"train.{key}" for key in config.train.model_fields_set
    }
    if "compute.instance_type" in config_draft.left_out:
        undecided_keys |= {"train.engine", "compute.processes_per_instance"}
    if "sequence_parallel" not in config.parallel.model_fields_set:
        undecided_keys.add("parallel.sequence_parallel")
    if "parallel" not in config.model_fields_set:
        undecided_keys |= {
            "parallel.tp",
            "parallel.pp",
            "parallel.dp",
            "parallel.cp",
            "parallel.ep",
        }
    return config, undecided_keys


def _engine_cannot_train(config: JobConfig) -> bool:
    """Whether no mesh is worth a search, because the engine does not train the model, which is a
    fault by itself.
    """
    try:
        return config.train.engine == "nxd" and not shape_of(config).by_nxd
    except ConfigError:
        return False


def planned_for(
    source: Source | None, *, set_: Sequence[str] = (), for_machines: bool = False, **sections: Any
) -> str:
    """The target of a plan that names none: the config's if its jobs do not run by SageMaker's API,
    local if the config says so, else aws.

    A local config that names an instance type is planned on AWS, as it is a trial of a run there;
    so is every plan `for_machines`, whose instances were named. A machine of the user's own is no
    trial of another.
    """
    config = _as_loaded(source, set_, sections) or draft(source, set_=set_, **sections).config
    if config is not None and not TARGETS[config.target].sagemaker:
        return config.target
    if config is not None and config.has_own_machine and not for_machines:
        return "local"
    names_target = config is not None and "target" in config.model_fields_set
    return (
        "local"
        if config is not None and names_target and not for_machines and is_here(config)
        else "aws"
    )


def subject(
    source: Source | None,
    model: str | None,
    set_: Sequence[str],
    sections: dict[str, Any],
    target: str | None,
    machines: Sequence[tuple[str, int]] = (),
    *,
    for_machines: bool = False,
    machine_file: str | Path | None = None,
) -> tuple[JobConfig, ModelShape]:
    """The config, with `model` (a known name, or a folder with a config.json) as `model.path`, and
    its shape.

    A config whose own machine is not named, or cannot train the model, takes one of `machines`. If
    no mesh fits, and the config names none, it becomes data parallel, so that the plan can say what
    is lacking.
    """
    if own_sections := _own_of(source, set_, sections, target, machines, machine_file):
        target, sections = "local", own_sections
    target = target or planned_for(source, set_=set_, for_machines=for_machines, **sections)
    shape = named_shape(model) if model else None
    if model and shape:
        sections = {
            **sections,
            "model": {**sections.get("model", {}), "path": f"s3://known-models/{model}"},
        }
    elif model and "/" not in model and not Path(model).exists():
        models = table("models")["models"]
        raise ConfigError(
            f"model.path: no model is known as {model!r}, nor is it a folder;"
            f" {hint(model, models)}",
            code="model.not_found",
        )
    elif model:
        sections = {**sections, "model": {**sections.get("model", {}), "path": model}}
    config = _as_loaded(source, set_, sections)
    if config is None or target != config.target:
        config_draft = draft(source, set_=set_, target=target, **sections)
        if machines and config_draft.config and missing_type_fault(config_draft.config):
            sections = _for_first(machines, config_draft.config, sections, machine_file)
            config_draft = draft(source, set_=set_, target=target, **sections)
        elif (
            target
            and TARGETS[target].rented
            and (compute := _one_of(machines))
            and _open_machine(config_draft)
        ):
            sections = {**sections, "compute": {**(sections.get("compute") or {}), **compute}}
            config_draft = draft(source, set_=set_, target=target, **sections)
        try:
            config = _validate(config_draft, shape_alone=bool(model))
        except ConfigError as error:
            if len(error.faults) > 1 or not error.faults[0].startswith(NO_MESH):
                raise
            sections = {**sections, "parallel": {}}
            config = _validate(
                draft(source, set_=set_, target=target, **sections), shape_alone=bool(model)
            )
    return config, shape_of(config)


def _own_of(
    source: Source | None,
    set_: Sequence[str],
    sections: dict[str, Any],
    target: str | None,
    machines: Sequence[tuple[str, int]],
    file: str | Path | None,
) -> dict[str, Any] | None:
    """The sections of a plan for the user's own machines, settled for the first of them; None for
    other machines.

    A config whose instance type is named and trains the model keeps it.
    """
    if not machines or target:
        return None
    config_draft = draft(source, set_=set_, target=target, **sections)
    if config_draft.config is None or not TARGETS[config_draft.config.target].sagemaker:
        return None
    entries = machines_known(config_draft.config, file)
    if any(kind not in entries or is_of_aws(kind) for kind, _ in machines) or not _open_machine(
        config_draft
    ):
        return None
    return _for_first(machines, config_draft.config, sections, file)


def _for_first(
    machines: Sequence[tuple[str, int]],
    config: JobConfig,
    sections: dict[str, Any],
    file: str | Path | None,
) -> dict[str, Any]:
    """The sections of a plan with the first of `machines` as the config's."""
    kind, count = machines[0]
    entry_values = {
        name: entry.model_dump(exclude_unset=True)
        for name, entry in machines_known(config, file).items()
    }
    compute = {**(sections.get("compute") or {}), "instance_type": kind, "instance_count": count}
    return {**sections, "compute": compute, "machines": entry_values}


def _one_of(machines: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The section compute of one of AWS's machines: the first that engine native, which trains all
    models, runs on.
    """
    of_aws = [(kind, count) for kind, count in machines if instance(kind)]
    first = min(
        of_aws, key=lambda type_and_count: engine_of(type_and_count[0]) == "nxd", default=None
    )
    return {"instance_type": first[0], "instance_count": first[1]} if first else {}


def _open_machine(config_draft: Draft) -> bool:
    """Whether the machine of a config is only the default one, or one without an engine for the
    model.
    """
    config = config_draft.config
    if config is None:
        return False
    names_machine = (
        "instance_type" in config.compute.model_fields_set and not config.has_own_machine
    )
    return not names_machine or _engine_cannot_train(with_engine(config))


def _of_named(config: JobConfig, left_out: set[str]) -> list[str]:
    """Faults of a model known only by its name, without those of the mesh, which a plan
    reports.
    """
    scheme, _, name = config.model.path.partition("@")[0].partition("://")
    hf_config = named_config(name) if name and scheme not in ("demo", "run") else None
    if hf_config is None:
        return []
    of_mesh = {"parallel.tp", "parallel.pp", "parallel.ep", "parallel.layers_per_stage"}
    return [
        text for keys, text in shape_faults(config, hf_config) if not (of_mesh | left_out) & keys
    ]
