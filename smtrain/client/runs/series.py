"""Run several configs in order: each may start from the model of an earlier one (`model.path:
run://NAME`).

All configs are loaded, planned and checked before the first job starts. Until an earlier run has
exported its model, a config that starts from it is planned with the model that the earlier run
itself starts from: shape and tokenizer are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smtrain.client.backends.choose import backend_of
from smtrain.client.config.load import Source, draft, is_yaml_text
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.plan import plan
from smtrain.client.planner.resolve import (
    Earlier,
    earlier_of,
    load_config,
    runs_in,
    with_models,
    with_rope,
)
from smtrain.client.planner.result import Plan
from smtrain.client.planner.this_machine import is_here, plan_here
from smtrain.client.runs.run import Run
from smtrain.core.config import JobConfig
from smtrain.core.config.training import RopeSection
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError, JobError, SmtrainError
from smtrain.core.protocol.uris import RUN
from smtrain.core.targets import TARGETS, TargetName
from smtrain.core.text import Say
from smtrain.stages import stages_of


@dataclass(frozen=True)
class Link:
    """One config of a series."""

    label: str
    """The config's file, or its place in the list."""
    config: JobConfig
    """The config; if it starts from an earlier one of the series, with the model that one starts
    from.
    """
    parents: Mapping[str, str] = field(default_factory=dict)
    """The runs of the series whose models it reads, by key."""

    @property
    def start(self) -> str:
        """`model.path` as it was given."""
        parent = self.parents.get("model.path")
        return f"{RUN}{parent}" if parent else self.config.model.path

    def with_model_paths(self, models: Mapping[str, str | None]) -> JobConfig:
        """The config with the models of earlier runs, by their names; without those that have none
        yet.
        """
        paths_by_key = {key: models.get(parent) for key, parent in self.parents.items()}
        paths = {key: path for key, path in paths_by_key.items() if path}
        return with_models(self.config, paths) if paths else self.config


def load_series(
    sources: Sequence[Source],
    *,
    set_: Sequence[str] = (),
    target: TargetName | None = None,
    **sections: Any,
) -> list[Link]:
    """Load configs that will run in this order; the other arguments are those of `load_config`, for
    each of them.

    Raises `ConfigError` with the faults of all configs, and for an order or names that cannot run.
    """
    if not sources:
        raise ConfigError(
            "the list of configs is empty; name at least one", code="config.missing_key"
        )
    drafts = [draft(source, set_=set_, target=target, **sections).config for source in sources]
    parents = earlier_of(drafts)
    faults: list[str] = []
    links: list[Link] = []
    for number, (source, config) in enumerate(zip(sources, drafts, strict=True)):
        has_file = isinstance(source, str | Path) and not is_yaml_text(source)
        label = str(source) if has_file else f"config {number + 1}"
        earlier, later_names = (
            parents[number],
            {entry.name for entry in drafts[number + 1 :] if entry},
        )
        run_keys = runs_in(config) if config else {}
        if later_runs := [
            (key, run) for key, run in run_keys.items() if key not in earlier and run in later_names
        ]:
            key, run = later_runs[0]
            faults.append(
                f"{label}: {key}: {RUN}{run} is a later config of the list; put that one before it"
            )
            continue
        if config and any(config.name == entry.name for entry in drafts[:number] if entry):
            faults.append(
                f"{label}: name: an earlier config of the list is also {config.name}; give each its"
                " own name"
            )
            continue
        settings = [*set_, *(f"{key}={entry.path}" for key, entry in earlier.items())]
        rope = _inherited_rope(earlier.get("model.path"), config)
        if rope is not None:
            settings.append(f"model.rope={json.dumps(rope.model_dump(exclude_none=True))}")
        try:
            loaded_config = load_config(source, set_=settings, target=target, **sections)
        except ConfigError as error:
            faults += [f"{label}: {fault}" for fault in error.faults]
        else:
            loaded_config = (
                with_rope(loaded_config, None) if rope else loaded_config
            )  # the export that it reads has it
            links.append(
                Link(
                    label, loaded_config, {key: entry.config.name for key, entry in earlier.items()}
                )
            )
        for key, entry in earlier.items() if config else ():
            assert config is not None
            faults += [f"{label}: {key}: {fault}" for fault in _parent_faults(entry.config, config)]
    if faults:
        raise ConfigError(faults, code="config.combination")
    return links


def _inherited_rope(parent: Earlier | None, config: JobConfig | None) -> RopeSection | None:
    """The model.rope of the export that a config starts from, which its checks need until there is
    that export.

    The path with which it is checked is that of the first model, with the positions from before.
    """
    if parent is None or config is None or config.model.rope is not None:
        return None
    # An unmerged adapter must not have its own model.rope, so its rows may not be
    # longer here.
    return None if config.train.adapter and not config.export.merge else parent.rope


