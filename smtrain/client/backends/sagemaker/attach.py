"""Find the target of a job name: the argument, $SMTRAIN_TARGET, the region of an ARN, this machine, else AWS."""

from __future__ import annotations

import os
import re

from smtrain.client.backends.sagemaker.target import Target
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.extras import install, present
from smtrain.core.facts import table
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.near import hint
from smtrain.core.protocol.requests import is_of_run

_ARN = re.compile(r"arn:aws[\w-]*:sagemaker:([\w-]+):(\d{12}):training-job/([\w-]+)")


def place_of(name: str, target: TargetName | None = None) -> tuple[str, Target]:
    """(job name, target) of a name or an ARN, without a network call.

    If nothing names a target, a job is local if this machine's control plane has a job or a run of this name, or if
    there are no AWS credentials and a control plane is installed.
    """
    region = None
    if arn := _ARN.fullmatch(name):
        region, account, name = arn.groups()
        target = target or ("local" if account == _local_account() else "aws")
    word = target or os.environ.get("SMTRAIN_TARGET")
    if word not in (None, "", "local", "aws"):
        raise ConfigError(
            [f"SMTRAIN_TARGET is {word!r}; {hint(word, ('local', 'aws'), table('word_names')['values'])}"]
        )
    if not word:
        word = "local" if _kept_here(name) or (present("moto") and not _has_credentials()) else "aws"
        if word == "aws" and region is None and "/" not in name and not present("moto"):
            _refuse_unknown(name)
    return name, Target("local") if word == "local" else Target("aws", region)


def _refuse_unknown(name: str) -> None:
    """Raise `JobError` for a name that is unknown here if neither this machine nor AWS can be asked for jobs."""
    try:
        if _has_credentials():
            Target("aws").region_name()
            return
    except ConfigError:
        pass
    unknown = f"{name}: no run or job of this name is known on this machine; " if name else ""
    raise JobError(
        f"{unknown}jobs here need smtrain's extra local "
        f"(`{install('local', 'moto')}`), and jobs on AWS need credentials and a region (`aws configure`, or "
        "AWS_PROFILE and AWS_REGION)"
    )


def _local_account() -> str:
    from smtrain.plane.client import ACCOUNT

    return ACCOUNT


def _kept_here(name: str) -> bool:
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
