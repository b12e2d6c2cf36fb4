"""Make the file from which AWS ParallelCluster creates a cluster, from a config and the account's
resources.

Keys as in aws-parallelcluster 3.16's schema (read 2026-11-21); no cluster was created with it here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from smtrain.client.config.checks.machines import trainium2_instead
from smtrain.client.prices import Prices, own_prices
from smtrain.core.config import JobConfig
from smtrain.core.config.schema import inputs_of
from smtrain.core.errors import ConfigError
from smtrain.core.facts import instance, table
from smtrain.core.facts.engines import is_neuron
from smtrain.core.protocol.uris import split_uri
from smtrain.core.suggest import hint
from smtrain.tools.cluster.network import region_faults

OSES = {
    "ubuntu2204": "3.10", "ubuntu2404": "3.12", "alinux2023": "3.9",
    "rhel8": "3.6", "rhel9": "3.9", "rocky8": "3.6", "rocky9": "3.9",
}  # fmt: skip
"""Operating systems that ParallelCluster 3.16 supports, each with its Python; it refuses
older ones.
"""
UNKNOWN_SUBNET = "subnet-00000000000000000"
"""Placeholder for a missing subnet: well-formed, but not real."""
_LUSTRE_STEP = 2400  # GiB; SCRATCH_2 is 1200 or a multiple of it
LUSTRE_DOLLARS = 0.14
"""Dollars a GiB of SCRATCH_2 a month in us-west-2; from memory (2026-11-22), not read at its
source.
"""
_QUEUE = re.compile(r"[a-z][a-z0-9-]{0,24}")
_CLUSTER = re.compile(r"[a-zA-Z][a-zA-Z0-9-]{0,59}")
_IDS = {
    "head_subnet": ("--head-subnet", "subnet"),
    "compute_subnet": ("--compute-subnet", "subnet"),
    "ami": ("--ami", "ami"),
    "capacity_block": ("--capacity-block", "cr"),
}


@dataclass(frozen=True)
class Site:
    """The account's network and keys, and how machines are bought."""

    region: str = "us-west-2"
    head_subnet: str = UNKNOWN_SUBNET
    """A public subnet."""
    compute_subnet: str = UNKNOWN_SUBNET
    """A private subnet with a route to the internet (NAT)."""
    key_name: str | None = None
    """An EC2 key pair; without one, connect to the head node through SSM."""
    os: str | None = None
    """Default: one whose Python the engine has packages for."""
    ami: str | None = None
    """A Neuron image built for this release of ParallelCluster; without one the nodes lack the
    driver.
    """
    post_install: str | None = None
    """URI of a script that every node of the train stage runs at its start."""
    head_type: str = "m5.4xlarge"
    capacity_block: str | None = None
    """ID of a capacity reservation of a capacity block."""
    spot: bool = False
    storage_gib: int = 4800


def template(config: JobConfig, site: Site) -> dict[str, Any]:
    """The file as plain values. Raises `ConfigError` with every fault."""
    if faults := _faults(config, site):
        raise ConfigError(faults, code="config.combination")
    cluster, kind = config.cluster, config.compute.instance_type.removeprefix("ml.")
    mount = "/" + PurePosixPath(str(cluster.shared)).parts[1]
    training, cpus = queues(config)
    queue_sections = [_training(config, site, kind)]
    if cpus != training:
        queue_sections.append(
            {
                "Name": cpus,
                "CapacityType": "ONDEMAND",
                "JobExclusiveAllocation": True,
                "ComputeResources": [
                    _resource(config.compute.cpu_instance_type.removeprefix("ml."), 1)
                ],
                "ComputeSettings": {"LocalStorage": {"RootVolume": {"Size": 200}}},
                "Networking": {"SubnetIds": [site.compute_subnet]},
            }
        )
    of_script = (
        {split_uri(site.post_install)[0]}
        if site.post_install and site.post_install.startswith("s3://")
        else set()
    )
    for queue in queue_sections:
        if buckets := sorted({*_buckets(config), *(of_script if "CustomActions" in queue else ())}):
            queue["Iam"] = {"S3Access": [{"BucketName": bucket} for bucket in buckets]}
    return {
        "Region": site.region,
        "Image": {"Os": os_of(config, site), **({"CustomAmi": site.ami} if site.ami else {})},
        "HeadNode": {
            "InstanceType": site.head_type,
            "LocalStorage": {"RootVolume": {"Size": 200}},
            "Networking": {"SubnetId": site.head_subnet},
            **({"Ssh": {"KeyName": site.key_name}} if site.key_name else {}),
        },
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": {"ScaledownIdletime": 10},
            "SlurmQueues": queue_sections,
        },
        "SharedStorage": [
            {
                "Name": "shared",
                "MountDir": mount,
                "StorageType": "FsxLustre",
                "FsxLustreSettings": {
                    "StorageCapacity": site.storage_gib,
                    "DeploymentType": "SCRATCH_2",
                },
            }
        ],
    }


