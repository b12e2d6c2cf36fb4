"""Sections of a config: the machines of a run, their network, and hosts on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator

from smtrain.core.config.section import Section
from smtrain.core.config.units import Seconds
from smtrain.core.facts.gpus import known_chips

KINDS_OF_PRICE = ("on_demand", "spot", "reserved", "training_plan")


class Compute(Section):
    """The machines, and for how long."""

    instance_type: str = Field(
        "ml.trn1.32xlarge", pattern=r"^(ml\.[a-z0-9-]+\.[a-z0-9]+|[a-z][a-z0-9-]{0,39})$"
    )
    """Instance type of the train stage, such as ml.trn1.32xlarge. On a Slurm cluster it is
    required: a type, one of `machines`, or trn3-gen1 or trn3-gen2 (Trainium3); on PAI-DLC one of
    `machines`.
    """
    instance_count: int = Field(1, ge=1, le=10_000)
    """Number of instances of the train stage."""
    instance_group: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Request the train stage's instances as one instance group of this name (InstanceGroups)."""
    processes_per_instance: int | None = Field(None, ge=1, le=1024)
    """Training processes per host; default: the instance's Neuron cores or GPUs, else 1. On this
    machine, without an instance_type: one replica of the model for each GPU here, on the CPU one.
    """
    cpu_instance_type: str = Field("ml.m5.4xlarge", pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")
    """Instance type of the stages that need no accelerator: prepare, convert, export, generate.
    Default: ml.m5.4xlarge, or for a stage that its 64 GiB do not hold the smallest type that does.
    """
    volume_gb: int = Field(256, ge=1, le=16384)
    """Disk of each instance, in GiB; AWS ignores it for types with NVMe disks."""
    max_run: Seconds = Field(86400, ge=1, le=28 * 86400)
    """Longest time a job may run, in seconds or as 90m, 12h, 3d; at most 28 days.

    It is then stopped.
    """
    compile_ahead: bool = False
    """Engine nxd on AWS: a run compiles its graphs on one instance (stage compile) before all of
    them train.
    """
    keep_alive: Seconds = Field(0, le=21600)
    """Keep the train stage's machines this long afterwards, billed (warm pool); AWS documents an
    hour as the most.
    """
    spot: bool = False
    """Use spot machines for the train stage: cheaper, and AWS may take them back at any time."""
    max_wait: Seconds | None = Field(None, ge=1, le=28 * 86400)
    """With spot: longest time from creation to end, waiting included; default: twice max_run."""
    training_plan: str | None = Field(
        None, pattern=r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+$"
    )
    """ARN of a SageMaker training plan, whose reserved machines of instance_type the train stage
    uses (TrainingPlanArn).
    """
    infra_check: bool = False
    """SageMaker tests hardware and network of the train stage's machines before it starts
    (InfraCheckConfig).
    """
    retries: int | None = Field(None, ge=1, le=30)
    """Times SageMaker itself starts the train job again after an InternalServerError; default:
    never.
    """
    session_tag_chaining: bool = False
    """Let the job use the session tags of the user who starts it (attribute-based access control).
    """
    sdk: Literal["auto", "v3", "v2", "boto3"] = "auto"
    """The sender of the request: SageMaker SDK v3 or v2, or boto3; `auto`: the SDK installed on
    AWS, boto3 locally.
    """
    capacity_wait: Seconds = 0
    """Retry for this long, from the first attempt on, if AWS has no machines (CapacityError); 0: no
    retry.
    """
    fallback_instance_types: tuple[str, ...] = ()
    """Types for the train stage when there are no machines of instance_type, in this order; each
    must fit the mesh.
    """
    fallback_regions: tuple[
        Annotated[str, StringConstraints(pattern=r"^[a-z]{2,}(-[a-z]+)+-\d+$")], ...
    ] = ()
    """Regions for the train stage and those after it, next to `region`: the cheapest that has
    machines and quota takes them, with a copy of their inputs in SageMaker's default bucket there.
    """
    quota_wait: Seconds = 0
    """Wait this long for instances that a quota refuses (ResourceLimitExceeded); 0: end with the
    quota to request.
    """
    pool_wait: Seconds = 0
    """Wait this long for a warm pool that a matching job still uses; 0: start on other machines."""
    price: str | float | None = None
    """Price of the train stage's machines in plans: on_demand, spot, reserved or training_plan
    (whose price `smtrain check --prices` asks for), or dollars for an hour of one, such as that of
    a savings plan; default: spot with compute.spot, else on_demand.
    """
    price_limit: float | None = Field(None, ge=0)
    """Dollars: a run on AWS whose plan costs more asks before it starts; default: it never asks."""
    image: str | None = None
    """Container image: a URI, or a tag of AWS's Neuron training images, in which * takes the newest
    tag that matches; default: the newest training image of the region for these machines (`smtrain
    images`).
    """
    role: str | None = None
    """Execution role: its ARN or its name; needed with target aws, but in SageMaker Studio, which
    has one.
    """
    region: str | None = Field(None, pattern=r"^[a-z]{2,}(-[a-z]+)+-\d+$")
    """AWS region, such as us-west-2; default: that of the environment or profile, as boto3 finds
    it.
    """
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the container. Never put a secret here."""

    @field_validator("price", mode="before")
    @classmethod
    def _a_price(cls, value: object) -> object:
        number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and 0 <= value <= 1_000_000
        )
        if value is None or number or value in KINDS_OF_PRICE:
            return value
        raise ValueError(
            f"it is {', '.join(KINDS_OF_PRICE)}, or dollars for an hour of one machine"
        )


class Network(Section):
    """VPC and isolation."""

    subnets: tuple[str, ...] = ()
    """IDs of the VPC subnets that jobs run in; needs security_group_ids too."""
    security_group_ids: tuple[str, ...] = ()
    """IDs of the security groups of the jobs' machines; needs subnets too."""
    encrypt_inter_container_traffic: bool = False
    """Encrypt the traffic between the machines of a job; slower."""
    isolation: bool = False
    """Give containers no network but that between the machines of the job."""


class Local(Section):
    """The hosts of jobs on this machine; ignored on AWS."""

    run_in: Literal["sandbox", "docker", "auto"] = "sandbox"
    """The kind of host: `sandbox`, a process with this machine's Python; `docker`, a container of
    the image; `auto`, a container if Docker answers and has the image.
    """
    image: str | None = Field(None, min_length=1)
    """The image of containers here, instead of compute.image."""
    memory: str | None = Field(None, pattern=r"^([0-9]+[bkmg]?|instance)$")
    """Memory of each container as Docker writes it, 512m or 8g, or `instance`: as much as
    compute.instance_type has.
    """
    cpus: float | None = Field(None, gt=0, le=4096)
    """Processor cores of each container."""


MachineName = Annotated[
    str, StringConstraints(pattern=r"^(ml\.[a-z0-9-]+\.[a-z0-9]+|[a-z][a-z0-9-]{0,39})$")
]


class MachineEntry(Section):
    """A machine that no table has, for the planner; `smtrain plan --probe` measures the one at
    hand.
    """

    kind: Literal["gpu", "neuron", "cpu"] = "gpu"
    """Kind of its devices; a device of kind cpu is a training process's share of the host."""
    devices: int = Field(ge=1, le=1024)
    """Devices of a host: one training process runs on each."""
    chip: str | None = None
    """The GPU, such as H100: plans then use what is known of it, its peak in place of `tflops`."""
    memory_gib: float = Field(gt=0, le=100_000)
    """Memory of one device, in GiB."""
    tflops: float = Field(gt=0, le=1_000_000)
    """Dense bf16 peak of one device, in 1e12 operations a second, without sparsity; measured is
    better than printed.
    """
    link_gbs: float | None = Field(None, gt=0, le=1_000_000)
    """From one device to another of its host, 1e9 bytes a second in one direction; default:
    network_gbs.
    """
    network_gbs: float | None = Field(None, gt=0, le=1_000_000)
    """Between hosts, 1e9 bytes a second of a whole host; needed to plan with more than one."""
    host_memory_gib: float = Field(gt=0, le=1_000_000)
    """Memory of the host, in GiB."""
    efa: bool = False
    """Whether SageMaker's hosts of this type have EFA, over which a job's processes then
    communicate.
    """
    dollars_per_hour: float | None = Field(None, ge=0, le=1_000_000)
    """Price of a host; default: none."""

    @field_validator("chip")
    @classmethod
    def _a_known_chip(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("kind") not in ("gpu", None):
            raise ValueError("only a machine of kind gpu has it; leave it out")
        if value is None or value in known_chips():
            return value
        raise ValueError(f"it is one of {', '.join(known_chips())}; leave it out for another GPU")
