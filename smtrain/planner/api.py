"""`plan(config)`: everything that is known about a run before it is paid for."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import exp, isfinite
from pathlib import Path
from typing import Any, Literal

from smtrain.config import JobConfig, load_config
from smtrain.config.load import Source
from smtrain.config.units import spell
from smtrain.errors import ConfigError
from smtrain.facts import table
from smtrain.model.families import ModelShape
from smtrain.planner.calibration import UNCALIBRATED, half_width, nearest
from smtrain.planner.cost import HOUR, Cost, Price, Prices, Saving, cost, saving, stage_seconds
from smtrain.planner.memory import checkpoint_bytes, host_memory, worst_core
from smtrain.planner.search import Candidate, doubts, refusals, search
from smtrain.planner.setup import GIB, Machine, Mesh, Recompute, Work, named_shape
from smtrain.planner.throughput import step_time

RankBy = Literal["time", "cost"]
# What an engine can leave to be computed again, and whether its backward pass gathers once more.
_ENGINES: dict[str, tuple[tuple[Recompute, ...], bool]] = {
    "native": (("none", "full"), False),
    "nxd": (("selective", "full"), True),
}


@dataclass(frozen=True)
class Choice:
    """One way to do the run, as the table of choices shows it."""

    machines: str
    mesh: Mesh
    hours: float
    dollars: float | None
    core_gib: float


@dataclass(frozen=True)
class Plan:
    """What a run needs, takes and costs; figures in GiB, seconds, hours and dollars, None where unknown."""

    model: str
    parameters: int
    machines: str
    mesh: Mesh
    fits: bool
    faults: tuple[str, ...]
    """Why it cannot run; empty if it fits."""
    warnings: tuple[str, ...]
    memory_gib: dict[str, float]
    """Of the core that needs most, by part; `total` and `available` too."""
    host_memory_gib: dict[str, float]
    """At load, at save and during an asynchronous save; `available` too."""
    step_s: dict[str, float] | None
    """Seconds of an optimizer step by part, and `total`."""
    sequences_per_s: dict[str, float] | None
    """`value`, and the ends `low` and `high` of the 90 % interval."""
    tokens_per_s: float | None
    mfu: float | None
    calibrated: bool
    nearest: str | None
    """The published run most like this one."""
    hours: float | None
    """Billed wall time of the train stage, interruptions and saving included."""
    dollars: float | None
    dollars_by_item: dict[str, float]
    dollars_per_million_tokens: float | None
    tokens_per_dollar: float | None
    """As the published Trainium table counts: tokens of an undisturbed hour over its price."""
    prices: tuple[Price, ...]
    save: Saving | None
    save_interval_steps: int | None
    """The interval that loses least (Young/Daly), in steps."""
    checkpoint_gib: float
    choices: tuple[Choice, ...]
    """The best five ways, this one among them or not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinities become None."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str), parse_constant=lambda _: None)
        return told

    def __str__(self) -> str:
        from smtrain.planner.show import summary

        return summary(self)


def plan(
    source: Source | None = None, *, model: str | None = None, machines: Sequence[tuple[str, int]] = (),
    rank_by: RankBy = "time", budget: float | None = None, deadline_hours: float | None = None, best: bool = False,
    prices: str | Path | None = None, set_: Sequence[str] = (), **sections: Any,
) -> Plan:  # fmt: skip
    """Plan the train stage of a config and the stages around it. Needs no credentials and no network.

    `model` names a known model or a folder with a config.json, in place of the config's `model.path`. `machines` are
    (instance type, count) pairs to choose from, default the config's own; `budget` in dollars and `deadline_hours`
    narrow the choice, `rank_by` orders it. With `best` the plan is for the best mesh, not for the config's.
    `prices` is a file whose rows override the shipped ones; default: prices.toml in $SMTRAIN_HOME, if it is there.
    Raises `ConfigError` for a config that is wrong, a model or an instance type nobody told us about.
    """
    config, shape = _resolve(source, model, set_, sections)
    known = Prices(prices or own_prices())
    work, recompute = work_of(config, shape)
    own = Machine.of(config.compute.instance_type, config.compute.instance_count, config.processes_per_instance)
    mesh = Mesh(
        config.parallel.tp, config.parallel.pp, config.dp, config.parallel.micro_batch_size,
        config.parallel.activation_checkpointing, config.parallel.sequence_parallel,
    )  # fmt: skip
    some = [Machine.of(t, n) for t, n in machines] or [own]
    steps = config.train.steps
    found = search(work, some, recompute=recompute)
    by_cost = rank_by == "cost" or (deadline_hours is not None and budget is None)
    narrowed = budget is not None or deadline_hours is not None
    kept = found
    if not by_cost and not narrowed:  # only these are shown
        kept = found[:5] + [c for c in found[5:] if c.machine == own][:1]
    priced = [(c, _cost(config, work, c.machine, steps, c.step_s, known)) for c in kept]
    choices = [
        (c, b)
        for c, b in priced
        if (budget is None or _dollars(b) <= budget) and (deadline_hours is None or b.train_hours <= deadline_hours)
    ]
    choices.sort(key=lambda way: _dollars(way[1]) if by_cost else way[1].train_hours)
    if best or machines or narrowed:
        if not choices:
            raise ConfigError(["compute: no mesh of these machines fits the model, the budget and the deadline"])
        own, mesh = choices[0][0].machine, choices[0][0].mesh
    return _plan(config, work, own, mesh, choices, known)


