"""Choose the backend of a call: from a config and its target, or from a job name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast, get_args

from smtrain.client.backends.base import Backend, JobQueue
from smtrain.client.backends.job_registry import JobRegistry
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.config import JobConfig
from smtrain.core.config.section import Section
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import install, present
from smtrain.core.facts import table
from smtrain.core.files import read_object
from smtrain.core.protocol.requests import is_of_run
from smtrain.core.suggest import hint
from smtrain.core.targets import TARGETS, TargetName, TargetRecord


def module_of(record: TargetRecord, name: str) -> Any:
    """Import a module from the folder of a target's backend; lazily, as few users have every
    backend.
    """
    return import_module(f"{__package__}.{record.folder}.{name}")


def registry_of(record: TargetRecord) -> JobRegistry[Any]:
    """The jobs that were submitted from here to a target with a section."""
    registry: JobRegistry[Any] = module_of(record, "registry").REGISTRY
    return registry


def registries() -> Iterator[tuple[TargetRecord, JobRegistry[Any]]]:
    """The registry of each target that has one."""
    return ((record, registry_of(record)) for record in TARGETS.values() if record.section)


def _backend(record: TargetRecord, section: Section) -> Backend:
    backend: Backend = module_of(record, "backend").BACKEND(section)
    return backend


def backend_of(config: JobConfig, name: TargetName | None = None) -> Backend:
    """The backend of a call: its own target, else the config's."""
    record = TARGETS[name or config.target]
    if record.section is None:
        return SageMakerBackend(record.name, config.compute.region)
    return _backend(record, getattr(config, record.section))


def backend_by_name(name: TargetName) -> Backend:
    """The backend of a target's name, without a config; if the target has a section, the one used
    last.
    """
    record = TARGETS[name]
    return (
        SageMakerBackend(name)
        if record.section is None
        else _backend(record, registry_of(record).section_of())
    )


def backend_of_job(job: str, name: TargetName | None = None) -> tuple[str, Backend]:
    """(job name, backend) of a name or an ARN: the argument, $SMTRAIN_TARGET, the backend that it
    was submitted to from here, else as `sagemaker_backend_of_job`.
    """
    word = name or os.environ.get("SMTRAIN_TARGET") or None
    if word is not None and word not in get_args(TargetName):
        raise ConfigError(
            f"{f'target: got {word!r}' if name else f'SMTRAIN_TARGET is {word!r}'};"
            f" {hint(word, get_args(TargetName), table('word_names')['values'])}",
            code="config.wrong_value",
        )
    for record, registry in registries():
        if word == record.name or (word is None and registry.knows(job)):
            return job, _backend(record, registry.section_of(job))
    return sagemaker_backend_of_job(job, name)


def sagemaker(backend: Backend) -> SageMakerBackend:
    """The backend, if it has the SageMaker API. Raises `ConfigError` for any other."""
    if not isinstance(backend, SageMakerBackend):
        raise ConfigError(
            f"target: {backend.name} has no SageMaker API, which this command needs; give `--target"
            " aws`",
            code="config.combination",
        )
    return backend


def queue(backend: Backend) -> JobQueue:
    """The backend as a queue of jobs; callers check `queues` first."""
    return cast("JobQueue", backend)


_ARN = re.compile(r"arn:aws[\w-]*:sagemaker:([\w-]+):(\d{12}):training-job/([\w-]+)")


def sagemaker_backend_of_job(
    name: str, target: TargetName | None = None
) -> tuple[str, SageMakerBackend]:
    """(job name, target) on SageMaker of a name or an ARN, without a network call: the argument,
    $SMTRAIN_TARGET, the region of the ARN, this machine, else AWS.

    If nothing names a target, a job is local if this machine's control plane has a job or a run of
    this name, or if there are no AWS credentials and a control plane is installed.
    """
    region = None
    if arn := _ARN.fullmatch(name):
        region, account, name = arn.groups()
        target = target or ("local" if account == _local_account() else "aws")
    word = target or os.environ.get("SMTRAIN_TARGET")
    names = [record.name for record in TARGETS.values() if record.sagemaker]
    if word and word not in names:
        raise ConfigError(
            f"{f'target: got {word!r}' if target else f'SMTRAIN_TARGET is {word!r}'};"
            f" endpoints are SageMaker's; {hint(word, names, table('word_names')['values'])}",
            code="config.wrong_value",
        )
    is_local = (
        TARGETS[word].here
        if word
        else kept_here(name) or (present("moto") and not _has_credentials())
    )
    if not word and not is_local and region is None and "/" not in name and not present("moto"):
        _refuse_unknown(name)
    return name, _local_backend(name) if is_local else SageMakerBackend("aws", region)


def _local_backend(job: str) -> SageMakerBackend:
    """The local control plane in the region of a job, if it runs in a fallback region."""
    from smtrain.plane.client import REGION, home_folder, state_folder

    try:
        record = read_object(state_folder(home_folder()) / "jobs" / job / "job.json")
        region = str(record["arn"]).split(":")[3]
    except (OSError, ValueError, KeyError, IndexError):
        return SageMakerBackend("local")
    return (
        SageMakerBackend("local", region, is_fallback=True)
        if region != REGION
        else SageMakerBackend("local")
    )


def _refuse_unknown(name: str) -> None:
    """Raise `JobError` for a name unknown here if this machine and AWS cannot be asked for jobs."""
    try:
        if _has_credentials():
            SageMakerBackend("aws").region_name()
            return
    except ConfigError:
        pass
    subject = f"{name}: no run or job of this name is known on this machine; " if name else ""
    raise JobError(
        f"{subject}jobs here need smtrain's extra local (`{install('local', 'moto')}`), and jobs on"
        " AWS need credentials and a region (`aws configure`, or AWS_PROFILE and AWS_REGION)"
    )


def _local_account() -> str:
    from smtrain.plane.client import ACCOUNT

    return ACCOUNT


def is_run_here(name: str) -> bool:
    """Whether this machine's control plane has a run of this name, and no job."""
    from smtrain.plane.client import home_folder, state_folder

    return kept_here(name) and not (state_folder(home_folder()) / "jobs" / name).is_dir()


def kept_here(name: str) -> bool:
    """Whether this machine's control plane has a job or a run of this name, without asking it."""
    from smtrain.plane.client import home_folder, state_folder

    jobs = state_folder(home_folder()) / "jobs"
    if not name or "/" in name or not jobs.is_dir():
        return False
    return (jobs / name).is_dir() or any(is_of_run(folder.name, name) for folder in jobs.iterdir())


def _has_credentials() -> bool:
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.Session().get_credentials() is not None
    except BotoCoreError:
        return False
