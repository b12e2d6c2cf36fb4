"""`plan(config)`: what a run needs, takes and costs, before anything is paid for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from math import exp, inf
from pathlib import Path
from typing import Any, Literal

from smtrain.client.config.load import Source
from smtrain.client.planner import reference_pass, settle
from smtrain.client.planner.calibration import (
    Correction,
    NearestRun,
    best_published,
    correction,
    nearest,
    width_of,
)
from smtrain.client.planner.cost import Cost, Saving, cost, saving
from smtrain.client.planner.custom_machines import machine_of, machines_known, own_price_rows
from smtrain.client.planner.gpu_options import GpuOptions
from smtrain.client.planner.kernels import kernels_of
from smtrain.client.planner.long_rows import long_rows
from smtrain.client.planner.machines import GIB, Machine, Mesh, Work, is_planned, parse_machine
from smtrain.client.planner.measured import speed_basis
from smtrain.client.planner.memory import (
    CoreMemory,
    HostMemory,
    checkpoint_bytes,
    host_memory,
    worst_core,
)
from smtrain.client.planner.offers import (
    Offer,
    Seller,
    at_price,
    chosen_offer,
    describe_unpriced,
    no_offer,
    numbers_of,
    rank_offers,
    types_for_sale,
)
from smtrain.client.planner.preparing import preparing_warnings
from smtrain.client.planner.resolve import subject
from smtrain.client.planner.resolve_mesh import fit_faults, is_accepted, with_shard
from smtrain.client.planner.result import Choice, Plan
from smtrain.client.planner.search import Candidate, MachineSearch, fastest_first, mesh_warnings
from smtrain.client.planner.stage_estimates import StageEstimates
from smtrain.client.planner.stages import machine_for
from smtrain.client.planner.this_machine import is_here, plan_here
from smtrain.client.planner.throughput import StepTime, ramp_share, step_time
from smtrain.client.planner.warnings import (
    image_warnings,
    memory_warnings,
    neuron_warnings,
    ramp_warnings,
    run_warnings,
)
from smtrain.client.planner.what_if import Limits, Way, dollars, larger_batch
from smtrain.client.planner.workload import (
    about_model,
    described_of,
    model_name,
    shape_of,
    text_bytes,
    work_of,
)
from smtrain.client.prices import HOUR, Price, Prices, option_of, own_prices, price_given
from smtrain.core.config import JobConfig
from smtrain.core.config.compute import MachineEntry
from smtrain.core.config.schema import is_of_aws
from smtrain.core.errors import ConfigError
from smtrain.core.facts.engines import EngineName, engine_fault, engine_of, sagemaker_lack
from smtrain.core.public_api import public
from smtrain.core.targets import TARGETS, TargetName
from smtrain.stages import stages_of

RankBy = Literal["time", "cost"]
_START_HERE_S = 30.0
"""Assumed start of a job on an existing machine: no machine to wait for and no image, only
imports and loading.
"""
_CHOICES = 5
"""Number of choices in a plan."""


@public
def plan(
    source: Source | None = None,
    *,
    model: str | None = None,
    machines: Sequence[tuple[str, int] | str] = (),
    rank_by: RankBy = "time",
    budget: float | None = None,
    deadline_hours: float | None = None,
    best: bool = False,
    cheapest: bool = False,
    prices: str | Path | None = None,
    machine_file: str | Path | None = None,
    measured: float | None = None,
    target: TargetName | None = None,
    set_: Sequence[str] = (),
    **sections: Any,
) -> Plan:
    """Plan the train stage of a config and the stages around it.

    Needs no credentials and no network.

    Args:
        source: The config: a YAML file's path, a mapping, or a `JobConfig`. None: `sections` are
            all of it.
        model: A known model, or a folder with a config.json, instead of the config's `model.path`.
        machines: (instance type, count) pairs to choose from, or texts such as
            `ml.trn1.32xlarge:4`; machines of your own are named as in `machines`. Default: the
            machines of the config.
        rank_by: What makes a choice better: `time`, or `cost`.
        budget: Leave out choices that cost more US dollars than this.
        deadline_hours: Leave out choices that take more hours than this.
        best: Plan the best mesh instead of the config's.
        cheapest: Rank all machines that SageMaker sells (or `machines`), in the config's region or
            in those of known prices, at every kind of price, by the dollars of the whole run
            (`Plan.offers`), and plan the cheapest.
        prices: A file whose rows override the shipped ones. Default: prices.toml in $SMTRAIN_HOME,
            if it exists.
        machine_file: A YAML file of machines; those in the config's `machines` win. Default:
            machines.yaml in $SMTRAIN_HOME, if it exists.
        measured: Tokens a second that a run of this config reached, with its own mesh and machines
            (or on a machine of your own, if `machines` names only that one). All plans for the same
            chip are corrected by it.
        target: The name of a target; on a Slurm cluster, cluster.time divides a run into attempts.
            Default: the config's target, except that local counts only if the config names no
            compute.instance_type, and `machines`, `best` and the limits are not given; else aws. A
            local plan without an instance type is for this machine: processes and memory, no
            dollars.
        set_: `a.b=value` texts, as for `--set`; the value is read as YAML. Wins over `source` and
            `sections`.
        **sections: The config's sections as mappings, merged into `source`.

    Returns:
        The plan; `print` it, or show it in a notebook.

    Raises:
        ConfigError: The config is wrong, or its model or instance type is unknown.

    Examples:
        >>> plan = smtrain.plan("llama.yaml", machines=[("ml.trn1.32xlarge", 1)], best=True)
        >>> plan.fits
        True
        >>> round(plan.memory_gib["available"])
        16
    """
    _check_limits(budget=budget, deadline_hours=deadline_hours, measured=measured)
    pairs = [parse_machine(item) if isinstance(item, str) else item for item in machines]
    of_instances = bool(
        pairs or best or cheapest or budget is not None or deadline_hours is not None
    )
    config, shape = subject(
        source,
        model,
        set_,
        sections,
        target,
        pairs,
        for_machines=of_instances,
        machine_file=machine_file,
    )
    if is_here(config) and not of_instances:
        return plan_here(config, measured)
    own_machines = machines_known(config, machine_file)
    price_table = Prices(
        prices or own_prices(),
        [*own_price_rows(own_machines), *price_given(config.compute)],
        config.target,
    )
    unpriced_for_sale: list[str] = []
    if cheapest:
        if not TARGETS[config.target].rented:
            raise ConfigError(
                f"target: {config.target} has no machines for sale; give `--target aws`, or leave"
                " --cheapest out",
                code="config.combination",
            )
        for_sale, unpriced_for_sale = types_for_sale(config, price_table)
        pairs = pairs or numbers_of(for_sale, config)
    requested_machines = [
        machine_of(t, n, own_machines, config.compute.environment) for t, n in pairs
    ]
    machine = (
        requested_machines[0] if pairs and not is_planned(config) else Machine.of_config(config)
    )
    mesh = Mesh.of_config(config, shape.layers)
    config = settle.for_machines(config)
    work, _ = work_of(config, shape)
    measured_machine = (
        requested_machines[0] if len(pairs) == 1 and pairs[0][0] in own_machines else machine
    )
    speed_correction = correction(work, measured_machine, mesh, measured)
    limits = Limits(budget, deadline_hours)
    offers: tuple[Offer, ...] = ()
    chosen_index = 0
    by_cost = rank_by == "cost" or limits.only_deadline or cheapest
    market = _Market(
        config,
        tuple(requested_machines) or (machine,),
        price_table,
        speed_correction,
        by_cost,
        own_machines,
    )
    ways = market.ways(work, machine, every_mesh=market.by_cost or bool(limits.names))
    if cheapest:
        seller = Seller(partial(market.cost_of, work), partial(_log_width, market, work))
        offers = rank_offers(config, [c for c, _ in ways], price_table, limits, seller)
        if not offers:
            raise no_offer(limits)
        chosen_index = chosen_offer(config, offers)
        offer = offers[chosen_index]
        config = at_price(config, offer.kind, offer.region)
        market = replace(market, config=config)
        ways = [
            (c, market.cost_of(work, config, c))
            for c, _ in ways
            if (c.machine.type, c.machine.count) == (offer.type, offer.count)
        ]
    choices = market.rank(way for way in ways if limits.allows(way[1]))
    unpriced_types = market.unpriced_types([c for c, _ in ways]) if budget is not None else []
    beyond = limits.gains_without(ways)
    if best or pairs or limits.names:
        if not choices:
            raise _no_choice(config, [c for c, _ in ways], unpriced_types, limits, beyond)
        machine, mesh = choices[0][0].machine, choices[0][0].mesh
        work, _ = work_of(
            _with_shard_for(config, machine),
            shape,
            _engine(config, machine),
            neuron=machine.neuron,
        )
    result = _plan(
        _on_own_machine(config, machine, own_machines),
        work,
        machine,
        mesh,
        choices,
        price_table,
        speed_correction,
    )
    same_machine = next((c for c, _ in choices if c.machine == machine), None)
    beyond += larger_batch(config, same_machine, market.legal)
    warnings = [*result.warnings]
    if (
        target is None
        and not of_instances
        and TARGETS[config.target].rented
        and _default_machines(config)
    ):
        warnings.append(
            f"no compute.instance_type is named, so this is {machine.type} on AWS; --target local"
            " plans this machine"
        )
    if unpriced_types:
        warnings.append(
            f"no price is known for {' and '.join(unpriced_types)}, which the budget therefore"
            " leaves out"
        )
    if unpriced_for_sale and "engine" in config.train.model_fields_set:
        warnings.append(
            f"train.engine: only machines of {config.train.engine} are ranked; leave it out to rank"
            " all"
        )
    if unpriced_for_sale:
        warnings.append(describe_unpriced(unpriced_for_sale))
    return replace(
        result,
        relaxed=tuple(beyond),
        warnings=tuple(warnings),
        offers=offers,
        chosen_offer=chosen_index,
    )


def _on_own_machine(
    config: JobConfig, machine: Machine, own_machines: Mapping[str, MachineEntry]
) -> JobConfig:
    """The config as it runs on a machine of the user's own, if this is one: no start, image or bill
    of AWS.
    """
    if (
        machine.type not in own_machines
        or is_of_aws(machine.type)
        or not TARGETS[config.target].rented
    ):
        return config
    entry = {machine.type: own_machines[machine.type]}
    compute = config.compute.model_copy(
        update={"instance_type": machine.type, "instance_count": machine.count}
    )
    return config.model_copy(
        update={"target": "local", "compute": compute, "machines": {**config.machines, **entry}}
    )


def _check_limits(**limits: float | None) -> None:
    if faults := [
        f"{key}: got {limit}; a number above 0 is needed"
        for key, limit in limits.items()
        if limit is not None and not 0 < limit < inf
    ]:
        raise ConfigError(faults, code="config.wrong_value")


def _no_choice(
    config: JobConfig,
    candidates: Sequence[Candidate],
    unpriced_types: Sequence[str],
    limits: Limits,
    beyond: Sequence[str],
) -> ConfigError:
    """The error of a search that found meshes, none within the limits, or found none at all."""
    if unpriced_types and len(unpriced_types) == len({c.machine.type for c in candidates}):
        reason = _no_price(" and ".join(unpriced_types), option_of(config.compute))
        return ConfigError(
            f"budget: {reason}, so whether it is kept cannot be known; give one with --prices",
            code="config.combination",
        )
    limit_words = f" within {' and '.join(limits.names)}" if limits.names and candidates else ""
    ways = "".join(f", or {way}" for way in beyond)
    return ConfigError(
        f"compute: no mesh of these machines trains the model{limit_words}; take more of them, or"
        f" machines with more memory{ways}",
        code="config.combination",
    )


@dataclass(frozen=True)
class _Market:
    """The machines that a config may run on, with their prices, and the order of choices."""

    config: JobConfig
    machines: tuple[Machine, ...]
    prices: Prices
    correction: Correction
    by_cost: bool
    own_machines: Mapping[str, MachineEntry]

    def legal(self, config: JobConfig) -> Iterator[Candidate]:
        """The meshes that pass a config's checks, fastest first, checked lazily: there may be
        thousands.
        """
        return _legal(config, self._by_time(config, self.machines))

    def ways(self, work: Work, machine: Machine, *, every_mesh: bool) -> list[Way]:
        """All meshes with their costs, or only those that a plan shows and one for machine
        `machine`.
        """
        candidates = _legal(self.config, self._by_time(self.config, self.machines))
        if every_mesh:
            legal_candidates = [*candidates]
        else:
            legal_candidates = [*islice(candidates, _CHOICES)]
            same_machine = self._by_time(self.config, [m for m in self.machines if m == machine])
            other_candidates = (c for c in same_machine if c not in legal_candidates)
            legal_candidates += islice(_legal(self.config, other_candidates), 1)
        return [(c, self.cost_of(work, self.config, c)) for c in legal_candidates]

    def rank(self, ways: Iterable[Way]) -> list[Way]:
        return sorted(ways, key=lambda way: dollars(way[1]) if self.by_cost else way[1].train_hours)

    def unpriced_types(self, candidates: Sequence[Candidate]) -> list[str]:
        """Instance types without a known price, which no budget can be compared with."""
        types = dict.fromkeys(c.machine.type for c in candidates)
        return [
            t
            for t in types
            if self.prices.find(t, option_of(self.config.compute), self.config.compute.region)
            is None
        ]

    def _by_time(self, config: JobConfig, machines: Sequence[Machine]) -> Iterator[Candidate]:
        return fastest_first(_searches(config, machines), self.correction.of)

    def cost_of(self, work: Work, config: JobConfig, way: Candidate) -> Cost:
        """The cost of all steps, of which a batch ramp makes the first shorter."""
        mean = way.step_s * ramp_share(work, way.machine, way.mesh, config.train.batches())
        config = _on_own_machine(config, way.machine, self.own_machines)
        return _cost(config, work, way.machine, config.train.steps, mean, self.prices)


def _log_width(market: _Market, work: Work, way: Candidate) -> float:
    """Logarithm of the factor that the speed of a mesh may be off by."""
    config = market.config
    is_unpublished = _engine(config, way.machine) == "native" and way.machine.neuron
    nearest_run = nearest(work, way.machine, way.mesh)
    return width_of(
        work, way.machine, nearest_run, market.correction, is_unpublished=is_unpublished
    )


def _step_s(way: Candidate) -> float:
    return way.step_s


def _engine(config: JobConfig, machine: Machine) -> EngineName:
    """The engine that a config names, else the default of the machine."""
    names_engine = TARGETS[config.target].here or "engine" in config.train.model_fields_set
    return config.train.engine if names_engine else engine_of(machine.type)


def _default_machines(config: JobConfig) -> bool:
    return "instance_type" not in config.compute.model_fields_set


def _no_price(type_: str, option: str) -> str:
    return f"no {option.replace('_', '-')} price is known for {type_}"


def _searches(
    config: JobConfig, machines: Sequence[Machine]
) -> Iterator[tuple[MachineSearch, list[Machine]]]:
    """The searches for these machines, each with the engine that runs on its machines."""
    shape = shape_of(config)
    kinds = {
        machine: (
            _engine(config, machine),
            machine.neuron,
            _with_shard_for(config, machine).parallel.shard,
        )
        for machine in machines
    }
    if not shape.by_nxd:
        kinds = {machine: kind for machine, kind in kinds.items() if kind[0] != "nxd"}
    for kind in dict.fromkeys(kinds.values()):
        group, (engine, neuron, shard) = [m for m in kinds if kinds[m] == kind], kind
        work, recompute = work_of(with_shard(config, shard), shape, engine, neuron=neuron)
        if TARGETS[config.target].rented:
            group = [m for m in group if engine_fault(engine, m.type) is None]
        yield MachineSearch(work, recompute), group


def _with_shard_for(config: JobConfig, machine: Machine) -> JobConfig:
    """The config for a machine: full sharding that the plan chose is for the config's own ones."""
    parallel, compute = config.parallel, config.compute
    is_own = (machine.type, machine.count) == (compute.instance_type, compute.instance_count)
    if is_own or parallel.shard != "full" or "shard" in parallel.model_fields_set:
        return config
    return with_shard(config, "optimizer")


