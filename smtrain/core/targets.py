"""Targets of runs: one record each, with the facts that callers ask instead of comparing names.

A new target is a record here, a section of the config, a folder of `smtrain.client.backends` and
its checks (CONTRIBUTING.md, "A target").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TargetName = Literal["local", "aws", "slurm", "pai-dlc", "kubernetes"]
"""The control plane of this machine, AWS, a Slurm cluster, Alibaba Cloud PAI-DLC, a
Kubernetes cluster.
"""


GRACE = 120
"""Seconds between SIGTERM and SIGKILL of a stopped job (API_StopTrainingJob)."""


@dataclass(frozen=True)
class TargetRecord:
    """The facts of a target."""

    name: TargetName
    title: str
    """Its machines, as the subject of a sentence or a cell of a table."""
    place: str
    """The adverb of place: `there is no such run on AWS`."""
    service: str
    """The service whose reasons explain why a job failed."""
    folder: str = "sagemaker"
    """The folder of `client/backends` with its backend."""
    section: str | None = None
    """The section of the config that describes it."""
    arn: str | None = None
    """The beginning of the ARNs that smtrain gives its jobs; None if SageMaker's API gives them."""
    store: Literal["s3://", "oss://"] = "s3://"
    """The scheme of its object store."""
    file_systems: tuple[str, ...] = ()
    """Schemes of file systems that its jobs can mount."""
    paths: bool = False
    """Jobs read absolute paths of their machines, which the config writes as file:// URIs."""
    rented: bool = False
    """AWS rents the machines: its instance types, images, roles, quotas and bills are what counts.
    """
    here: bool = False
    """Jobs run on the machine of the user, which costs nothing and takes the place of any instance
    type.
    """
    queues: bool = False
    """The backend keeps a job until it has machines."""
    chains: bool = False
    """The backend takes a whole chain, and starts each stage after the previous one succeeds."""
    repeats: bool = False
    """The cluster ends a job at a time limit, and it is submitted again, so a run is several
    attempts.
    """
    own_machines: bool = False
    """The machines belong to the user or the organisation of the user: they have any type, and need
    no price.
    """
    described: bool = False
    """Its machines have no types: an entry of `machines` must describe them."""
    pod_roles: bool = False
    """Its jobs are pods that take a role of AWS by their service account."""
    images: bool = False
    """Every job runs in `compute.image`."""
    log: str | None = None
    """The name of the backend's own log, next to those of the hosts."""
    secrets: str = (
        "keep it in Secrets Manager and let the job read it with its role (model.token is for a"
        " Hugging Face one)"
    )
    """The remedy for a secret in the clear."""
    unpriced: str = ""
    """The adverb for a cost without a known price."""

    @property
    def sagemaker(self) -> bool:
        """Whether SageMaker's API is used: AWS, and the control plane of this machine.

        Its prices are shipped.
        """
        return self.arn is None


TARGETS: dict[str, TargetRecord] = {
    record.name: record
    for record in (
        TargetRecord(
            "local",
            "this machine",
            "on this machine",
            "SageMaker",
            file_systems=("fsx://", "efs://"),
            here=True,
        ),
        TargetRecord(
            "aws",
            "AWS",
            "on AWS",
            "SageMaker",
            file_systems=("fsx://", "efs://"),
            rented=True,
            images=True,
        ),
        TargetRecord(
            "slurm",
            "a Slurm cluster",
            "on the cluster",
            "Slurm",
            folder="slurm",
            section="cluster",
            arn="slurm:",
            file_systems=("fsx://", "efs://"),
            paths=True,
            queues=True,
            chains=True,
            repeats=True,
            own_machines=True,
            log="slurm-out",
            unpriced="on a cluster of your own",
        ),
        TargetRecord(
            "pai-dlc",
            "Alibaba Cloud PAI-DLC",
            "on PAI-DLC",
            "PAI-DLC",
            folder="pai",
            section="pai",
            arn="pai-dlc:",
            store="oss://",
            paths=True,
            queues=True,
            described=True,
            images=True,
            secrets="keep it in a file of the image or of a mount that other users cannot read",
            unpriced="on PAI-DLC, whose prices are not known here",
        ),
        TargetRecord(
            "kubernetes",
            "a Kubernetes cluster",
            "on Kubernetes",
            "Kubernetes",
            folder="kubernetes",
            section="kubernetes",
            arn="kubernetes:",
            paths=True,
            queues=True,
            own_machines=True,
            images=True,
            pod_roles=True,
            secrets="keep it in a Secret of the cluster, and name that in kubernetes.env_secret",
            unpriced="on a Kubernetes cluster",
        ),
    )
}


def target_of_arn(arn: str) -> TargetRecord | None:
    """Return the target whose jobs get such ARNs from smtrain; None for SageMaker's own."""
    return next(
        (record for record in TARGETS.values() if record.arn and arn.startswith(record.arn)), None
    )