def os_of(config: JobConfig, site: Site) -> str:
    """The operating system of all nodes: the given one, or by the Python that the engine needs."""
    return site.os or ("ubuntu2404" if _pythons(config) else "ubuntu2204")


def _pythons(config: JobConfig) -> list[str]:
    """The releases of Python that TorchNeuron has wheels for ("3.12"); empty for machines without
    it.
    """
    if config.train.engine != "native" or not is_neuron(config.compute.instance_type):
        return []
    return [
        f"{python[0]}.{python[1:]}" for python in table("images")["engines"]["native"]["pythons"]
    ]


def _wrong_python(config: JobConfig, site: Site) -> Iterator[str]:
    """The fault of nodes for which TorchNeuron has no wheels.

    An image or a container may bring another Python.
    """
    os, pythons = os_of(config, site), _pythons(config)
    if (
        pythons
        and OSES.get(os, pythons[0]) not in pythons
        and not site.ami
        and not config.cluster.container
    ):
        yield (
            f"--os: {os} has Python {OSES[os]}, and TorchNeuron's wheels are for {pythons[0]} to"
            f" {pythons[-1]}; take ubuntu2404, or run in a container (cluster.container)"
        )


def queues(config: JobConfig) -> tuple[str, str]:
    """The queues of the train stage and of the CPU stages; the same one if the config only names
    one.
    """
    cluster = config.cluster
    training = cluster.partition or "train"
    return training, cluster.cpu_partition or (training if cluster.partition else "cpu")


def _training(config: JobConfig, site: Site, kind: str) -> dict[str, Any]:
    """The queue of the train stage: all nodes in one subnet, close together, one job a node."""
    resource = _resource(kind, config.compute.instance_count)
    row = instance(config.compute.instance_type)
    if row and row["efa"]:
        resource["Efa"] = {"Enabled": True}
    networking: dict[str, Any] = {"SubnetIds": [site.compute_subnet]}
    if site.capacity_block:
        resource["MinCount"] = resource["MaxCount"]  # the nodes exist for as long as the block
        resource["CapacityReservationTarget"] = {"CapacityReservationId": site.capacity_block}
    else:
        networking["PlacementGroup"] = {"Enabled": True}
    capacity = "CAPACITY_BLOCK" if site.capacity_block else "SPOT" if site.spot else "ONDEMAND"
    return {
        "Name": queues(config)[0],
        "CapacityType": capacity,
        "JobExclusiveAllocation": True,
        "ComputeResources": [resource],
        "ComputeSettings": {"LocalStorage": {"RootVolume": {"Size": 200}}},
        "Networking": networking,
        **(
            {"CustomActions": {"OnNodeConfigured": {"Script": site.post_install}}}
            if site.post_install
            else {}
        ),
    }


def _buckets(config: JobConfig) -> list[str]:
    """Buckets of the config's inputs, which nodes must be allowed to read."""
    return sorted({split_uri(uri)[0] for _, uri in inputs_of(config) if uri.startswith("s3://")})


def _resource(kind: str, count: int) -> dict[str, Any]:
    return {"Name": kind.replace(".", "-"), "InstanceType": kind, "MinCount": 0, "MaxCount": count}