def _plan(
    config: JobConfig, work: Work, machine: Machine, mesh: Mesh, choices: list[tuple[Candidate, Cost]], prices: Prices
) -> Plan:
    faults = tuple(refusals(work, machine, mesh))
    legal = not faults or faults[0].startswith("memory:")
    warnings: list[str] = []
    core = worst_core(work, machine, mesh)[1] if legal else None
    host = host_memory(work, machine, mesh) if legal else None
    step = step_time(work, machine, mesh) if legal else None
    near = nearest(work, machine, mesh)
    calibrated = near is not None and near.calibrated
    steps = config.train.steps
    spent = lost = None
    same = [c for c, _ in choices if c.machine == machine]
    if step and steps:
        lost = _saving(config, work, machine, step.total, prices)
        spent = _cost(config, work, machine, steps, step.total, prices)
    if step and not faults:
        fastest = min(same, key=lambda c: c.step_s) if same else None
        warnings += doubts(work, machine, mesh, fastest)
        warnings += _run_warnings(config, work, machine, step.total, spent, lost)
        warnings += _memory_warnings(work, machine, mesh, checkpoint_bytes(work))
    if not calibrated:
        where = machine.type if near is None else f"this shape (nearest: {_name(near.run.id)})"
        warnings.append(
            f"uncalibrated: no training run was published for {where}; throughput is by peak ratio, off by "
            f"up to {exp(UNCALIBRATED):.1f} times"
        )
    if config.train.engine == "native":
        warnings.append("the published runs are neuronx-distributed's and NeMo's; none is of the native engine")
    wide = half_width(table("throughput")["coefficients"]["residual"], near)
    rate = work.global_batch / step.total if step else None
    tokens = rate * work.seq_len if rate else None
    hourly = prices.find(machine.type, "spot" if config.compute.spot else "on_demand", config.compute.region)
    per_dollar = tokens * HOUR / (hourly.dollars_per_hour * machine.count) if tokens and hourly else None
    if hourly is None:
        warnings.append(f"no price is known for {machine.type}; give one with --prices")
    used = spent.prices if spent else (hourly,) if hourly else ()
    warnings += [f"price: {p}" for p in used if p.guess]
    flops = work.shape.flops_per_token(work.seq_len)
    billed = steps * work.global_batch * work.seq_len / 1e6
    return Plan(
        model=config.model.path.rstrip("/").rsplit("/", 1)[-1],
        parameters=work.parameters,
        machines=_machines(machine),
        mesh=mesh,
        fits=not faults,
        faults=faults,
        warnings=tuple(warnings),
        memory_gib=_gib({**asdict(core), "total": core.total, "available": machine.core_bytes}) if core else {},
        host_memory_gib=_gib({**asdict(host), "available": machine.host_bytes}) if host else {},
        step_s={**asdict(step), "total": step.total} if step else None,
        sequences_per_s={"value": rate, "low": rate * exp(-wide), "high": rate * exp(wide)} if rate else None,
        tokens_per_s=tokens,
        mfu=tokens * flops / (machine.core_flops * machine.world) if tokens else None,
        calibrated=calibrated,
        nearest=_name(near.run.id) if near else None,
        hours=spent.train_hours if spent else None,
        dollars=spent.total if spent else None,
        dollars_by_item=spent.items if spent else {},
        dollars_per_million_tokens=spent.total / billed if spent and spent.total is not None and billed else None,
        tokens_per_dollar=per_dollar,
        prices=used,
        save=lost,
        save_interval_steps=max(1, round(lost.best_interval_s / step.total)) if lost and step else None,
        checkpoint_gib=checkpoint_bytes(work) / GIB,
        choices=tuple(
            Choice(_machines(c.machine), c.mesh, b.train_hours, b.total, c.core_bytes / GIB) for c, b in choices[:5]
        ),
    )


def _resolve(
    source: Source | None, model: str | None, set_: Sequence[str], sections: dict[str, Any]
) -> tuple[JobConfig, ModelShape]:
    named = named_shape(model) if model else None
    if model and named:
        sections = {**sections, "model": {**sections.get("model", {}), "path": f"s3://known-models/{model}"}}
    elif model:
        sections = {**sections, "model": {**sections.get("model", {}), "path": model}}
    config = load_config(source, set_=set_, **sections)
    return config, shape_of(config)


def work_of(config: JobConfig, shape: ModelShape) -> tuple[Work, tuple[Recompute, ...]]:
    """What a config trains, and which recomputations its engine knows."""
    recompute, again = _ENGINES[config.train.engine]
    train = config.train
    return Work(shape, train.seq_len, train.global_batch_size, train.precision, gathers_again=again), recompute


