"""Faults of a config for a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.core.config.checks_data import Fault
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.slurm_options import option_faults

_MARGIN = 120  # seconds: Slurm's signal may come a minute early, and a minute is left to train in


def cluster_faults(config: JobConfig) -> Iterator[Fault]:
    """What cannot run on a cluster; nothing for another target."""
    if config.target != "slurm":
        return
    cluster = config.cluster
    if cluster.shared is None:
        yield (
            {"cluster.shared"},
            "cluster.shared: is missing; name a folder that all nodes see, such as /fsx/smtrain (target slurm)",
        )
    for key, program in (("sbatch", "sbatch"), ("cpu_sbatch", "sbatch"), ("srun", "srun")):
        for fault in option_faults(getattr(cluster, key), program):
            yield {f"cluster.{key}"}, f"cluster.{key}: {fault}"
    limit = cluster.time or config.compute.max_run
    if limit < cluster.save_before + _MARGIN:
        key = "cluster.time" if cluster.time else "compute.max_run"
        yield (
            {key, "cluster.save_before"},
            f"{key}: {limit} s leaves no time to train: cluster.save_before takes {cluster.save_before} s of it, and "
            f"Slurm up to a minute more; at least {cluster.save_before + _MARGIN} s would do",
        )
    model = config.model
    named = {"model.path": model.path, "model.weights": model.weights, "data.prepared": config.data.prepared}
    places = [*named.items(), *(("data.path", source.path) for source in config.data.all_sources)]
    for key, uri in places:
        if uri and uri.startswith(("fsx://", "efs://")):
            yield (
                {key},
                f"{key}: {uri} is how SageMaker names a file system; give the path under which the nodes have mounted "
                "it, such as /fsx/text",
            )
    if config.checkpoint.s3_uri:
        yield (
            {"checkpoint.s3_uri"},
            "checkpoint.s3_uri: on a cluster checkpoints lie below cluster.shared; leave it out",
        )
    for name in ("spot", "keep_alive", "training_plan", "infra_check", "retries"):
        if getattr(config.compute, name):
            yield {f"compute.{name}"}, f"compute.{name}: applies to SageMaker only; leave it out"
    if config.network.isolation or config.network.subnets:
        yield {"network"}, "network: applies to SageMaker only; leave it out"
