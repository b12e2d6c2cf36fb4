"""Instance types that CreateTrainingJob takes, as the installed boto3 knows them: new ones come with its releases."""

from __future__ import annotations

from functools import cache

from smtrain.core.botocore_models import described
from smtrain.core.config import JobConfig
from smtrain.core.facts import instance
from smtrain.core.near import nearest


def type_faults(config: JobConfig) -> list[str]:
    """A sentence for every type of a config that there is not."""
    compute = config.compute
    named = [("instance_type", compute.instance_type), ("cpu_instance_type", compute.cpu_instance_type)]
    named += [("fallback_instance_types", kind) for kind in compute.fallback_instance_types]
    default = type(compute).model_fields["cpu_instance_type"].default  # not looked for: that costs 0.3 s
    known = (default, *config.machines)
    doubtful = [(key, kind) for key, kind in named if instance(kind) is None and kind not in known]
    return [
        f"compute.{key}: {kind} is no training instance type that boto3 knows; did you mean "
        f"{nearest(kind, sorted(_known()), cutoff=0.0)}? (if it is new, update boto3)"
        for key, kind in doubtful
        if kind not in _known()
    ]


@cache
def _known() -> frozenset[str]:
    return frozenset(described("sagemaker").shape_for("TrainingInstanceType").enum)
