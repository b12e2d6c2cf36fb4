"""`check(config)`: all checks in one pass, side by side; and what `launch` and `run` do with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smtrain.config import Stage, load_config
from smtrain.config.load import Source
from smtrain.edge import public
from smtrain.errors import ConfigError, JobError
from smtrain.job.inputs import Say
from smtrain.job.stages import Chain, stages_of
from smtrain.job.target import TargetName, target_of
from smtrain.preflight import cost, dataset, disk, hosts, image, limits, quotas, resume, role, storage, token
from smtrain.preflight.context import Check, Context, Unreached, Unread
from smtrain.preflight.findings import Finding, Report

NOBODY = "arn:aws:iam::000000000000:role/none"
# In the order in which they are shown.
CHECKS: dict[str, Check] = {
    "limits": limits.limits,
    "role": role.role,
    "permissions": role.permissions,
    "buckets": storage.buckets,
    "token": token.token,
    "quotas": quotas.quotas,
    "hosts": hosts.hosts,
    "image": image.image,
    "model": dataset.model,
    "data": dataset.data,
    "text": dataset.text,
    "inputs": storage.inputs,
    "disk": disk.disks,
    "resume": resume.resume,
    "memory": cost.memory,
    "time": cost.time,
    "stop": cost.stop,
    "spot": cost.spot,
    "price": cost.price,
}


@public
def check(
    source: Source | None = None, *, stage: Stage | None = None, target: TargetName | None = None,
    set_: Sequence[str] = (), **sections: Any,
) -> Report:  # fmt: skip
    """Look at everything that can stop a run, or make it pay for nothing, before it starts; changes nothing.

    `stage` looks at one stage, default: all that the config has. What may not be read is a warning. A config that
    cannot be loaded is told as such, with every fault in it.
    """
    try:
        config = load_config(source, set_=set_, **sections)
        place = target_of(config, target)
    except ConfigError as error:
        return _of_config(error)
    stages = [stage] if stage else stages_of(config, place.name)
    try:
        return look(Chain(config, place), stages)
    except ConfigError as error:
        told = _of_config(error)
    if config.compute.role:
        return told
    # Most likely the role alone is missing: everything else can be looked at without one.
    standing_in = config.model_copy(update={"compute": config.compute.model_copy(update={"role": NOBODY})})
    try:
        rest = look(Chain(standing_in, place), stages, without=["role", "permissions"])
    except ConfigError as error:
        return _of_config(error)
    return Report((*told, *(finding for finding in rest if finding.check != "config")))


def _of_config(error: ConfigError) -> Report:
    return Report(tuple(Finding("config", "fault", fault) for fault in error.faults))


def look(chain: Chain, stages: Sequence[Stage], without: Sequence[str] = ()) -> Report:
    """Every check of these stages but those named in `without`."""
    # Threads that import it at once may lock each other out (importlib's _DeadlockError): botocore imports in circles.
    import boto3  # noqa: F401

    context = Context(chain, stages)
    context.requests, context.plan  # noqa: B018 - made once, before the threads share them
    chosen = [name for name in CHECKS if name not in without]
    with ThreadPoolExecutor(max_workers=len(chosen)) as pool:
        found = list(pool.map(lambda name: _one(context, name), chosen))
    findings = [Finding("config", "ok", "the config is whole")]
    for some in found:
        findings += [finding for finding in some if isinstance(finding, Finding)]
    return Report((*findings, *_unreached(chosen, found, together=not context.answered)))


def _unreached(
    names: Sequence[str], found: Sequence[Sequence[Finding | Unreached]], *, together: bool
) -> Iterator[Finding]:
    """One finding for each service that did not answer, with all the checks that it kept from looking; `together`: one
    for all of them, as none answered."""
    kept: dict[str, list[str]] = {}
    remedy = ""
    for name, some in zip(names, found, strict=True):
        for why in some:
            if isinstance(why, Unreached):
                first = next(iter(kept), str(why)) if together else str(why)
                kept.setdefault(first, []).append(name)
                remedy = why.remedy
    for text, checks in kept.items():
        yield Finding("aws", "warning", f"{', '.join(checks)} could not be checked: {text}", remedy)


def before(chain: Chain, stages: Sequence[Stage], say: Say) -> None:
    """What `launch` and `run` do before they upload anything to AWS: say what is doubtful, refuse what cannot work.

    Raises `JobError` with every fault. The price is not looked at: the command line has asked about it.
    """
    if chain.target.name != "aws":
        return
    report = look(chain, stages, without=["price"])
    for sentence in report.sentences("warning"):
        say(f"warning: {sentence}")
    if not report.ok:
        faults = report.sentences("fault")
        raise JobError("\n".join([*faults, "nothing was started; `--no-check` (check=False) starts it all the same"]))


def _one(context: Context, name: str) -> list[Finding | Unreached]:
    found: list[Finding | Unreached] = []
    try:
        found.extend(CHECKS[name](context))
    except Unreached as why:
        found.append(why)
    except Unread as why:
        found.append(Finding(name, "warning", f"could not be checked: {why}", why.remedy))
    return found
