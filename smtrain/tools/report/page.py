"""A run as one HTML page."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import yaml

from smtrain.client.follow.failure import NO_FAILURE
from smtrain.client.follow.machines import NAMES, written
from smtrain.core.config.secrets import hide
from smtrain.core.config.units import spell
from smtrain.core.facts.sagemaker import ENDED
from smtrain.core.text import clean
from smtrain.core.web_page import document, wide
from smtrain.plane.hosts import read
from smtrain.tools.report.charts import chart
from smtrain.tools.report.gather import JobAccount, RunAccount
from smtrain.tools.report.installed import commands
from smtrain.tools.report.waste import portions
from smtrain.version import __version__
from smtrain.worker.evaluation.report import sentences

GENERATOR = "smtrain report"
_STYLE = """
.facts{display:flex;flex-wrap:wrap;gap:.2rem 1.6rem;margin:.6em 0}.facts b{font-size:1.1rem}
.pairs{table-layout:fixed}.pairs td{overflow-wrap:anywhere}.pairs td:first-child{width:38%}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1rem}
svg{width:100%}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}
svg .grid{stroke:var(--edge);fill:none}svg .axis{stroke:var(--dim);fill:none}
svg .mark{stroke:var(--warn);stroke-dasharray:4 3;fill:none}
svg polyline{stroke:var(--line);fill:none;stroke-width:1.6}svg circle{fill:var(--dot)}.dot{color:var(--dot)}
.bar{display:flex;height:.9rem;border-radius:4px;overflow:hidden;margin:.5em 0}.bar span{min-width:1px}
"""


def page(run: RunAccount, failures: Sequence[str] = ()) -> str:
    """The whole document. `failures` say why jobs of the run failed, one text each."""
    now = datetime.datetime.now(datetime.timezone.utc)
    title = f"{_text(run.name)}: report"
    parts = [
        _head(run, now),
        *(f"<pre>{_text(why)}</pre>" for why in failures),
        _section("What ran", _jobs(run)),
        _section("Curves", _curves(run)),
        _section("Where a step's time goes", _parts(run)),
        _section("What the machines used", _machines(run)),
        _section("Validation", _validation(run)),
        _section("Evaluation", _evaluation(run)),
        _section("What it writes", _texts(run)),
        _section("Cost", _cost(run)),
        _section("Environment", _environment(run)),
        _section("How to reproduce it", _again(run)),
        f'<p class="dim">Made by smtrain {_text(__version__)} at {now:%Y-%m-%d %H:%M} UTC.</p>',
    ]
    return document(title, "".join(filter(None, parts)), _STYLE, GENERATOR)


def _head(run: RunAccount, now: datetime.datetime) -> str:
    last, records = run.jobs[-1], run.records
    whole = [job for job in run.jobs if job.status not in ENDED]
    state = "running" if whole else "done" if last.status == "Completed" else last.status.lower()
    tone = {"done": "good", "running": "", "stopped": "warn"}.get(state, "bad")
    losses = [r["loss"] for r in records if "loss" in r]
    judged = [(r["val_loss"], r["step"]) for r in records if "val_loss" in r]
    facts = [("state", f'<b class="{tone}">{_text(state)}</b>')]
    if records:
        of = f" of {records[-1]['of']:.0f}" if "of" in records[-1] else ""
        facts.append(("step", f"<b>{records[-1]['step']:.0f}{of}</b>"))
    if losses:
        facts.append(("loss", f"<b>{losses[-1]:.4f}</b> (from {losses[0]:.4f})"))
    if judged:
        lowest, best = min(judged)
        facts.append(("lowest validation loss", f"<b>{lowest:.4f}</b> at step {best:.0f}"))
    total = _total(run.jobs)
    if total is not None or not last.cost.owned:
        facts.append(("cost", f"<b>{_dollars(total)}</b>{'' if last.cost.billed else ' if on AWS'}"))
    began = run.jobs[0].created
    places = {"local": "this machine", "slurm": "a Slurm cluster"}
    where = places.get(run.target.name) or f"AWS, {run.target.region_name()}"
    return (
        f'<h1>{_text(run.name)}</h1><div class="dim">on {_text(where)}, begun {began:%Y-%m-%d %H:%M} UTC</div>'
        f'<div class="facts">{"".join(f"<span>{name} {value}</span>" for name, value in facts)}</div>'
    )


def _jobs(run: RunAccount) -> str:
    rows = []
    for job in run.jobs:
        tone = "good" if job.status == "Completed" else "bad" if job.status == "Failed" else ""
        rows.append([
            _text(job.stage), _one(job.name), f'<span class="{tone}">{_text(job.status)}</span>',
            _one(job.cost.machines), _n(f"{job.created:%m-%d %H:%M}"), _n(spell(job.seconds)),
            _n("-" if job.cost.owned and job.cost.dollars is None else _dollars(job.cost.dollars)),
        ])  # fmt: skip
    return _table(["stage", "job", "status", "machines", "> begun (UTC)", "> took", "> cost"], rows)


def _curves(run: RunAccount) -> str:
    records = run.records

    def of(key: str) -> list[tuple[float, float]]:
        return [(r["step"], r[key]) for r in records if key in r]

    marks = [(step, f"learning rate {old} to {new} from step {step:.0f}") for step, old, new in run.rate_changes]
    drawn = [
        chart("loss, nats per token", of("loss"), of("val_loss"), dots_are="on held-out text", marks=marks),
        chart("gradient norm", of("grad_norm"), log=True, marks=marks),
        chart("learning rate", of("lr"), marks=marks),
        chart("tokens per second", of("tokens_per_s"), marks=marks),
    ]
    told = "".join(f"<p>A resume changed the {_text(text)} (dashed line).</p>" for _, text in marks)
    return f'{told}<div class="charts">{"".join(drawn)}</div>' if any(drawn) else ""


def _parts(run: RunAccount) -> str:
    waits = [r["data_wait"] for r in run.records if "data_wait" in r]
    told = f"<p>{_text(run.profile)}</p>" if run.profile else ""
    return told + (f"<p>Waiting for data, over all steps: {sum(waits) / len(waits):.1%}.</p>" if waits else "")


def _machines(run: RunAccount) -> str:
    """A row a host: the mean of the job, and the highest of a minute where it is far above."""
    known = [key for key in NAMES if any(key in record for told in run.machines.values() for record in told)]
    rows = []
    for host, told in run.machines.items():
        cells = []
        for key in known:
            values = [record[key] for record in told if key in record]
            mean, high = (sum(values) / len(values), max(values)) if values else (0.0, 0.0)
            above = f"up to {written(key, high)}" if high > 1.1 * mean and high > 0.1 else ""
            cells.append(_n(written(key, mean) if values else "", above))
        rows.append([_one(host), *cells])
    return _table(["host", *(f"> {NAMES[key]}" for key in known)], rows) if rows else ""


def _validation(run: RunAccount) -> str:
    judged = [r for r in run.records if "val_loss" in r]
    if not judged:
        return ""
    best = min(judged, key=lambda r: r["val_loss"])
    shown = judged if len(judged) <= 12 else [judged[i * (len(judged) - 1) // 11] for i in range(12)]
    rows = [
        [_n(f"{r['step']:.0f}"), _n(f"{r['val_loss']:.4f}"), _n(f"{r['val_ppl']:,.2f}" if "val_ppl" in r else ""),
         _n(f"{r['val_accuracy']:.1%}" if "val_accuracy" in r else "")]
        for r in shown
    ]  # fmt: skip
    lead = f"<p>Lowest loss on held-out text: <b>{best['val_loss']:.4f}</b> at step {best['step']:.0f}.</p>"
    return lead + _table(["> step", "> loss", "> perplexity", "> accuracy"], rows)


def _evaluation(run: RunAccount) -> str:
    told = run.evaluation
    if not told:
        return ""
    rows = []
    for row in told["results"]:
        after, before = row["after"], row.get("before") or {}
        rows.append([
            _text(row["task"]), _text(row["metric"]), _n(f"{row['n']:,}"), _n(_measure(before)), _n(_measure(after)),
            _text(row.get("verdict", "")),
        ])  # fmt: skip
    said = "".join(f"<p>{_text(sentence)}.</p>" for sentence in sentences(told))
    return said + _table(["task", "metric", "> questions", "> before", "> after", ""], rows)


def _texts(run: RunAccount) -> str:
    return "".join(
        f"<p><b>{_text(text.get('prompt', ''))}</b></p><pre>{_text(text.get('completion', ''))}</pre>"
        for text in run.texts[:8]
    )


def _cost(run: RunAccount) -> str:
    if run.jobs[-1].cost.owned and _total(run.jobs) is None:
        return ""
    found = portions(run.jobs)
    total = sum(p.seconds for p in found)
    if not total:
        return "<p>Nothing was billed.</p>"
    known = [p for p in found if p.dollars is not None]
    spent, lost = sum(p.dollars or 0.0 for p in known), sum(p.dollars or 0.0 for p in known if p.wasted)
    rows = [
        [_text(p.stage), f'<span class="{"warn" if p.wasted else ""}">{_text(p.what)}</span>', _n(spell(p.seconds)),
         _n(_dollars(p.dollars)), _n(f"{(p.dollars or 0) / spent:.1%}" if spent else "")]
        for p in found
    ]  # fmt: skip
    waiting = sum(
        (c["EndTime"] - c["StartTime"]).total_seconds()
        for job in run.jobs
        for c in job.told.get("SecondaryStatusTransitions", [])
        if c["Status"] in ("Starting", "Pending", "LaunchingMLInstances") and c.get("EndTime")
    )
    lead = f"<p>{_dollars(spent)}, of which {_dollars(lost)} ({lost / spent:.1%}) paid for no step" if spent else "<p>"
    lead += f"{'; ' if spent else ''}{spell(waiting)} of waiting for machines were not billed.</p>"
    bar = "".join(
        f'<span style="flex:{100 * (p.dollars or 0) / (spent or 1):.3f};'
        f'background:var(--{"dot" if p.wasted else "line"})" title="{_text(p.stage)}: {_text(p.what)}"></span>'
        for p in known
    )
    prices = sorted({str(price) for job in run.jobs for price in job.cost.prices})
    billed = "" if run.jobs[-1].cost.billed else " This machine bills nothing: it is what the same time costs on AWS."
    return (
        f'{lead}<div class="bar" role="img" aria-label="useful and wasted shares">{bar}</div>'
        + _table(["stage", "what for", "> time", "> dollars", "> share"], rows)
        + f'<p class="dim">{_text("; ".join(prices))}.{billed}</p>'
    )


def _environment(run: RunAccount) -> str:
    job = run.last("train") or run.jobs[-1]
    told = job.told
    rows = [["machines", _text(job.cost.machines)]]
    if _in_container(run, job):
        rows.insert(0, ["image", _text(told["AlgorithmSpecification"]["TrainingImage"])])
    else:
        rows.insert(0, ["ran", "as processes, in no container"])
    if run.commit:
        rows.append(["git commit", _text(run.commit)])
    if run.software:
        rows.append(["software", _text(run.software)])
    shown = {key: told.get("HyperParameters", {}).get(key) for key in ("tp", "pp", "dp", "precision")}
    if any(shown.values()):
        rows.append(["mesh", _text(", ".join(f"{key} {value}" for key, value in shown.items() if value))])
    variables = {k: v for k, v in told.get("Environment", {}).items() if not k.startswith("SMTRAIN_")}
    own = f"s3://{run.target.default_bucket()}/" if run.target.name == "local" else "\0"
    # A place in the S3 of this machine says nothing to a reader elsewhere.
    rows += [[_text(key), _text(value)] for key, value in sorted(variables.items()) if not value.startswith(own)]
    for channel in told.get("InputDataConfig", []):
        uri = channel["DataSource"].get("S3DataSource", {}).get("S3Uri", "a file system")
        if run.target.name != "local":
            rows.append([f"input {_text(channel['ChannelName'])}", _text(uri)])
    rows += [[f"input {_text(path)}", f"sha256 {_text(digest)}..."] for path, digest in run.inputs.items()]
    return _table(["", ""], rows)


def _in_container(run: RunAccount, job: JobAccount) -> bool:
    """True if the job's image ran: not so for local jobs in the sandbox, nor on a Slurm cluster."""
    if run.target.name == "aws":
        return True
    return run.target.name == "local" and read(run.target.tags(job.told)).run_in in ("docker", "auto")


