"""`smtrain.report`: a run on one HTML page."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from smtrain.client.backends.choose import sagemaker
from smtrain.client.follow.failure import NO_FAILURE
from smtrain.client.follow.machines import NAMES, format_number
from smtrain.client.jobs.job import Job
from smtrain.core.config.units import spell
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance
from smtrain.core.facts.sagemaker import FINAL_STATUSES
from smtrain.core.files import write_atomically
from smtrain.core.pages.charts import chart
from smtrain.core.pages.page import Cell, number, render
from smtrain.core.public_api import public
from smtrain.core.targets import TargetName
from smtrain.plane.hosts import read
from smtrain.tools.report.changed_keys import changed_keys
from smtrain.tools.report.gather import JobAccount, RunAccount, gather
from smtrain.tools.report.install_command import commands
from smtrain.tools.report.waste import Portion, portions
from smtrain.version import __version__
from smtrain.worker.evaluation.long_context import pictures
from smtrain.worker.evaluation.report import metric_of, sentences

_GENERATOR = "smtrain report"
_MARK = f'<meta name="generator" content="{_GENERATOR}">'
_WAITING_STATES = ("Starting", "Pending", "LaunchingMLInstances")


@public
def report(
    run: str,
    out: str | Path | None = None,
    *,
    target: TargetName | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a run's report: one HTML page that fetches nothing.

    It has what ran, the curves, validation, evaluation, the cost by stage and the share that paid
    for no step, the environment, and the config that runs it again. An existing report is replaced.

    Args:
        run: The run's name, or the name or ARN of one of its jobs.
        out: The file to write. Default: `<run>.html` in the working directory.
        target: the name of a target. Default: the target that the run was started
            with here, else AWS.
        overwrite: Replace a file other than a report.

    Returns:
        The file.

    Raises:
        ConfigError: `out` is an empty name or a folder.
        JobError: There is no such run, or `out` is a file other than a report.

    Examples:
        >>> smtrain.report("llama").name
        'llama.html'
    """
    if out is not None and (not str(out).strip() or Path(out).is_dir()):
        raise ConfigError(
            f"out: {str(out)!r} is not a file name; give one such as report.html",
            code="config.wrong_value",
        )
    account = gather(run, target)
    file = Path(out) if out is not None else Path(f"{account.name}.html")
    refuse_other(file, overwrite)
    last = {job.stage: job for job in account.jobs}
    failed_jobs = [
        job
        for job in last.values()
        if job.status in FINAL_STATUSES and job.status not in NO_FAILURE
    ]
    write_atomically(
        file, page(account, [str(Job(job.name, account.target).explain()) for job in failed_jobs])
    )
    return file


def refuse_other(file: Path, overwrite: bool) -> None:
    """Raise `ConfigError` if the file exists and is no report of ours."""
    if overwrite or not file.exists():
        return
    with file.open("rb") as content:
        head = content.read(4096)
    if _MARK.encode() not in head:
        raise ConfigError(
            f"{file}: exists and is not a report; name another file, or use --overwrite",
            code="config.wrong_value",
        )


def page(run: RunAccount, failures: Sequence[str] = ()) -> str:
    """The whole document. `failures` say why jobs of the run failed, one text each."""
    records = run.records
    validations = [record for record in records if "val_loss" in record]
    state, tone = _state(run)
    marks = [
        (step, f"learning rate {old} to {new} from step {step:.0f}")
        for step, old, new in run.rate_changes
    ]
    return render(
        "report.html",
        hide_secrets=True,
        title=f"{run.name}: report",
        generator=_GENERATOR,
        run=run,
        place=(
            f"AWS, {run.target.region_name()}"
            if run.target.record.rented
            else run.target.record.title
        ),
        state=state,
        tone=tone,
        facts=_facts(run, records),
        failures=failures,
        jobs=_jobs(run.jobs),
        marks=marks,
        charts=_charts(records, marks),
        waits=[record["data_wait"] for record in records if "data_wait" in record],
        machines=_machines(run),
        best=min(validations, key=lambda record: record["val_loss"], default=None),
        validated=_validation(validations),
        evaluated=[_evaluation(row) for row in run.evaluation["results"]] if run.evaluation else [],
        sentences=sentences(run.evaluation) if run.evaluation else [],
        long=_long_context_charts(run.evaluation) if run.evaluation else [],
        cost=_cost(run),
        environment=_environment(run),
        config=config_text(run),
        changed=_yaml(changed_keys(run.config)),
        commands=[
            *([f"# the config's folder was at git commit {run.commit}"] if run.commit else []),
            *_own_machine(run),
            *commands(),
            "smtrain check run.yaml",
            "smtrain run run.yaml",
        ],
        version=__version__,
        now=datetime.datetime.now(datetime.timezone.utc),
    )


