"""The section `pai`: an Alibaba Cloud PAI-DLC job (target pai-dlc)."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, StringConstraints

from smtrain.core.config.section import Section
from smtrain.core.config.units import Seconds
from smtrain.core.protocol.uris import OSS

_WORD = r"^[^\s'\"]+$"
_FOLDER = r"^/[^\s'\"\\$`%]*[^\s'\"\\$`%/]$"
_QUANTITY = r"^[1-9][0-9]*(Gi|Mi)$"
INPUTS = "/mnt/oss"
"""The pods' folder for input buckets that have no mount: each under its name, for
reading.
"""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""A bucket of OSS: 3 to 63 lower-case letters, digits and hyphens (Object Storage Service, "Bucket
naming").
"""


def is_bucket(name: str) -> bool:
    """Whether OSS can have a bucket of this name."""
    return bool(_BUCKET.fullmatch(name))


class PaiResources(Section):
    """Resources of a pod in the quota `pai.quota`."""

    cpu: int = Field(ge=1, le=4096)
    """Processor cores."""
    memory: str = Field(pattern=_QUANTITY)
    """Memory, such as 512Gi."""
    gpu: int | None = Field(None, ge=0, le=64)
    """GPUs; default: one for each training process, none for the stages that need no accelerator.
    """
    gpu_type: str | None = Field(None, pattern=_WORD)
    """Type of the GPUs, if the quota has several."""
    shared_memory: str | None = Field(None, pattern=_QUANTITY)
    """Size of /dev/shm, such as 64Gi; default: PAI-DLC's, which is small for NCCL."""


class PaiMount(Section):
    """A data set or a file system that every pod mounts."""

    uri: str | None = Field(None, pattern=r"^(oss|nas|cpfs|bmcpfs)://[^\s'\"]+$")
    """The place to mount, such as nas://ID.cn-beijing.nas.aliyuncs.com/text, cpfs://... or
    oss://bucket/text.
    """
    dataset: str | None = Field(None, pattern=_WORD)
    """ID of a data set of PAI, instead of uri."""
    path: str = Field(pattern=_FOLDER)
    """The path in the pods."""
    write: bool = False
    """Mount it for writing too."""
    cache: bool = False
    """Read it through PAI's cache."""
    options: str | None = None
    """Options of the mount as JSON, which PAI documents for OSS."""


class PaiCode(Section):
    """A code source of PAI that every pod gets, for `pai.command`."""

    source: str = Field(pattern=_WORD)
    """ID of the code source."""
    branch: str | None = Field(None, pattern=_WORD)
    """Branch; default: the code source's."""
    commit: str | None = Field(None, pattern=_WORD)
    """Commit; default: the newest of the branch."""
    path: str | None = Field(None, pattern=_FOLDER)
    """The path in the pods; default: the code source's."""


class PaiVpc(Section):
    """The network of yours that the pods are attached to, which mounts of NAS and CPFS need."""

    id: str = Field(pattern=r"^vpc-\w+$")
    """ID of the VPC."""
    switch: str | None = Field(None, pattern=r"^vsw-\w+$")
    """ID of the vSwitch; default: one that PAI chooses."""
    security_group: str = Field(pattern=r"^sg-\w+$")
    """ID of the security group."""
    cidrs: tuple[Annotated[str, StringConstraints(pattern=r"^[0-9.]+/[0-9]+$")], ...] = ()
    """Address ranges of the VPC to reach; PAI needs all of them if switch is set."""


class Pai(Section):
    """Alibaba Cloud PAI-DLC: the region of its jobs, the mounts of their pods, and the resources of
    each.
    """

    region: str | None = Field(None, pattern=r"^[a-z]{2}-[a-z]+(-[a-z0-9]+)*$")
    """Region, such as cn-beijing."""
    workspace: str | None = Field(None, pattern=r"^[0-9]+$")
    """ID of the workspace; default: your default one in the region."""
    storage: str | None = Field(None, pattern=r"^oss://[^/\s'\"\\$`%?*]+(/[^\s'\"\\$`%?*]*)?$")
    """The place of code, inputs, checkpoints and results, such as oss://my-bucket/smtrain; every
    pod mounts it.
    """
    mount: str = Field("/mnt/smtrain", pattern=_FOLDER)
    """The path of `storage` in the pods."""
    data: tuple[PaiMount, ...] = ()
    """Further mounts; a path of the config below one of them is read in place."""
    quota: str | None = Field(None, pattern=_WORD)
    """ID of the resource quota; default: public resources, paid by use."""
    priority: int | None = Field(None, ge=1, le=9)
    """Priority within the quota, 9 is the highest."""
    ecs_spec: str | None = Field(None, pattern=r"^ecs\.[a-z0-9.-]+$")
    """Public resources: type of the pods of stage train, such as ecs.gn7e-c16g1.16xlarge."""
    cpu_ecs_spec: str | None = Field(None, pattern=r"^ecs\.[a-z0-9.-]+$")
    """Public resources: type of the pod of all other stages, such as ecs.g7.8xlarge; default:
    ecs_spec.
    """
    resources: PaiResources | None = None
    """With a quota: what each pod of stage train gets."""
    cpu_resources: PaiResources | None = None
    """With a quota: what the pod of all other stages gets; default: resources, without GPUs."""
    rdma: bool = False
    """Let the pods use RDMA (EnableRDMA); image and quota must have it."""
    sanity_check: bool = False
    """PAI tests the machines before the job starts (EnableSanityCheck)."""
    error_monitoring: bool = False
    """PAI watches the job and restarts it after a hang or the fault of a machine (AIMaster)."""
    error_monitoring_args: str | None = None
    """Options of AIMaster, such as --job-execution-mode=Sync --enable-log-hang-detection=true."""
    grace: Seconds = Field(120, ge=10, le=86400)
    """Time to save after a stop, before the pods are killed."""
    driver: str | None = Field(None, pattern=_WORD)
    """Version of the GPU driver; default: PAI's."""
    vpc: PaiVpc | None = None
    """Your network; default: none."""
    code: PaiCode | None = None
    """A code source to mount, for a command of your own."""
    command: str | None = Field(None, min_length=1)
    """Shell text that every pod runs instead of smtrain's training, such as Megatron-LM under
    torchrun; the run has no other stage then.
    """
    endpoint: str | None = Field(None, pattern=r"^(https?://)?[A-Za-z0-9.:-]+$")
    """Endpoint of the API, such as pai-dlc-vpc.cn-beijing.aliyuncs.com; default: the public one of
    the region.
    """
    oss_endpoint: str | None = Field(None, pattern=r"^(https?://)?[A-Za-z0-9.:-]+$")
    """Endpoint of OSS for this machine, such as oss-cn-beijing-internal.aliyuncs.com; default: the
    public one.
    """

    @property
    def bucket(self) -> str:
        """The bucket of `storage`."""
        return (self.storage or "").removeprefix(OSS).partition("/")[0]

    @property
    def base(self) -> str:
        """`storage` without a slash at the end."""
        return (self.storage or "").rstrip("/")

    def path_of(self, uri: str) -> str:
        """The path in the pods of an oss:// or file:// URI; anything else is returned as it is."""
        uri = uri.removeprefix("file://")
        mounts = [
            (self.base, self.mount),
            *((mount.uri.rstrip("/"), mount.path) for mount in self.data if mount.uri),
        ]
        for base, path in mounts:
            if uri == base or uri.startswith(f"{base}/"):
                return path + uri[len(base) :]
        return f"{INPUTS}/{uri.removeprefix(OSS)}" if uri.startswith(OSS) else uri