def _parent_faults(parent: JobConfig, config: JobConfig) -> Iterator[str]:
    """Reasons why a config cannot read the model that an earlier run will export."""
    path = f"{RUN}{parent.name}"
    if parent.target != config.target:
        yield (
            f"{path} runs on target {parent.target}, and this config on {config.target}; give both"
            " the same target"
        )
    elif parent.train.adapter and not parent.export.merge:
        yield (
            f"{path} will export an adapter, and training starts from a whole model; set"
            " export.merge: true there"
        )


def with_expected_exports(links: Sequence[Link]) -> list[JobConfig]:
    """The configs with the prefixes that the first attempts of earlier runs will export to, for a
    dry run.
    """
    configs: list[JobConfig] = []
    exports: dict[str, str | None] = {}
    for link in links:
        config = link.with_model_paths(exports)
        exports[config.name] = Chain(config, backend_of(config), look=False).output("export")
        configs.append(config)
    return configs


def overview(links: Sequence[Link]) -> str:
    """A line for each run, with its time and cost as far as they can be known, and the total."""
    plans = [_plan_run(link.config) for link in links]
    width = max(len(link.config.name) for link in links)
    start = max(len(link.start) for link in links)
    lines = [f"{len(links)} runs, in this order:"]
    for link, run_plan in zip(links, plans, strict=True):
        train = link.config.train
        run_words = f"{train.objective}, {train.steps:,} steps"
        lines.append(
            f"  {link.config.name:{width}}  from {link.start:{start}}"
            f"  {run_words}{_costs([run_plan])}"
        )
        lines += [f"    does not fit: {fault}" for fault in (run_plan.faults if run_plan else ())]
    return "\n".join(
        [*lines, f"in all{_costs(plans) or ': time and cost are not known before they run'}"]
    )


def _plan_run(config: JobConfig) -> Plan | None:
    """The plan of a run; None if it cannot be planned, or is a trial of instances on this machine,
    which costs nothing and takes another time.
    """
    if TARGETS[config.target].here and not is_here(config):
        return None
    try:
        return plan_here(config, measure=False) if is_here(config) else plan(config)
    except ConfigError:  # a model or machine that the planner does not know
        return None


def _costs(plans: Sequence[Plan | None]) -> str:
    """`, 2 h, $3.10` of some plans; a part unknown for any of them is left out."""
    parts = []
    hours = [
        sum(run_plan.hours_by_stage.values()) or run_plan.hours if run_plan else None
        for run_plan in plans
    ]
    if all(hour is not None for hour in hours):
        parts.append(spell(3600 * sum(hour or 0.0 for hour in hours)))
    if all(run_plan and run_plan.dollars is not None for run_plan in plans):
        parts.append(f"${sum(run_plan.dollars or 0.0 for run_plan in plans if run_plan):,.2f}")
    return "".join(f", {part}" for part in parts)


def run_series(
    links: Sequence[Link],
    run_one: Callable[[JobConfig], Run],
    say: Say,
    precheck: Callable[[Chain, Sequence[str], Say], None] | None = None,
) -> list[Run]:
    """Run configs in order, each from the export of the run that it names; runs that are done are
    skipped.

    With `precheck`, every config is checked before the first one starts. Raises the error of the
    first run that fails, and names those that were not started.
    """
    if precheck is not None:
        _check_runs(links, precheck, say)
    runs: list[Run] = []
    exports: dict[
        str, str | None
    ] = {}  # by job: the export of this list's run need not be the newest of that name
    for number, link in enumerate(links, 1):
        say(f"run {number} of {len(links)}: {link.config.name} ({link.label})")
        with _name_run_in_errors(links, link):
            runs.append(run_one(link.with_model_paths(exports)))
        exports[link.config.name] = f"{RUN}{runs[-1].job('export').name}"
    return runs


def _check_runs(
    links: Sequence[Link], precheck: Callable[[Chain, Sequence[str], Say], None], say: Say
) -> None:
    """Check the stages that are left of every run."""
    exports: dict[str, str | None] = {}
    for link in links:
        chain = Chain(link.with_model_paths(exports), backend_of(link.config))
        exports[link.config.name] = chain.output("export")
        stages = [
            stage for stage in stages_of(link.config, chain.target.name) if not chain.has_job(stage)
        ]
        with _name_run_in_errors(links, link):
            precheck(chain, stages, say)


@contextmanager
def _name_run_in_errors(links: Sequence[Link], link: Link) -> Iterator[None]:
    """Say in an error which run of the series it is of, and which ones were not started."""
    try:
        yield
    except SmtrainError as error:
        later_names = [later_link.config.name for later_link in links[links.index(link) + 1 :]]
        not_started = f"; not started: {', '.join(later_names)}" if later_names else ""
        resume_hint = "the same call skips what is done and resumes here"
        raise JobError(
            f"{error}\nin run {link.config.name} ({link.label}){not_started}; {resume_hint}",
            code=error.code,
        ) from error