def _state(run: RunAccount) -> tuple[str, str]:
    """The run's state, and the CSS class of its tone."""
    if any(job.status not in FINAL_STATUSES for job in run.jobs):
        return "running", ""
    status = run.jobs[-1].status
    state = "done" if status == "Completed" else status.lower()
    return state, {"done": "good", "stopped": "warn"}.get(state, "bad")


class Fact(NamedTuple):
    """A number below the title, the words behind it, and the CSS class of its tone."""

    name: str
    value: str
    rest: str = ""
    tone: str = ""


def _facts(run: RunAccount, records: Sequence[dict[str, float]]) -> list[Fact]:
    facts = []
    losses = [record["loss"] for record in records if "loss" in record]
    losses_and_steps = [
        (record["val_loss"], record["step"]) for record in records if "val_loss" in record
    ]
    if records:
        of = f" of {records[-1]['of']:.0f}" if "of" in records[-1] else ""
        facts.append(Fact("step", f"{records[-1]['step']:.0f}{of}"))
    if losses:
        facts.append(_loss(losses))
    if losses_and_steps:
        lowest, best = min(losses_and_steps)
        facts.append(Fact("lowest validation loss", f"{lowest:.4f}", f" at step {best:.0f}"))
    if run.restarts:
        facts.append(Fact("restarts", str(run.restarts)))
    if reward_records := [record for record in records if "rewards/margins" in record]:
        margin, accuracy = (
            reward_records[-1]["rewards/margins"],
            reward_records[-1]["rewards/accuracies"],
        )
        facts.append(Fact("reward margin", f"{margin:.4f}", f" (accuracy {accuracy:.0%})"))
    if expert_records := [record for record in records if "experts/load_max" in record]:
        highest_load, lowest_load = (
            expert_records[-1]["experts/load_max"],
            expert_records[-1]["experts/load_min"],
        )
        facts.append(
            Fact("busiest expert", f"{highest_load:.1f} x mean", f" (idlest {lowest_load:.2f} x)")
        )
    total, cost = _total(run.jobs), run.jobs[-1].cost
    if total is not None or not cost.is_owned:
        facts.append(Fact("cost", _dollars(total), "" if cost.is_billed else " if on AWS"))
    return facts


def _loss(losses: Sequence[float]) -> Fact:
    """The last loss and the first one; a loss that rose is marked."""
    first, last = losses[0], losses[-1]
    if last > first:
        return Fact("loss", f"{last:.4f}", f" (rose from {first:.4f})", "warn")
    return Fact("loss", f"{last:.4f}", f" (from {first:.4f})" if len(losses) > 1 else "")


def _jobs(jobs: Sequence[JobAccount]) -> tuple[list[str], list[list[Cell | str]]]:
    """Head and rows, one a job; without costs if all ran free of charge."""
    head = ["stage", "job", "status", "machines", "> begun (UTC)", "> took"]
    rows = [_job(job) for job in jobs]
    if all(_is_free(job) for job in jobs):
        return head, rows
    costs = [number("-" if _is_free(job) else _dollars(job.cost.dollars)) for job in jobs]
    return [*head, "> cost"], [[*row, cost] for row, cost in zip(rows, costs, strict=True)]


def _job(job: JobAccount) -> list[Cell | str]:
    tone = "good" if job.status == "Completed" else "bad" if job.status == "Failed" else ""
    return [
        job.stage,
        Cell(job.name, "one"),
        Cell(job.status, tone=tone),
        Cell(job.cost.machines, "one"),
        number(f"{job.created:%m-%d %H:%M}"),
        number(spell(job.seconds)),
    ]


def _is_free(job: JobAccount) -> bool:
    return job.cost.is_owned and job.cost.dollars is None


