"""Rules for target pai-dlc: the needs and limits of a job on Alibaba Cloud PAI-DLC."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from smtrain.client.config.checks.pods import pod_rules
from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, all_set, rule_faults
from smtrain.core.config.pai import INPUTS, is_bucket
from smtrain.core.config.schema import JobConfig
from smtrain.core.shell import syntax_error

REQUEST_BYTES = 65_536
"""All parameters of CreateJob together, with those that PAI adds (its reference, read 2026-11)."""
COMMAND_BYTES = REQUEST_BYTES * 3 // 4
"""The longest `pai.command`, which leaves room for the rest of the request."""

_SPEC = (
    "name a type of public resources, such as ecs.gn7e-c16g1.16xlarge, or set pai.quota and"
    " pai.resources instead"
)


def _without_quota(name: str) -> Callable[[JobConfig], bool]:
    return lambda config: config.pai.quota is None and getattr(config.pai, name) is not None


PAI = (
    Rule(
        "pai.region",
        lambda c: c.pai.region is None,
        "pai.region: is missing; name one, such as cn-beijing",
    ),
    Rule(
        "pai.storage",
        lambda c: c.pai.storage is None,
        "pai.storage: is missing; name a bucket and a prefix, such as oss://my-bucket/smtrain",
    ),
    Rule(
        "pai.storage",
        lambda c: c.pai.storage is not None and not is_bucket(c.pai.bucket),
        lambda c: (
            f"pai.storage: {c.pai.bucket!r} cannot be a bucket's name, which has 3 to 63 lower-case"
            " letters, digits and hyphens; correct it"
        ),
    ),
    Rule(
        "compute.image",
        lambda c: c.compute.image is None,
        "compute.image: is missing; name an image that the region can pull and that has torch and"
        " the packages of smtrain[train] (`smtrain help pai-dlc`)",
    ),
    Rule(
        "pai.ecs_spec pai.quota",
        lambda c: c.pai.quota is None and c.pai.ecs_spec is None,
        f"pai.ecs_spec: is missing; {_SPEC}",
    ),
    Rule(
        "pai.resources pai.quota",
        lambda c: c.pai.quota is not None and c.pai.resources is None,
        "pai.resources: is missing; give what a pod gets from the quota, such as {cpu: 96, memory:"
        " 1000Gi, gpu: 8}",
    ),
    *(
        Rule(
            f"pai.{name} pai.quota",
            all_set("pai.quota", f"pai.{name}"),
            f"pai.{name}: is for public resources, and pai.quota names a quota; leave it out",
        )
        for name in ("ecs_spec", "cpu_ecs_spec")
    ),
    *(
        Rule(
            f"pai.{name} pai.quota",
            _without_quota(name),
            f"pai.{name}: has no effect without pai.quota; leave it out",
        )
        for name in ("resources", "cpu_resources", "priority")
    ),
    Rule(
        "pai.resources compute.instance_type compute.processes_per_instance",
        lambda c: _lacks_gpus(c),
        lambda c: (
            f"pai.resources.gpu: a pod would have {_gpus(c)} GPUs for {c.processes_per_instance}"
            f" training processes; set it to {c.processes_per_instance}"
        ),
    ),
    Rule(
        "compute.instance_type machines",
        lambda c: c.own_machine is not None and c.own_machine.kind == "neuron",
        "compute.instance_type: PAI-DLC has no Neuron devices; describe a machine of kind gpu under"
        " machines",
    ),
    Rule(
        "train.engine",
        lambda c: c.train.engine == "nxd",
        "train.engine: nxd is for Trainium, which PAI-DLC does not have; set native",
    ),
    Rule(
        "pai.error_monitoring_args pai.error_monitoring",
        lambda c: c.pai.error_monitoring_args and not c.pai.error_monitoring,
        "pai.error_monitoring_args: has no effect without pai.error_monitoring; leave it out",
    ),
    Rule(
        "pai.code pai.command",
        lambda c: c.pai.code and not c.pai.command,
        "pai.code: is for a command of your own, and pai.command is not set; leave it out",
    ),
    Rule(
        "pai.command",
        lambda c: c.pai.command and len(c.pai.command.encode()) > COMMAND_BYTES,
        lambda c: (
            f"pai.command: has {len((c.pai.command or '').encode()):,} bytes, and {COMMAND_BYTES:,}"
            " are allowed; put it into a script below pai.storage, and call that"
        ),
    ),
    Rule(
        "pai.vpc",
        lambda c: c.pai.vpc and c.pai.vpc.switch and not c.pai.vpc.cidrs,
        "pai.vpc.cidrs: is missing, and PAI needs all address ranges of the VPC with"
        " pai.vpc.switch; name them, such as [192.168.0.0/16]",
    ),
    *pod_rules("PAI-DLC", "pai.storage"),
    Rule(
        "model.token",
        lambda c: c.model.token,
        "model.token: names a secret of AWS, which PAI-DLC cannot read; leave it out, and give a"
        " copy of the model",
    ),
    Rule(
        "track.wandb",
        lambda c: c.track.wandb and c.track.wandb.key and c.track.by == "job",
        "track.wandb.key: names a secret of AWS, which PAI-DLC cannot read; set track.by: client",
    ),
)


def section_faults(config: JobConfig) -> Iterator[Fault]:
    """Faults of a config for PAI-DLC."""
    yield from rule_faults(PAI, config)
    if config.pai.command and (error := syntax_error(config.pai.command)):
        yield {"pai.command"}, f"pai.command: bash cannot read it ({error}); correct the line"
    owners = {config.pai.mount: "pai.mount", INPUTS: "the mounts of other buckets"}
    for number, mount in enumerate(config.pai.data):
        key = f"pai.data.{number}"
        if (mount.uri is None) == (mount.dataset is None):
            yield {"pai.data"}, f"{key}: must name one of uri and dataset; leave the other out"
        for path, owner in owners.items():
            if (
                path == mount.path
                or path.startswith(f"{mount.path}/")
                or mount.path.startswith(f"{path}/")
            ):
                yield (
                    {"pai.data", "pai.mount"},
                    (
                        f"{key}.path: {mount.path} overlaps {path} of {owner}; give it a"
                        f" separate folder, such as /mnt/data{number}"
                    ),
                )
        owners[mount.path] = key


def _gpus(config: JobConfig) -> int:
    resources = config.pai.resources
    return (
        config.processes_per_instance
        if resources is None or resources.gpu is None
        else resources.gpu
    )


def _lacks_gpus(config: JobConfig) -> bool:
    machine = config.own_machine
    on_gpus = machine is not None and machine.kind == "gpu"
    return bool(config.pai.quota and on_gpus) and _gpus(config) != config.processes_per_instance