def _again(run: RunAccount) -> str:
    aws = run.target.name == "aws"
    role = " Set compute.role to a role of your account." if aws else ""
    inputs = (
        "<p>Its inputs are named by their paths on the machine that ran it; the digests (sha256 of the files' names "
        "and contents, 16 digits) are under Environment.</p>"
        if run.inputs
        else ""
    )
    commit = f"# the config's folder was at git commit {run.commit}" if run.commit else ""
    lines = [*filter(None, [commit]), *commands(), "smtrain check run.yaml", "smtrain run run.yaml"]
    return (
        f"<p>Save this as run.yaml.{role} The same command finds the stages that are done, as long as their jobs are "
        "known; give the run another name to start over.</p>"
        f"{inputs}<pre>{_text(config_text(run))}</pre><pre>{_text(chr(10).join(lines))}</pre>"
    )


def config_text(run: RunAccount) -> str:
    """The run's config as YAML, put together from what its jobs were told."""
    return yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=100)


def _total(jobs: Iterable[JobAccount]) -> float | None:
    known = [job.cost.dollars for job in jobs]
    return None if None in known else sum(dollars or 0.0 for dollars in known)


def failed(run: RunAccount) -> list[JobAccount]:
    """Jobs whose failure is worth a word: the last attempt of a stage, where it has not ended well."""
    last = {job.stage: job for job in run.jobs}
    return [job for job in last.values() if job.status in ENDED and job.status not in NO_FAILURE]


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n" if body else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th class="n">{h[2:]}</th>' if h.startswith("> ") else f"<th>{h}</th>" for h in head)
    body = "".join(
        "<tr>" + "".join(c if c.startswith("<td") else f"<td>{c}</td>" for c in row) + "</tr>" for row in rows
    )
    top = f"<thead><tr>{cells}</tr></thead>" if any(head) else ""
    kind = "" if any(head) else ' class="pairs"'
    return wide(f"<table{kind}>{top}<tbody>{body}</tbody></table>")


def _n(text: str, below: str = "") -> str:
    return f'<td class="n">{_text(text)}' + (f'<br><span class="dim">{_text(below)}</span>' if below else "") + "</td>"


def _one(text: str) -> str:
    return f'<td class="one">{_text(text)}</td>'


def _measure(told: dict[str, Any]) -> str:
    if not told:
        return ""
    return f"{told['value']:.4f}" + (f" ± {told['stderr']:.4f}" if told.get("stderr") is not None else "")


def _dollars(value: float | None) -> str:
    return "price unknown" if value is None else f"${value:,.2f}" if value >= 0.005 or not value else f"${value:.4f}"


def _text(text: object) -> str:
    return escape(hide(clean(str(text))))