def _faults(config: JobConfig, site: Site) -> list[str]:
    faults = region_faults(site.region)
    if config.own_machine is not None:
        faults.append(
            f"compute.instance_type: {config.compute.instance_type} is a machine of yours, and AWS"
            " has none; name an instance type, such as ml.p5.48xlarge"
        )
    elif "." not in config.compute.instance_type:
        faults.append(
            f"compute.instance_type: EC2 had no name for {config.compute.instance_type} when this"
            f" was written; {trainium2_instead(config)}"
        )
    if (os := os_of(config, site)) not in OSES:
        faults.append(f"--os: ParallelCluster does not support {os}; {hint(os, OSES)}")
    faults += _wrong_python(config, site)
    if site.capacity_block and site.spot:
        faults.append(
            "--spot: a capacity block is paid for already; leave one of --spot,"
            " --capacity-block out"
        )
    if site.storage_gib != 1200 and (site.storage_gib <= 0 or site.storage_gib % _LUSTRE_STEP):
        faults.append(
            f"--storage: {site.storage_gib} GiB is not a size of FSx for Lustre; 1200, or a"
            " multiple of 2400"
        )
    if len(PurePosixPath(str(config.cluster.shared)).parts) < 2:
        faults.append(
            "cluster.shared: is missing; name a folder below the mount point, such as /fsx/smtrain"
        )
    if site.post_install and not re.fullmatch(
        r"s3://[^/\s]+/\S+|https://[^/\s]+/\S+", site.post_install
    ):
        faults.append(
            f"--post-install: {site.post_install} is not a script that nodes can read; give"
            " s3://... or https://..."
        )
    for field, (option, kind) in _IDS.items():
        value = getattr(site, field)
        if value and not re.fullmatch(rf"{kind}-(?:[0-9a-z]{{8}}|[0-9a-z]{{17}})", value):
            faults.append(
                f"{option}: {value} is not such an ID; it looks like {kind}-0123456789abcdef0"
            )
    key_by_queue = dict(zip(reversed(queues(config)), ("cpu_partition", "partition"), strict=True))
    for queue, key in key_by_queue.items():
        if not _QUEUE.fullmatch(queue) or queue == "default":
            faults.append(
                f"cluster.{key}: ParallelCluster allows no queue named {queue!r}; use lower-case"
                " letters, digits and hyphens, at most 25, beginning with a letter, and not"
                " 'default'"
            )
    if not _CLUSTER.fullmatch(config.name):
        faults.append(
            f"name: {config.name!r} is not a valid cluster name; use at most 60 letters, digits and"
            " hyphens, beginning with a letter"
        )
    return faults


def dollars_per_hour(config: JobConfig, site: Site) -> tuple[float | None, float | None]:
    """Dollars an hour of the idle cluster (head node and storage), and of the running train nodes;
    None if no price is known, and for the nodes of a capacity block, which is paid in advance.
    """
    prices = Prices(own_prices())
    head = prices.find(f"ml.{site.head_type}", "on_demand", site.region)
    node = prices.find(
        config.compute.instance_type, "spot" if site.spot else "on_demand", site.region
    )
    storage = site.storage_gib * LUSTRE_DOLLARS / 730
    return (
        head.dollars_per_hour + storage if head else None,
        (
            node.dollars_per_hour * config.compute.instance_count
            if node and not site.capacity_block
            else None
        ),
    )


NEURON_SCRIPT = r"""#!/bin/bash
# Neuron's driver, libraries and tools on a node of AWS ParallelCluster: its queue's CustomActions.OnNodeConfigured.
# Runs as root when a node starts, on Ubuntu and Amazon Linux 2023, and again at no harm. ROOT is for trying it.
set -euo pipefail
root=${ROOT:-}
here() { [ -e "$root/dev/neuron0" ]; }
if here; then echo "neuron: the driver is there"; exit 0; fi
. "$root/etc/os-release"
packages="aws-neuronx-dkms aws-neuronx-collectives aws-neuronx-runtime-lib aws-neuronx-tools"
case "$ID" in
ubuntu)
  from=https://apt.repos.neuron.amazonaws.com
  key=$root/etc/apt/keyrings/neuron.gpg
  mkdir -p "$root/etc/apt/keyrings" "$root/etc/apt/sources.list.d"
  curl -fsS --retry 5 "$from/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB" | gpg --batch --yes --dearmor -o "$key"
  echo "deb [signed-by=$key] $from $VERSION_CODENAME main" >"$root/etc/apt/sources.list.d/neuron.list"
  export DEBIAN_FRONTEND=noninteractive
  # A node that has just started may be updating itself.
  apt-get -q -o DPkg::Lock::Timeout=300 update
  apt-get -q -y -o DPkg::Lock::Timeout=300 install "linux-headers-$(uname -r)" $packages
  ;;
amzn)
  from=https://yum.repos.neuron.amazonaws.com
  mkdir -p "$root/etc/yum.repos.d"
  printf '[neuron]\nname=Neuron\nbaseurl=%s\nenabled=1\ngpgcheck=1\n' "$from" >"$root/etc/yum.repos.d/neuron.repo"
  rpm --import "$from/GPG-PUB-KEY-AMAZON-AWS-NEURON.PUB"
  dnf -y install "kernel-devel-$(uname -r)" "kernel-headers-$(uname -r)" $packages
  ;;
*)
  echo "neuron: there are no packages for ${PRETTY_NAME:-$ID}; take Ubuntu, Amazon Linux 2023 or an image (--ami)" >&2
  exit 1
  ;;
esac
modprobe neuron
for _ in $(seq 30); do
  if here; then echo "neuron: installed"; exit 0; fi
  sleep 1
done
echo "neuron: the driver is installed and shows no device; is this a machine with Neuron devices?" >&2
exit 1
"""
"""Sources and package names from AWS's documentation of Neuron 2.33 (read 2026-11-23); not run on a
node of AWS.
"""