def shape_of(config: JobConfig) -> ModelShape:
    """The shape of a config's model: from its folder, or by name for what lies elsewhere. Raises `ConfigError`."""
    if "://" not in config.model.path:
        file = Path(config.model.path) / "config.json"
        try:
            return ModelShape.from_config(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError([f"model.path: {file} cannot be read ({error})"]) from None
    if config.model.path.startswith("demo://"):
        from smtrain.demo import inputs as demo

        if config.model.path == demo.MODEL:
            return ModelShape.from_config(demo.described())
    shape = named_shape(config.model.path.partition("@")[0])
    if shape is None:
        raise ConfigError(
            [
                f"model.path: nothing is known about the model in {config.model.path}; give --model with a folder that "
                f"has its config.json, or one of {', '.join(table('models')['models'])}"
            ]
        )
    return shape


def own_prices() -> Path | None:
    """The user's price list in $SMTRAIN_HOME, if there is one."""
    from os import environ

    folder = Path(environ.get("SMTRAIN_HOME") or Path.home() / ".smtrain")  # read only: planning makes no folder
    return folder / "prices.toml" if (folder / "prices.toml").is_file() else None


def _saving(config: JobConfig, work: Work, machine: Machine, step_s: float, prices: Prices) -> Saving:
    interval = config.train.save_interval * step_s
    return saving(work, machine, interval, config.train.steps * step_s, config.compute.spot, prices.assumptions)


def _cost(config: JobConfig, work: Work, machine: Machine, steps: int, step_s: float, prices: Prices) -> Cost:
    stages = {}
    if steps:
        stages = stage_seconds(
            work, prices.assumptions, text_bytes=_text_bytes(config), accelerated=machine.accelerated
        )
    lost = _saving(config, work, machine, step_s, prices) if steps else Saving(0, 0, 0, 0, 1)
    return cost(
        work, machine, steps, step_s, lost, spot=config.compute.spot, keep_alive_s=config.compute.keep_alive,
        stages=stages, cpu_type=config.compute.cpu_instance_type, region=config.compute.region, prices=prices,
    )  # fmt: skip


def _text_bytes(config: JobConfig) -> float | None:
    """Of text on this machine; what lies elsewhere is not looked at."""
    paths = [source.path for source in config.data.all_sources]
    if config.data.prepared or not paths or any("://" in path for path in paths):
        return None
    roots = [Path(p) for path in paths for p in (glob.glob(path, recursive=True) if glob.has_magic(path) else [path])]
    files = [f for root in roots for f in (root.rglob("*") if root.is_dir() else [root])]
    return float(sum(f.stat().st_size for f in files if f.is_file()))


def _run_warnings(
    config: JobConfig, work: Work, machine: Machine, step_s: float, spent: Cost | None, lost: Saving | None
) -> list[str]:
    if spent is None or lost is None:
        return []
    out = []
    limit, wall = config.compute.max_run, spent.train_hours * HOUR
    first = min(config.train.save_interval, config.train.steps) * step_s
    if first > limit:
        out.append(
            f"compute.max_run: {spell(limit)} ends before the first checkpoint at {spell(first)} "
            f"(train.save_interval {config.train.save_interval}): nothing would be kept"
        )
    elif wall > limit:
        out.append(
            f"compute.max_run: {spell(limit)} is shorter than the run's {spell(wall)}; it would stop and have to be "
            "started again"
        )
    if config.compute.spot and not isfinite(lost.stretch):
        out.append("compute.spot: the run would practically never end between interruptions; save more often")
    if lost.stretch > 1.05:
        out.append(
            f"saving every {config.train.save_interval} steps costs {lost.stretch - 1:.0%} of the time in saves and "
            f"lost work; {max(1, round(lost.best_interval_s / step_s))} steps lose least"
        )
    return out


def _memory_warnings(work: Work, machine: Machine, mesh: Mesh, checkpoint: float) -> list[str]:
    host, out = host_memory(work, machine, mesh), []
    for what, need in (("loading", host.load), ("saving", host.save), ("saving asynchronously", host.async_save)):
        if need > machine.host_bytes:
            out.append(
                f"host memory: {what} takes {need / GIB:.0f} GiB of {machine.host_bytes / GIB:.0f}: "
                f"short by {(need - machine.host_bytes) / GIB:.0f} GiB"
            )
    return out


def _name(run: str) -> str:
    row = next(r for r in table("throughput")["runs"] if r["id"] == run)
    return f"{row['model']} tp {row['tp']} pp {row['pp']} on {row['instances']} instances, {row['date']}"


def _dollars(found: Cost) -> float:
    return float("inf") if found.total is None else found.total


def _machines(machine: Machine) -> str:
    return f"{machine.count} x {machine.type}"


def _gib(parts: dict[str, float]) -> dict[str, float]:
    return {name: round(value / GIB, 3) for name, value in parts.items()}
