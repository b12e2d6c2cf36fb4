"""Faults of names that AWS gives a shape to: buckets, roles, instance types. Nobody is asked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from smtrain.config.checks_data import Fault
from smtrain.config.schema import JobConfig
from smtrain.facts import instance

_BUCKET = re.compile(r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--)[a-z0-9](?!.*\.\.)[a-z0-9.-]{1,61}[a-z0-9]")
"""General purpose buckets: Amazon S3 User Guide, "Bucket naming rules"."""
_ROLE = re.compile(r"arn:aws[\w-]*:iam::\d{12}:role/[\w+=,.@/-]{1,512}|[\w+=,.@-]{1,64}")


def place_faults(config: JobConfig) -> Iterator[Fault]:
    """What cannot be the name of such a thing."""
    uris = {
        "model.path": config.model.path,
        "data.prepared": config.data.prepared,
        "checkpoint.s3_uri": config.checkpoint.s3_uri,
        "output.s3_uri": config.output.s3_uri,
    }
    places = [*uris.items(), *(("data.path", source.path) for source in config.data.all_sources)]
    for key, uri in places:
        if uri and uri.startswith("s3://") and not _BUCKET.fullmatch(bucket := uri[5:].partition("/")[0]):
            yield (
                {key},
                f"{key}: {bucket!r} cannot be the name of a bucket; that is 3 to 63 lower-case letters, digits, "
                "hyphens and dots",
            )
    if config.compute.role is not None and not _ROLE.fullmatch(config.compute.role):
        yield (
            {"compute.role"},
            f"compute.role: {config.compute.role!r} is neither a role's ARN (arn:aws:iam::123456789012:role/NAME) nor "
            "its name",
        )
    for key in {"instance_type", "cpu_instance_type"} & config.compute.model_fields_set:  # a default is one
        yield from _type_faults(f"compute.{key}", getattr(config.compute, key))
    for kind in config.compute.fallback_instance_types:
        yield from _type_faults("compute.fallback_instance_types", kind)


def _type_faults(key: str, kind: str) -> Iterator[Fault]:
    if instance(kind) is not None or (known := _training_types()) is None or kind in known:
        return
    near = difflib.get_close_matches(kind, known, n=1, cutoff=0.0)[0]
    yield (
        {key},
        f"{key}: {kind} is no training instance type that boto3 knows; did you mean {near}? (update boto3 if new)",
    )


@cache
def _training_types() -> frozenset[str] | None:
    """Every type that CreateTrainingJob takes, as botocore's model of the API lists them; None without botocore."""
    try:
        import botocore.session
    except ImportError:
        return None
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape: Any = model.shape_for("TrainingInstanceType")  # the stubs know no enumerations
    return frozenset(shape.enum)