def _charts(records: Sequence[dict[str, float]], marks: Sequence[tuple[float, str]]) -> list[str]:
    def of(key: str) -> list[tuple[float, float]]:
        return [(record["step"], record[key]) for record in records if key in record]

    pairs = bool(of("rewards/chosen"))
    unit = "per pair" if pairs else "nats per token"
    charts = [
        chart(f"loss, {unit}", of("loss"), of("val_loss"), dots_are="on held-out text", marks=marks)
    ]
    if pairs:
        better, held_out = (
            "share of pairs whose chosen answer has the larger reward",
            "on held-out pairs",
        )
        rewards = of("rewards/chosen"), of("rewards/rejected")
        charts += [
            chart(
                "rewards of chosen answers", *rewards, dots_are="of rejected answers", marks=marks
            ),
            chart(
                "reward margin",
                of("rewards/margins"),
                of("val_margins"),
                dots_are=held_out,
                marks=marks,
            ),
            chart(
                better, of("rewards/accuracies"), of("val_accuracy"), dots_are=held_out, marks=marks
            ),
        ]
    if busiest := of("experts/load_max"):
        charts += [
            chart("load of the busiest expert over the mean, log", busiest, log=True, marks=marks),
            chart(
                "entropy of the router, 1 if all experts are alike",
                of("experts/entropy"),
                marks=marks,
            ),
        ]
    if any(share for _, share in of("experts/dropped")):
        charts.append(
            chart(
                "share of choices beyond an expert's capacity", of("experts/dropped"), marks=marks
            )
        )
    charts += [
        chart("gradient norm", of("grad_norm"), log=True, marks=marks),
        chart("learning rate", of("lr"), marks=marks),
        chart("tokens per second", of("tokens_per_s"), marks=marks),
    ]
    return [picture for picture in charts if picture]


def _machines(run: RunAccount) -> tuple[list[str], list[list[Cell]]] | None:
    """Head and rows, one a host: the mean of the job, and the highest minute if it is far above."""
    keys = [
        key
        for key in NAMES
        if any(key in record for host in run.machines.values() for record in host)
    ]
    rows = []
    for host, records in run.machines.items():
        cells = []
        for key in keys:
            values = [record[key] for record in records if key in record]
            mean, high = (sum(values) / len(values), max(values)) if values else (0.0, 0.0)
            note = f"up to {format_number(key, high)}" if high > 1.1 * mean and high > 0.1 else ""
            cells.append(number(format_number(key, mean) if values else "", note))
        rows.append([Cell(host, "one"), *cells])
    return (["host", *(f"> {NAMES[key]}" for key in keys)], rows) if rows else None