def _legal(config: JobConfig, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The meshes that pass the config's checks, checked lazily: there may be thousands."""
    return (
        c
        for c in candidates
        if is_accepted(
            _with_shard_for(config, c.machine), c.machine, c.mesh, _engine(config, c.machine)
        )
    )


@dataclass(frozen=True)
class _Estimate:
    """The memory and time of one mesh on one machine, and how sure they are; None: not known for
    such a mesh.
    """

    faults: tuple[str, ...]
    core: CoreMemory | None
    host: HostMemory | None
    step: StepTime | None
    nearest_run: NearestRun | None
    by_own_run: bool
    """Whether a run of the user's own corrects it."""
    is_unpublished: bool
    """Whether no run of this engine on this chip was published."""
    wide: float
    """Logarithm of the factor that the speed may be off by."""

    @property
    def is_calibrated(self) -> bool:
        return self.by_own_run or (
            self.nearest_run is not None
            and self.nearest_run.is_calibrated
            and not self.is_unpublished
        )


def _estimate(
    config: JobConfig, work: Work, machine: Machine, mesh: Mesh, correction: Correction
) -> _Estimate:
    faults = fit_faults(config, work, machine, mesh)
    legal = not faults or faults[0].startswith("memory:")
    nearest_run = nearest(work, machine, mesh)
    is_unpublished = _engine(config, machine) == "native" and machine.neuron
    return _Estimate(
        faults=faults,
        core=worst_core(work, machine, mesh)[1] if legal else None,
        host=host_memory(work, machine, mesh) if legal else None,
        step=step_time(work, machine, mesh).speed_up(correction.of(machine)) if legal else None,
        nearest_run=nearest_run,
        by_own_run=correction.is_own(machine),
        is_unpublished=is_unpublished,
        wide=width_of(work, machine, nearest_run, correction, is_unpublished=is_unpublished),
    )


@dataclass(frozen=True)
class _Speed:
    """Sequences and tokens a second, and the share of the chips' peak; None: not known."""

    sequences: float | None
    peak_rate: float
    """Sequences a second at the chips' peak."""
    tokens: float | None
    mfu: float | None

    @classmethod
    def of(cls, work: Work, machine: Machine, step: StepTime | None) -> _Speed:
        flops, peak = work.flops_per_token(), machine.core_flops * machine.world
        peak_rate = peak / flops / work.seq_len
        if step is None:
            return cls(None, peak_rate, None, None)
        rate = work.global_batch / step.total
        tokens = rate * work.seq_len
        return cls(rate, peak_rate, tokens, tokens * flops / peak)

    def range(self, wide: float) -> dict[str, float] | None:
        rate = self.sequences
        if not rate:
            return None
        return {
            "value": rate,
            "low": rate * exp(-wide),
            "high": min(rate * exp(wide), max(self.peak_rate, rate)),
        }


def _plan(
    config: JobConfig,
    work: Work,
    machine: Machine,
    mesh: Mesh,
    choices: list[Way],
    prices: Prices,
    correction: Correction,
) -> Plan:
    estimate = _estimate(config, work, machine, mesh, correction)
    step, core, host, steps = estimate.step, estimate.core, estimate.host, config.train.steps
    cost = saving = None
    stages = StageEstimates.of(config, machine, prices)
    if step and steps:
        mean = step.total * ramp_share(work, machine, mesh, config.train.batches())
        saving = _saving(config, work, machine, mean, prices)
        cost = _cost(config, work, machine, steps, mean, prices)
    speed, options = _Speed.of(work, machine, step), None
    if step and not estimate.faults:
        options = GpuOptions.of(
            work, machine, mesh, _price_of(config, work, machine, prices), correction.of(machine)
        )
    hourly = prices.find(machine.type, option_of(config.compute), config.compute.region)
    used = cost.prices if cost else (hourly,) if hourly else ()
    warnings: list[str] = []
    if step and not estimate.faults:
        same_machine = [
            replace(c, step_s=c.step_s * correction.of(machine))
            for c, _ in choices
            if c.machine == machine
        ]
        warnings += mesh_warnings(work, machine, mesh, min(same_machine, key=_step_s, default=None))
        warnings += run_warnings(config, work, machine, step.total, cost, saving)
        warnings += memory_warnings(work, machine, mesh)
        warnings += reference_pass.warnings(config, work, mesh, step.total)
    warnings += ramp_warnings(config)
    warnings += (
        image_warnings(config)
        + about_model(config)
        + long_rows(config)
        + correction.describe(machine)
    )
    if not TARGETS[config.target].here:
        warnings += preparing_warnings(
            config, _preparing(config), text_bytes(config), prices.assumptions
        )
    warnings += _calibration_warnings(config, work, machine, mesh, estimate, prices)
    warnings += (
        _stage_warnings(stages, prices, config.compute.region)
        if cost and cost.total is not None
        else []
    )
    warnings += _price_warnings(config, machine, used, has_price=hourly is not None)
    warnings += _optimism_warnings(work, machine, estimate, speed)
    million_tokens = config.train.samples * work.seq_len / 1e6
    return Plan(
        model=model_name(config),
        parameters=work.parameters,
        active_parameters=work.shape.active_parameters() if work.shape.experts else None,
        machines=_machines(machine),
        mesh=mesh,
        shards_fully=work.shards_fully and mesh.shards > 1,
        fits=not estimate.faults,
        faults=estimate.faults,
        warnings=tuple(warnings),
        memory_gib=(
            _gib({**asdict(core), "total": core.total, "available": machine.core_bytes})
            if core
            else {}
        ),
        host_memory_gib=_gib({**asdict(host), "available": machine.host_bytes}) if host else {},
        step_s=step.parts() if step else None,
        sequences_per_s=speed.range(estimate.wide),
        tokens_per_s=speed.tokens,
        mfu=speed.mfu,
        calibrated=estimate.is_calibrated,
        nearest=str(estimate.nearest_run.run) if estimate.nearest_run else None,
        hours=cost.train_hours if cost else None,
        attempts=cost.attempts if cost and TARGETS[config.target].repeats else None,
        dollars=cost.total if cost else None,
        dollars_by_item=cost.items if cost else {},
        hours_by_stage=cost.hours if cost and TARGETS[config.target].rented else {},
        unestimated=stages.unestimated_reasons,
        dollars_per_million_tokens=(
            cost.total / million_tokens
            if cost and cost.total is not None and million_tokens
            else None
        ),
        tokens_per_dollar=(
            speed.tokens * HOUR / (hourly.dollars_per_hour * machine.count)
            if speed.tokens and hourly
            else None
        ),
        prices=used,
        other_prices=tuple(
            p for p in prices.prices_of(machine.type, config.compute.region) if p not in used
        ),
        save=saving,
        save_interval_steps=(
            max(1, round(saving.best_interval_s / step.total)) if saving and step else None
        ),
        checkpoint_gib=checkpoint_bytes(work) / GIB,
        choices=tuple(
            Choice(_machines(c.machine), c.mesh, b.train_hours, b.total, c.core_bytes / GIB)
            for c, b in choices[:_CHOICES]
        ),
        by_own_run=estimate.by_own_run,
        billed=TARGETS[config.target].rented,
        gpu_options=options,
    )


def _price_of(
    config: JobConfig, work: Work, machine: Machine, prices: Prices
) -> Callable[[float], tuple[float | None, float | None]]:
    """Hours and dollars of the run for the seconds of a step."""

    def price(step_s: float) -> tuple[float | None, float | None]:
        if not config.train.steps:
            return None, None
        cost = _cost(config, work, machine, config.train.steps, step_s, prices)
        return cost.train_hours, cost.total

    return price


def _calibration_warnings(
    config: JobConfig, work: Work, machine: Machine, mesh: Mesh, estimate: _Estimate, prices: Prices
) -> list[str]:
    """Say what the estimate of time rests on, unless it rests on a run like this one."""
    warnings = []
    if not estimate.is_calibrated:
        subject_words = (
            machine.type
            if estimate.nearest_run is None
            else f"this shape (nearest: {estimate.nearest_run.run})"
        )
        subject_words = (
            f"a mixture of experts on {subject_words}"
            if estimate.nearest_run is None and work.shape.experts
            else subject_words
        )
        warnings.append(
            f"uncalibrated: no training run was published for {subject_words}; throughput is by"
            f" peak ratio, off by up to {exp(estimate.wide):.1f} times"
        )
    if TARGETS[config.target].rented and (lack := sagemaker_lack(machine.type)):
        warnings.append(lack)
    if estimate.is_unpublished:
        first = _first_step_s(config, machine, prices)
        warnings += neuron_warnings(
            config, work, machine, mesh, first, has_own_run=estimate.by_own_run
        )
    if kernels_of(machine):
        warnings += speed_basis(work, machine)
    elif _engine(config, machine) == "native":
        libraries = (
            "llm-foundry's, torchtitan's and Megatron-LM's"
            if machine.link
            else "neuronx-distributed's and NeMo's"
        )
        if work.shape.experts:
            libraries = (
                "NeMo AutoModel's and Megatron-core's on H100, nearly all with even loads of"
                " experts"
            )
        warnings.append(f"the published runs are {libraries}; none is of the native engine")
    return warnings


def _stage_warnings(stages: StageEstimates, prices: Prices, region: str | None) -> list[str]:
    """Name what the time and the cost of the stages leave out."""
    warnings = [
        f"{name}: its time leaves out {part}, of which nothing is known"
        for name, part in stages.left_out.items()
    ]
    unpriced_stages = [
        stage for stage in stages.estimates if prices.find(stage.type, "on_demand", region) is None
    ]
    return warnings + [
        f"{stage.name}: {_no_price(stage.type, 'on_demand')}, so the cost leaves it out"
        for stage in unpriced_stages
    ]


def _price_warnings(
    config: JobConfig, machine: Machine, used: Sequence[Price], *, has_price: bool
) -> list[str]:
    """Name the prices that are guesses, and the missing one."""
    guesses = [f"price: {price}" for price in used if price.guess]
    target = TARGETS[config.target]
    if has_price or target.own_machines or (target.here and config.has_own_machine):
        return guesses
    if not TARGETS[config.target].sagemaker:
        reason = f"no price is known for {machine.type} {TARGETS[config.target].place}"
        return [f"{reason}; give one as machines.{machine.type}.dollars_per_hour", *guesses]
    return [
        f"{_no_price(machine.type, option_of(config.compute))}; give one with --prices",
        *guesses,
    ]


def _optimism_warnings(
    work: Work, machine: Machine, estimate: _Estimate, speed: _Speed
) -> list[str]:
    """Say that a plan is faster than any published run on its chip, if it rests on these."""
    top = best_published(machine, experts=work.shape.experts is not None)
    if (
        not speed.mfu
        or estimate.faults
        or top is None
        or speed.mfu <= top.mfu
        or kernels_of(machine)
    ):
        return []  # known kernels are bounded by what was measured of them
    return [
        f"optimistic: {speed.mfu:.0%} of peak is planned, and the best ever published for this chip"
        f" is {top.mfu:.0%} ({top})"
    ]


def _saving(
    config: JobConfig, work: Work, machine: Machine, step_s: float, prices: Prices
) -> Saving:
    interval = config.train.save_interval * step_s
    return saving(
        work,
        machine,
        interval,
        config.train.steps * step_s,
        config.compute.spot,
        prices.assumptions,
    )


def _cost(
    config: JobConfig, work: Work, machine: Machine, steps: int, step_s: float, prices: Prices
) -> Cost:
    saving = _saving(config, work, machine, step_s, prices) if steps else Saving(0, 0, 0, 0, 1)
    return cost(
        work,
        machine,
        steps,
        step_s,
        saving,
        option=option_of(config.compute),
        keep_alive_s=config.compute.keep_alive,
        stages=StageEstimates.of(config, machine, prices).estimates if steps else (),
        region=config.compute.region,
        prices=prices,
        attempt_s=_attempt_s(config),
        start_s=_START_HERE_S if TARGETS[config.target].here else None,
        first_step_s=_first_step_s(config, machine, prices)
        + reference_pass.seconds(config, work, Mesh.of_config(config), step_s),
    )


def _first_step_s(config: JobConfig, machine: Machine, prices: Prices) -> float:
    """Time that all machines compile in the very first step, if no stage of the run does it
    before.
    """
    if not machine.neuron or "compile" in stages_of(config, config.target):
        return 0.0
    native = _engine(config, machine) == "native"
    return 60 * prices.assumptions["first_step_minutes" if native else "compile_minutes"]


def _preparing(config: JobConfig) -> str:
    """Instance type of stage prepare."""
    return machine_for(config, "prepare", described_of(config))


def _attempt_s(config: JobConfig) -> float | None:
    """Time until an attempt is told to save; None if no further attempt follows by itself."""
    if not TARGETS[config.target].repeats:
        return None
    return (config.cluster.time or config.compute.max_run) - config.cluster.save_before


def _machines(machine: Machine) -> str:
    return f"{machine.count} x {machine.type}"


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value / GIB, 3) for name, value in parts.items()}
