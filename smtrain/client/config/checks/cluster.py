"""Rules for target slurm: the needs and limits of a job on a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, no_s3_checkpoints, rule_faults, sagemaker_rules
from smtrain.client.config.checks.uris import uris_of
from smtrain.client.config.slurm_options import option_faults
from smtrain.core.config.schema import JobConfig
from smtrain.core.shell import syntax_error

_MARGIN = 120  # seconds: Slurm's signal may come a minute early, and a minute is left to train in

CLUSTER = (
    Rule(
        "cluster.shared",
        lambda c: c.cluster.shared is None,
        "cluster.shared: is missing; name a folder that all nodes see, such as /fsx/smtrain (target"
        " slurm)",
    ),
    no_s3_checkpoints("a cluster", "cluster.shared"),
    *sagemaker_rules(
        "spot",
        "fallback_regions",
        "keep_alive",
        "training_plan",
        "infra_check",
        "retries",
        "instance_group",
    ),
)


def least_time(config: JobConfig) -> int:
    """The shortest time limit of a job on a cluster, in seconds, that leaves time to train before
    it saves.
    """
    return config.cluster.save_before + _MARGIN


def section_faults(config: JobConfig) -> Iterator[Fault]:
    """Faults of a config for a Slurm cluster."""
    cluster = config.cluster
    yield from rule_faults(CLUSTER, config)
    for key, program in (("sbatch", "sbatch"), ("cpu_sbatch", "sbatch"), ("srun", "srun")):
        for fault in option_faults(getattr(cluster, key), program):
            yield {f"cluster.{key}"}, f"cluster.{key}: {fault}"
    if cluster.setup and (error := syntax_error("\n".join(cluster.setup))):
        yield {"cluster.setup"}, f"cluster.setup: bash cannot read it ({error}); correct the line"
    limit, least_limit = cluster.time or config.compute.max_run, least_time(config)
    if limit < least_limit:
        key = "cluster.time" if cluster.time else "compute.max_run"
        yield (
            {key, "cluster.save_before"},
            (
                f"{key}: {limit} s leaves no time to train: cluster.save_before takes"
                f" {cluster.save_before} s of it, and Slurm up to a minute more; at least"
                f" {least_limit} s would do"
            ),
        )
    for key, uri in uris_of(config):
        if uri.startswith(("fsx://", "efs://")):
            yield (
                {key},
                (
                    f"{key}: {uri} is how SageMaker names a file system; give the path under which"
                    " the nodes have mounted it, such as /fsx/text"
                ),
            )
