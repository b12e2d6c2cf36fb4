"""Faults of names that AWS gives a shape to: buckets and roles. Nobody is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from smtrain.core.config.checks_data import Fault
from smtrain.core.config.schema import JobConfig
from smtrain.core.facts.filesystems import data_source, is_mounted

_BUCKET = re.compile(r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--)[a-z0-9](?!.*\.\.)[a-z0-9.-]{1,61}[a-z0-9]")
"""General purpose buckets: Amazon S3 User Guide, "Bucket naming rules"."""
_ROLE = re.compile(r"arn:aws[\w-]*:iam::\d{12}:role/[\w+=,.@/-]{1,512}|[\w+=,.@-]{1,64}")


def place_faults(config: JobConfig) -> Iterator[Fault]:
    """What cannot be the name of such a thing."""
    uris = {
        "model.path": config.model.path,
        "model.weights": config.model.weights,
        "data.prepared": config.data.prepared,
        "checkpoint.s3_uri": config.checkpoint.s3_uri,
        "output.s3_uri": config.output.s3_uri,
    }
    places = [*uris.items(), *(("data.path", source.path) for source in config.data.all_sources)]
    for key, uri in places:
        if uri and uri.startswith("s3://") and not _BUCKET.fullmatch(bucket := uri[5:].partition("/")[0]):
            yield (
                {key},
                f"{key}: {bucket!r} cannot be a bucket's name, which has 3 to 63 lower-case letters, digits, "
                "hyphens and dots",
            )
    for key, uri in places:
        if uri and is_mounted(uri) and (key == "model.path" or data_source(uri) is None):
            what = (
                "cannot lie on a file system"
                if key == "model.path"
                else "must look like fsx://fs-0123456789abcdef0/folder"
            )
            yield {key}, f"{key}: {uri} {what}" + ("; give a folder or an s3:// URI" if key == "model.path" else "")
    for tag in config.tags:
        if tag.lower().startswith("aws:"):
            yield {f"tags.{tag}"}, f"tags.{tag}: keys that begin with aws: are AWS's own; give it another name"
    compute = config.compute
    if fault := _machine_fault(config):
        yield {"compute.instance_type", "target"}, f"compute.instance_type: {fault}"
    if compute.training_plan:
        for name in ("spot", "fallback_instance_types"):
            if getattr(compute, name):
                yield (
                    {"compute.training_plan", f"compute.{name}"},
                    f"compute.{name}: cannot go with compute.training_plan, whose machines are reserved; leave one out",
                )
    if config.compute.role is not None and not _ROLE.fullmatch(config.compute.role):
        yield (
            {"compute.role"},
            f"compute.role: {config.compute.role!r} is neither a role's ARN (arn:aws:iam::123456789012:role/NAME) nor "
            "its name",
        )


def _machine_fault(config: JobConfig) -> str | None:
    """Why a machine that is none of SageMaker's cannot be the one that trains."""
    name = config.compute.instance_type
    if name.startswith("ml."):
        return None
    if config.own_machine is None:
        return f"{name} is no instance type; take one, such as ml.p5.48xlarge, or describe {name} under machines"
    if config.target == "slurm":
        return None
    where = "AWS has none of that name" if config.target == "aws" else "this machine runs jobs of any instance type"
    return (
        f"{name} is a machine of yours, and {where}; name an instance type, and plan with `smtrain plan CONFIG "
        f"--machines {name}:1`"
    )