def _validation(validations: Sequence[dict[str, float]]) -> list[list[Cell]]:
    """At most 12 rows, spread over all validations."""
    sample = (
        validations
        if len(validations) <= 12
        else [validations[i * (len(validations) - 1) // 11] for i in range(12)]
    )
    return [
        [
            number(f"{record['step']:.0f}"),
            number(f"{record['val_loss']:.4f}"),
            number(f"{record['val_ppl']:,.2f}" if "val_ppl" in record else ""),
            number(f"{record['val_accuracy']:.1%}" if "val_accuracy" in record else ""),
        ]
        for record in sample
    ]


def _evaluation(row: dict[str, Any]) -> list[Cell | str]:
    return [
        str(row["task"]),
        metric_of(row),
        number(f"{row['n']:,}"),
        number(_measure(row.get("before") or {})),
        number(_measure(row["after"])),
        str(row.get("verdict", "")),
    ]


def _long_context_charts(evaluation: dict[str, Any]) -> list[str]:
    """Pictures of the evaluation of long texts: needles found, and the loss by position."""
    needle_pictures = list(pictures(evaluation).values())
    losses_before, losses_after = (
        [
            ((first + last) / 2, loss)
            for first, last, loss in (result or {}).get("loss_by_position", ())
        ]
        for result in ((evaluation.get("long") or {}).get(moment) for moment in ("before", "after"))
    )
    return [
        *needle_pictures,
        chart(
            "loss by position",
            losses_after,
            losses_before,
            dots_are="before the training",
            along="position",
        ),
    ]


def _cost(run: RunAccount) -> dict[str, Any] | None:
    """The section on costs; None for a machine of the user's own without a price."""
    last = run.jobs[-1].cost
    if last.is_owned and _total(run.jobs) is None:
        return None
    all_portions = portions(run.jobs)
    priced_portions = [portion for portion in all_portions if portion.dollars is not None]
    total = sum(portion.dollars or 0.0 for portion in priced_portions)
    waste = sum(portion.dollars or 0.0 for portion in priced_portions if portion.wasted)
    waiting_seconds = sum(
        (change["EndTime"] - change["StartTime"]).total_seconds()
        for job in run.jobs
        for change in job.description.get("SecondaryStatusTransitions", [])
        if change["Status"] in _WAITING_STATES and change.get("EndTime")
    )
    lead = (
        f"{_dollars(total)}, of which {_dollars(waste)} ({waste / total:.1%}) paid for no step; "
        if total
        else ""
    )
    return {
        "portions": all_portions,
        "known": priced_portions,
        "spent": total,
        "lead": f"{lead}{spell(waiting_seconds)} of waiting for machines were not billed.",
        "rows": [_portion(portion, total) for portion in all_portions],
        "prices": sorted({str(price) for job in run.jobs for price in job.cost.prices}),
        "billed": last.is_billed,
    }


def _portion(portion: Portion, total: float) -> list[Cell | str]:
    return [
        portion.stage,
        Cell(portion.what, tone="warn" if portion.wasted else ""),
        number(spell(portion.seconds)),
        number(_dollars(portion.dollars)),
        number(f"{(portion.dollars or 0) / total:.1%}" if total else ""),
    ]


def _environment(run: RunAccount) -> list[tuple[str, str]]:
    job = run.last("train") or run.jobs[-1]
    description, local = job.description, run.target.record.here
    image = _image(run, job)
    rows = [("image", image) if image else ("ran", "as processes, in no container")]
    rows.append(("machines", job.cost.machines))
    rows += [
        (name, text)
        for name, text in (("git commit", run.commit), ("software", run.software))
        if text
    ]
    mesh = {
        key: description.get("HyperParameters", {}).get(key)
        for key in ("tp", "pp", "cp", "dp", "ep", "precision")
    }
    if any(mesh.values()):
        rows.append(("mesh", ", ".join(f"{key} {value}" for key, value in mesh.items() if value)))
    # A place in the S3 of this machine says nothing to a reader elsewhere.
    local_prefix = f"s3://{sagemaker(run.target).default_bucket()}/" if local else "\0"
    rows += [
        (key, value)
        for key, value in sorted(description.get("Environment", {}).items())
        if not key.startswith("SMTRAIN_") and not value.startswith(local_prefix)
    ]
    for channel in [] if local else description.get("InputDataConfig", []):
        uri = channel["DataSource"].get("S3DataSource", {}).get("S3Uri", "a file system")
        rows.append((f"input {channel['ChannelName']}", uri))
    return rows + [(f"input {path}", f"sha256 {digest}...") for path, digest in run.inputs.items()]


def _image(run: RunAccount, job: JobAccount) -> str | None:
    """The image that the job ran in; None for local jobs in the sandbox, and on a Slurm cluster
    without containers.
    """
    record = run.target.record
    if not record.images and not record.here:
        container: str | None = run.config.get(record.section or "", {}).get("container")
        return container
    if record.here and read(run.target.tags(job.description)).run_in not in ("docker", "auto"):
        return None
    image: str = job.description["AlgorithmSpecification"]["TrainingImage"]
    return image


def config_text(run: RunAccount) -> str:
    """The run's config as YAML, merged from the configs of its jobs."""
    return _yaml(run.config)


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100)


def _own_machine(run: RunAccount) -> list[str]:
    """A comment on the machine of the user's own that the config names, and whose entry its jobs do
    not have.
    """
    name = run.config.get("compute", {}).get("instance_type")
    if not run.target.record.queues or not name or name.startswith("ml.") or instance(name):
        return []
    return [
        f"# first describe {name} under machines in run.yaml (`smtrain help gpus`): its jobs do not keep"
        " that entry"
    ]


def _total(jobs: Iterable[JobAccount]) -> float | None:
    job_dollars = [job.cost.dollars for job in jobs]
    return None if None in job_dollars else sum(dollars or 0.0 for dollars in job_dollars)


def _measure(measure: dict[str, Any]) -> str:
    if not measure:
        return ""
    return f"{measure['value']:.4f}" + (
        f" ± {measure['stderr']:.4f}" if measure.get("stderr") is not None else ""
    )


def _dollars(value: float | None) -> str:
    return (
        "price unknown"
        if value is None
        else f"${value:,.2f}"
        if value >= 0.005 or not value
        else f"${value:.4f}"
    )
