"""The section `kubernetes`: a namespace of a Kubernetes cluster, such as EKS or HyperPod on EKS
(target kubernetes).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from smtrain.core.config.section import Section
from smtrain.core.config.units import Seconds

_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
"""A name that the cluster takes: RFC 1123, "label"."""
_SUBDOMAIN = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
_FOLDER = r"^/[^\s'\"\\$`%:]*[^\s'\"\\$`%/:]$"
_QUANTITY = r"^[1-9][0-9]*(Gi|Mi)$"


class KubernetesVolume(Section):
    """A volume that every pod mounts."""

    claim: str = Field(pattern=_SUBDOMAIN)
    """Name of a PersistentVolumeClaim in the namespace, such as one of FSx for Lustre or EFS."""
    path: str = Field(pattern=_FOLDER)
    """The path in the pods."""
    write: bool = False
    """Mount it for writing too."""


class KubernetesToleration(Section):
    """A taint of nodes that the pods tolerate."""

    key: str | None = Field(None, min_length=1)
    """Key of the taint; default: all keys."""
    value: str | None = None
    """Value of the taint; default: all values."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; default: all effects."""


class Kubernetes(Section):
    """A namespace of a Kubernetes cluster, and the options of its pods."""

    context: str | None = Field(None, min_length=1)
    """Context of your kubeconfig; default: the current one, or the pod that smtrain runs in."""
    namespace: str = Field("default", pattern=_LABEL)
    """Namespace of the jobs."""
    storage: str | None = Field(None, pattern=r"^s3://[^/\s'\"\\$`%?*]+(/[^\s'\"\\$`%?*]*)?$")
    """The place of code, inputs, checkpoints and results, such as s3://my-bucket/smtrain; you and
    the pods read and write it.
    """
    kind: Literal["job", "jobset", "trainjob", "hyperpod"] = "job"
    """The object that a stage becomes: an indexed Job, which every cluster has; a JobSet, which
    starts all pods again if one fails and needs the JobSet controller; a TrainJob of Kubeflow
    Trainer; or a HyperPodPyTorchJob of HyperPod's training operator, whose image needs
    hyperpod-elastic-agent.
    """
    queue: str | None = Field(None, pattern=_LABEL)
    """Kueue's LocalQueue; default: none."""
    service_account: str | None = Field(None, pattern=_SUBDOMAIN)
    """Service account of the pods, whose role may read and write `storage`; default: the
    namespace's.
    """
    data: tuple[KubernetesVolume, ...] = ()
    """Volumes to mount; a path of the config below one of them is read in place."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Resources of each pod of the stages compile and train, by the names of the cluster, such as
    {nvidia.com/gpu: 8, vpc.amazonaws.com/efa: 32}. Default: all devices of compute.instance_type,
    for a type of AWS.
    """
    cpu_resources: dict[str, str] = Field(default_factory=dict)
    """Resources of the pod of any other stage, such as {cpu: 16, memory: 64Gi}; default: no request.
    """
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes of the stages compile and train must have."""
    cpu_node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that nodes of any other stage must have."""
    tolerations: tuple[KubernetesToleration, ...] = ()
    """Taints that the pods tolerate."""
    priority_class: str | None = Field(None, pattern=_SUBDOMAIN)
    """PriorityClass of the pods."""
    shared_memory: str | None = Field(None, pattern=_QUANTITY)
    """Size of /dev/shm, such as 64Gi; default: the runtime's 64 MiB, which is small for NCCL."""
    image_pull_secret: str | None = Field(None, pattern=_SUBDOMAIN)
    """Secret with the login to the image's registry."""
    env_secret: str | None = Field(None, pattern=_SUBDOMAIN)
    """Secret whose keys become variables of the pods, such as keys of an object store."""
    restarts: int = Field(3, ge=0, le=100)
    """Number of failures of a pod after which the job fails. Pods that the cluster takes away do
    not count.
    """
    grace: Seconds = Field(120, ge=10, le=86400)
    """Time to save before a pod is killed."""

    @property
    def base(self) -> str:
        """`storage` without a slash at the end."""
        return (self.storage or "").rstrip("/")
