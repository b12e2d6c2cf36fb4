"""Run several configs in order: each may start from the model of an earlier one (`model.path: run://NAME`).

All configs are loaded, planned and checked before the first job starts. Until an earlier run has exported its model,
a config that starts from it is planned with the model that the earlier run itself starts from: shape and tokenizer are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smtrain.client.backends.choose import target_of
from smtrain.client.launch.run import Run
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.plan import plan
from smtrain.client.planner.resolve import earlier_of, load_config, run_named, with_model
from smtrain.client.planner.result import Plan
from smtrain.client.planner.this_machine import is_here, plan_here
from smtrain.core.config import JobConfig
from smtrain.core.config.load import Source, draft
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError, JobError, SmtrainError
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.protocol.uris import RUN
from smtrain.core.text import Say
from smtrain.stages import stages_of


@dataclass(frozen=True)
class Link:
    """One config of a series."""

    label: str
    """The config's file, or its place in the list."""
    config: JobConfig
    """The config; if it starts from an earlier one of the series, with the model that one starts from."""
    parent: str | None = None
    """The run of the series that it starts from."""

    @property
    def start(self) -> str:
        """`model.path` as it was given."""
        return f"{RUN}{self.parent}" if self.parent else self.config.model.path


def load_series(
    sources: Sequence[Source], *, set_: Sequence[str] = (), target: TargetName | None = None, **sections: Any
) -> list[Link]:
    """Load configs that will run in this order; the other arguments are those of `load_config`, for each of them.

    Raises `ConfigError` with the faults of all configs, and for an order or names that cannot run.
    """
    if not sources:
        raise ConfigError("the list of configs is empty; name at least one", code="config.missing_key")
    drafts = [draft(source, set_=set_, target=target, **sections).config for source in sources]
    parents = earlier_of(drafts)
    faults: list[str] = []
    links: list[Link] = []
    for number, (source, config) in enumerate(zip(sources, drafts, strict=True)):
        label = str(source) if isinstance(source, str | Path) else f"config {number + 1}"
        named = run_named(config) if config else None
        parent = parents[number]
        if not parent and any(named == later.name for later in drafts[number + 1 :] if later):
            faults.append(f"{label}: model.path: {RUN}{named} is a later config of the list; put that one before it")
            continue
        if config and any(config.name == one.name for one in drafts[:number] if one):
            faults.append(f"{label}: name: an earlier config of the list is also {config.name}; give each its own name")
            continue
        settings = [*set_, f"model.path={parent.path}"] if parent else set_
        try:
            loaded = load_config(source, set_=settings, target=target, **sections)
        except ConfigError as error:
            faults += [f"{label}: {fault}" for fault in error.faults]
        else:
            links.append(Link(label, loaded, parent.config.name if parent else None))
        if config and parent and (fault := _unfit(parent.config, config)):
            faults.append(f"{label}: {fault}")
    if faults:
        raise ConfigError(faults, code="config.combination")
    return links


def _unfit(before: JobConfig, config: JobConfig) -> str | None:
    """Say why a config cannot start from the model that the run before it will export."""
    path = f"model.path: {RUN}{before.name}"
    if before.target != config.target:
        return f"{path} runs on target {before.target}, and this config on {config.target}; give both the same target"
    if before.train.adapter and not before.export.merge:
        return f"{path} will export an adapter, and training starts from a whole model; set export.merge: true there"
    return None


def expected(links: Sequence[Link]) -> list[JobConfig]:
    """The configs with the prefixes that the first attempts of earlier runs will export to, for a dry run."""
    configs: dict[str, JobConfig] = {}
    for link in links:
        config = link.config
        if link.parent is not None:
            earlier = configs[link.parent]
            uri = Chain(earlier, target_of(earlier), look=False).output("export")
            assert uri is not None  # a chain that does not look expects every stage to be done
            config = with_model(config, uri)
        configs[config.name] = config
    return list(configs.values())


def overview(links: Sequence[Link]) -> str:
    """A line for each run, with its time and cost as far as they can be known, and the total."""
    plans = [_planned(link.config) for link in links]
    width = max(len(link.config.name) for link in links)
    start = max(len(link.start) for link in links)
    lines = [f"{len(links)} runs, in this order:"]
    for link, made in zip(links, plans, strict=True):
        train = link.config.train
        about = f"{train.objective}, {train.steps:,} steps"
        lines.append(f"  {link.config.name:{width}}  from {link.start:{start}}  {about}{_costs([made])}")
        lines += [f"    does not fit: {fault}" for fault in (made.faults if made else ())]
    return "\n".join([*lines, f"in all{_costs(plans) or ': time and cost are not known before they run'}"])


def _planned(config: JobConfig) -> Plan | None:
    try:
        return plan_here(config, measure=False) if is_here(config) else plan(config)
    except ConfigError:  # a model or machine that the planner does not know
        return None


def _costs(plans: Sequence[Plan | None]) -> str:
    """`, 2 h, $3.10` of some plans; a part that is unknown for any of them is left out."""
    parts = []
    hours = [sum(made.hours_by_stage.values()) or made.hours if made else None for made in plans]
    if all(hour is not None for hour in hours):
        parts.append(spell(3600 * sum(hour or 0.0 for hour in hours)))
    if all(made and made.dollars is not None for made in plans):
        parts.append(f"${sum(made.dollars or 0.0 for made in plans if made):,.2f}")
    return "".join(f", {part}" for part in parts)


def run_series(
    links: Sequence[Link],
    run_one: Callable[[JobConfig], Run],
    say: Say,
    look_first: Callable[[Chain, Sequence[str], Say], None] | None = None,
) -> list[Run]:
    """Run configs in order, each from the export of the run that it names; runs that are done are skipped.

    With `look_first`, every config is checked before the first one starts. Raises the error of the first run that
    fails, and names those that were not started.
    """
    if look_first is not None:
        _look(links, look_first, say)
    done: dict[str, Run] = {}
    for number, link in enumerate(links, 1):
        config = link.config
        if link.parent is not None:  # the export of this list's run, which need not be the newest of that name
            config = with_model(config, f"{RUN}{done[link.parent].job('export').name}")
        say(f"run {number} of {len(links)}: {config.name} ({link.label})")
        with _said(links, link):
            done[config.name] = run_one(config)
    return list(done.values())


def _look(links: Sequence[Link], look_first: Callable[[Chain, Sequence[str], Say], None], say: Say) -> None:
    """Check the stages that are left of every run."""
    exports: dict[str, str | None] = {}
    for link in links:
        uri = exports.get(link.parent or "")
        chain = Chain(with_model(link.config, uri) if uri else link.config, target_of(link.config))
        exports[link.config.name] = chain.output("export")
        stages = [stage for stage in stages_of(link.config, chain.target.name) if not chain.known(stage)]
        with _said(links, link):
            look_first(chain, stages, say)


@contextmanager
def _said(links: Sequence[Link], link: Link) -> Iterator[None]:
    """Say in an error which run of the series it is of, and which ones were not started."""
    try:
        yield
    except SmtrainError as error:
        left = [one.config.name for one in links[links.index(link) + 1 :]]
        rest = f"; not started: {', '.join(left)}" if left else ""
        again = "the same call skips what is done and resumes here"
        raise JobError(f"{error}\nin run {link.config.name} ({link.label}){rest}; {again}", code=error.code) from error
