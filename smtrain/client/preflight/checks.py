"""The checks of a config in one pass, in parallel; and those of `launch` and `run`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import backend_of, module_of
from smtrain.client.config.load import Source, is_yaml_text
from smtrain.client.findings import Finding, Report
from smtrain.client.iam.statements import OtherCommands
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.client.planner.this_machine import uses_this_machine
from smtrain.client.preflight import (
    cost,
    dataset,
    disk,
    image,
    limits,
    quotas,
    resume,
    role,
    services,
    stages,
    storage,
    this_machine,
)
from smtrain.client.preflight.context import (
    Check,
    CheckUnavailable,
    Context,
    PlanUnavailable,
    ServiceUnreachable,
)
from smtrain.core.config import JobConfig, Stage
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.model.hf_folder import folder_of
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.stages import stages_of

NOBODY = "arn:aws:iam::000000000000:role/none"
# Stand-ins for settings that are missing or wrong, and the checks that cannot be made with them.
_STAND_INS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compute.role": (NOBODY, ("role", "permissions", "caller")),
    "compute.region": ("us-east-1", ("quotas", "image", "price", "tracker")),
    "compute.image": ("000000000000.dkr.ecr.us-east-1.amazonaws.com/none:none", ("image",)),
    "output.s3_uri": ("s3://smtrain-check-nowhere/smtrain", ("buckets", "resume", "permissions")),
}
# In the order of display.
CHECKS: dict[str, Check] = {
    function.__name__: function
    for function in (
        limits.limits,
        role.role,
        role.permissions,
        role.caller,
        storage.buckets,
        services.token,
        services.tracker,
        quotas.quotas,
        quotas.hosts,
        this_machine.machine,
        image.image,
        dataset.model,
        dataset.data,
        dataset.text,
        dataset.tasks,
        storage.inputs,
        disk.disk,
        stages.stages,
        resume.resume,
        cost.memory,
        cost.time,
        cost.stop,
        cost.spot,
        cost.price,
    )
}
_OF_ACCOUNTS = ("role", "permissions", "caller", "buckets", "quotas")
"""Checks that do not concern a run on this machine."""
ON_CLUSTERS = ("text", "tasks", "memory")
"""Checks that also apply to a backend with a queue, whose folder has its other checks."""
NO_EXTRA_CHECKS: Mapping[str, Check] = {}


def _model_folder(source: object) -> Path | None:
    """The folder that a source names, instead of a config."""
    if not isinstance(source, str | Path) or is_yaml_text(source):
        return None
    folder = Path(folder_of(str(source)))
    return folder if folder.is_dir() else None


def report_on(
    source: Source | None,
    sections: Mapping[str, Any],
    *,
    stage: Stage | None,
    other_commands: OtherCommands,
    target: TargetName | None,
    set_: Sequence[str],
    extra_checks: Mapping[str, Check],
) -> Report:
    """The report of `smtrain.check`; `extra_checks` has the checks that the client cannot make
    itself.
    """
    if folder := _model_folder(source):
        return Report(tuple(dataset.model_folder(folder)))
    packages: tuple[Finding, ...] = ()
    try:
        config = load_config(source, set_=set_, target=target, **sections)
    except ConfigError as error:
        if not isinstance(error.config, JobConfig):
            return Report(_of_config(error))
        config, packages = error.config, _of_config(error)
    try:
        place = backend_of(config, target)
    except ConfigError as error:
        return Report((*packages, *_of_config(error)))
    stages = [stage] if stage else stages_of(config, place.name)
    if place.record.queues:
        return _of_queue(config, place, stages, extra_checks)
    report = _run_all(config, place.name, stages, other_commands, extra_checks)
    return (
        Report((*packages, *(finding for finding in report.findings if finding.check != "config")))
        if packages
        else report
    )


def _run_all(
    config: JobConfig,
    target: TargetName,
    stages: Sequence[Stage],
    other_commands: OtherCommands,
    extra_checks: Mapping[str, Check],
) -> Report:
    """Make all checks; if a required setting is missing, report it and use a stand-in."""
    findings: list[Finding] = []
    skipped_checks: set[str] = set()
    while True:
        try:
            report = run_checks(
                Chain(config, backend_of(config, target)),
                stages,
                sorted(skipped_checks),
                other_commands,
                extra_checks,
            )
            break
        except ConfigError as error:
            new, missing_key = _of_config(error), _missing_key(error.faults, config)
        except JobError as error:
            if config.output.s3_uri:  # else AWS was asked for its account, to find a bucket
                raise
            new, missing_key = (Finding("aws", "warning", str(error)),), "output.s3_uri"
        findings += new
        if missing_key is None:
            return Report(tuple(findings))
        stand_in, dependent_checks = _STAND_INS[missing_key]
        section, _, field = missing_key.partition(".")
        config = config.model_copy(
            update={section: getattr(config, section).model_copy(update={field: stand_in})}
        )
        skipped_checks |= set(dependent_checks)
    return Report(
        (*findings, *(finding for finding in report if not findings or finding.check != "config"))
    )


def _of_queue(
    config: JobConfig, place: Backend, stages: Sequence[Stage], extra_checks: Mapping[str, Check]
) -> Report:
    try:
        chain = Chain(config, place, look=False)
    except ConfigError as error:
        return Report(_of_config(error))
    context = Context(chain, stages)
    # A machine that the planner does not know has no plan, so there is nothing to report about
    # nodes of one's own.
    checks = {**{name: CHECKS[name] for name in ON_CLUSTERS}, **extra_checks}
    findings = _findings(context, checks)
    nodes = _check_queue(chain, stages, probe="train" in stages)
    return Report((Finding("config", "ok", "the config is valid"), *nodes, *findings))


def _check_queue(
    chain: Chain, stages: Sequence[Stage], *, probe: bool = False
) -> Iterator[Finding]:
    """The checks of a backend with a queue; `probe`: also ask its machines."""
    uploaded_uris = {upload.uri for upload in chain.resolved.uploads}
    checks = module_of(chain.target.record, "checks")
    findings: Iterator[Finding] = checks.run_checks(
        chain.target, chain.config, stages, uploaded_uris, probe=probe
    )
    return findings


def _missing_key(faults: Sequence[str], config: JobConfig) -> str | None:
    """The key whose fault is the only one, if a stand-in helps; else None."""
    if len(faults) != 1:
        return None
    # A region is set, but its registry is not known: the missing setting is the image.
    key = "compute.image" if "registry is known" in faults[0] else faults[0].partition(":")[0]
    section, _, field = key.partition(".")
    if key not in _STAND_INS or getattr(getattr(config, section), field) == _STAND_INS[key][0]:
        return None
    return key


def _of_config(error: ConfigError) -> tuple[Finding, ...]:
    return tuple(Finding("config", "fault", fault) for fault in error.faults)


def run_checks(
    chain: Chain,
    stages: Sequence[Stage],
    left_out: Sequence[str] = (),
    other_commands: OtherCommands | None = None,
    extra_checks: Mapping[str, Check] = NO_EXTRA_CHECKS,
) -> Report:
    """All checks of these stages, those of the client and `extra_checks`, except those in
    `left_out`.
    """
    # Imported before the threads start: botocore's circular imports can deadlock them (importlib's
    # _DeadlockError).
    import boto3  # noqa: F401

    context = Context(chain, stages, other_commands or OtherCommands())
    context.requests, context.plan  # noqa: B018 - computed before the threads share them
    skipped_checks = {*left_out, *(_OF_ACCOUNTS if uses_this_machine(chain.given) else ())}
    checks = {
        name: check
        for name, check in {**CHECKS, **extra_checks}.items()
        if name not in skipped_checks
    }
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        results = list(pool.map(lambda name: _run_check(context, name, checks[name]), checks))
    findings = [Finding("config", "ok", "the config is valid")]
    for results_of_check in results:
        findings += [finding for finding in results_of_check if isinstance(finding, Finding)]
    return Report(
        (*findings, *_unreached_findings([*checks], results, merge_services=not context.answered))
    )


def _unreached_findings(
    names: Sequence[str],
    results: Sequence[Sequence[Finding | CheckUnavailable]],
    *,
    merge_services: bool,
) -> Iterator[Finding]:
    """One finding for each service that did not answer, with all the checks that need it, or
    (`merge_services`) one for all services, if none answered. The same for a missing plan.
    """
    checks_by_reason: dict[tuple[str, str, str], list[str]] = {}
    for name, check_results in zip(names, results, strict=True):
        for reason in check_results:
            if isinstance(reason, ServiceUnreachable):
                key = ("aws", str(reason), reason.remedy)
                first = (
                    next(
                        (
                            earlier_key
                            for earlier_key in checks_by_reason
                            if earlier_key[0] == key[0]
                        ),
                        key,
                    )
                    if merge_services
                    else key
                )
                checks_by_reason.setdefault(first, []).append(name)
            elif isinstance(reason, PlanUnavailable):
                checks_by_reason.setdefault(("plan", str(reason), reason.remedy), []).append(name)
    for (service, text, remedy), checks in checks_by_reason.items():
        yield Finding(
            service, "warning", f"{', '.join(checks)} could not be checked: {text}", remedy
        )


def require_launchable(
    chain: Chain,
    stages: Sequence[Stage],
    say: Say,
    extra_checks: Mapping[str, Check] = NO_EXTRA_CHECKS,
) -> None:
    """Check a run before `launch` and `run` upload anything: show warnings, and raise `JobError`
    with all faults.

    `extra_checks` has the checks that the client cannot make itself.

    Without a rented machine the checks are those of this machine and its image, or of the cluster,
    and those that read the data. The price is left out, as the command line has already asked
    about it.
    """
    if chain.target.record.rented:
        report = run_checks(chain, stages, left_out=["price"], extra_checks=extra_checks)
    else:
        context = Context(chain, stages)
        machines = (
            _check_queue(chain, stages)
            if chain.target.record.queues
            else (*this_machine.machine(context), *image.image(context))
        )
        report = Report((*machines, *_findings(context, extra_checks)))
    for sentence in report.sentences("warning"):
        say(f"warning: {sentence}")
    if not report.ok:
        faults = report.sentences("fault")
        raise JobError(
            "\n".join(
                [*faults, "nothing was started; `--no-check` (check=False) starts it all the same"]
            )
        )


def _findings(context: Context, checks: Mapping[str, Check]) -> list[Finding]:
    """The findings of these checks, one check after the other."""
    return [
        finding
        for name, check in checks.items()
        for finding in _run_check(context, name, check)
        if isinstance(finding, Finding)
    ]


def _run_check(context: Context, name: str, check: Check) -> list[Finding | CheckUnavailable]:
    results: list[Finding | CheckUnavailable] = []
    try:
        results.extend(check(context))
    except (ServiceUnreachable, PlanUnavailable) as why:
        results.append(why)
    except CheckUnavailable as why:
        results.append(Finding(name, "warning", f"could not be checked: {why}", why.remedy))
    return results
