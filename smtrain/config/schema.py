"""`JobConfig` and its sections: typed, frozen, closed to unknown keys, one meaning per field."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from smtrain.config.cluster import Cluster
from smtrain.config.data import Data
from smtrain.config.machine import MachineEntry, MachineName
from smtrain.config.secret import Secret
from smtrain.config.section import Section
from smtrain.config.track import Track
from smtrain.config.units import Seconds
from smtrain.config.validation import Validation
from smtrain.facts import instance

Stage = Literal["fetch", "prepare", "convert", "compile", "train", "export", "generate", "evaluate"]
STAGES: tuple[Stage, ...] = ("fetch", "prepare", "convert", "compile", "train", "export", "generate", "evaluate")
# In a cache of compiled graphs: written when all graphs of a config are in it.
GRAPHS_COMPLETE = "smtrain-complete.json"
TRACED_STEPS = 10  # what AWS advises for the run in which neuron_parallel_compile sees the graphs


def _chosen(schema: dict[str, Any]) -> None:
    """The default of a field that loading chooses, by the machines, is not a fixed value."""
    schema.pop("default", None)


def _or_one(schema: dict[str, Any]) -> None:
    """A list of names may be one name."""
    names = {key: schema.pop(key) for key in ("type", "items")}
    schema["anyOf"] = [names, {"type": "string"}]


class Model(Section):
    """The model that training starts from."""

    path: str
    """A Hugging Face folder (config.json, safetensors, tokenizer): a local path, s3://..., hf://organization/model@revision,
    demo://smollm2 or demo://tiny-llama."""
    weights: str | None = None
    """Where the weights are, if not in `path`: a folder or s3:// URI of any kind that `smtrain convert` reads, such as
    Megatron's s3://bucket/run/iter_0001000; config.json and tokenizer come from `path`."""
    token: Secret | None = None
    """The Hugging Face token that gated or private hf:// models and data need."""
    init: Literal["weights", "scratch"] = "weights"
    """`weights` continues from the folder's weights; `scratch` takes only its config and starts at random."""


class Parallel(Section):
    """How the model is cut over processes."""

    tp: int = Field(1, ge=1)
    """Tensor-parallel degree: how many processes share every layer."""
    pp: int = Field(1, ge=1)
    """Pipeline-parallel degree: into how many stages the layers are cut."""
    dp: int | None = Field(None, ge=1)
    """Data-parallel degree: how many copies of the model train, each on other data; default: processes / (tp x pp)."""
    micro_batch_size: int = Field(1, ge=1)
    """Sequences that one copy of the model takes at a time. More is faster and needs more memory."""
    sequence_parallel: bool = Field(False, json_schema_extra=_chosen)
    """Also cut what lies between the shared layers, along the sequence: less memory; needs tp > 1 to have an effect.
    Default: true where engine nxd must (bf16)."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """`full` keeps only each layer's input and recomputes the rest in the backward pass; `selective` (engine nxd)
    recomputes softmax attention only."""
    zero1: bool = True
    """Split the optimizer's state over the copies of the model; only engine nxd can do without."""
    pipeline_cuts: tuple[int, ...] = ()
    """Engine nxd: the last layer of every pipeline stage but the last; default: even stages, the remainder last."""
    virtual_stages: int = Field(1, ge=1)
    """Engine nxd: how many stages each pipeline rank holds (interleaved schedule)."""


class AdapterSection(Section):
    """LoRA: the model's weights stay as they are, and two small matrices beside each linear layer are trained."""

    type: Literal["lora"] = "lora"
    """The kind of adapter: lora."""
    rank: int = Field(16, ge=1, le=65536)
    """Rank of the two matrices (peft's r): more can learn more, and takes more memory."""
    alpha: float = Field(32.0, gt=0)
    """What the adapters add is multiplied by alpha / rank (peft's lora_alpha)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's input that is dropped in training (peft's lora_dropout); engine nxd takes 0 only."""
    targets: tuple[str, ...] = Field(("all-linear",), json_schema_extra=_or_one)
    """Which linear layers, by the last part of their names, such as [q_proj, v_proj]; `all-linear`: all in the decoder
    layers (peft's target_modules)."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, for high ranks (peft's use_rslora)."""

    @field_validator("targets", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class Train(Section):
    """The training run itself."""

    engine: Literal["native", "nxd"] = Field("native", json_schema_extra=_chosen)
    """What does the parallel work: torch alone, or neuronx-distributed (docs/nxd.md); default: what the machines run,
    nxd on ml.trn1 and native on ml.trn2, on GPUs, on CPUs and on this machine."""
    objective: Literal["pretrain", "sft"] = "pretrain"
    """`pretrain` learns every token of the text; `sft` learns the assistant's answers in instruction data."""
    adapter: AdapterSection | None = None
    """Train a LoRA adapter, in a fraction of the memory (docs/lora.md); default: all weights are trained."""
    steps: int = Field(1000, ge=0, le=10**9)
    """Optimizer steps of the whole run; one that resumes goes on up to this number."""
    global_batch_size: int = Field(8, ge=1, le=10**7, json_schema_extra=_chosen)
    """Sequences per optimizer step over all machines, a multiple of dp x parallel.micro_batch_size; default: the least
    from 8 on, or, on AWS where `parallel` is left out too, the least that keeps the machines busy."""
    max_global_batch_size: int | None = Field(None, ge=1, le=10**7)
    """Choose the global batch up to this one at which the machines train most tokens a second, in place of
    global_batch_size; with a mesh that is given, the largest that it can cut."""
    seq_len: int = Field(4096, ge=2, le=10**8, json_schema_extra=_chosen)
    """Tokens per sequence, at most what the model has positions for; default: 4096, or as many as a model in a local
    folder has."""
    lr: float = Field(1.5e-4, gt=0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end of a cosine or linear schedule."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """How the learning rate falls after warm-up: not at all, along a cosine, or in a straight line."""
    warmup_steps: int = Field(0, ge=0, le=10**9)
    """Steps of linear warm-up from 0 to `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.1, ge=0, json_schema_extra=_chosen)
    """Decoupled weight decay; norms and biases are exempt. Default: 0.1, or 0 with train.adapter."""
    grad_clip: float = Field(1.0, gt=0)
    """Gradients with a larger norm, taken over the whole model, are scaled down to this one."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the data order and of a start from scratch."""
    precision: Literal["bf16", "fp32"] = "bf16"
    """Number format of weights and activations; optimizer state and master weights are always fp32."""
    stochastic_rounding: bool = False
    """Engine nxd, bf16: the Neuron cores round at random instead of to the nearest."""
    stall_minutes: float = Field(30, ge=0, le=100_000)
    """Minutes without a finished step after which the job ends, saying where each rank stands; 0: never."""
    log_interval: int = Field(1, ge=1)
    """Steps between log lines."""
    save_interval: int = Field(100, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    validation: Validation | None = None
    """Hold out part of the text and log the loss on it; default: none."""


class Compute(Section):
    """The machines, and for how long."""

    instance_type: str = Field("ml.trn1.32xlarge", pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")
    """Instance type of the train stage, such as ml.trn1.32xlarge."""
    instance_count: int = Field(1, ge=1, le=10_000)
    """Number of instances of the train stage."""
    instance_group: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Request the train stage's instances as one instance group of this name (InstanceGroups)."""
    processes_per_instance: int | None = Field(None, ge=1, le=1024)
    """Training processes per host; default: the instance's Neuron cores or GPUs, else 1."""
    cpu_instance_type: str = Field("ml.m5.4xlarge", pattern=r"^ml\.[a-z0-9-]+\.[a-z0-9]+$")
    """Instance type of the stages that need no accelerator: prepare, convert, export, generate. Default: ml.m5.4xlarge,
    or for a stage that its 64 GiB do not hold the smallest type that does."""
    volume_gb: int = Field(256, ge=1, le=16384)
    """Disk of each instance, in GiB; AWS ignores it for types that have NVMe disks of their own."""
    max_run: Seconds = Field(86400, ge=1, le=28 * 86400)
    """Longest time a job may run, in seconds or as 90m, 12h, 3d; at most 28 days. It is then stopped."""
    compile_ahead: bool = False
    """Engine nxd on AWS: a run compiles its graphs on one instance (stage compile) before all of them train."""
    keep_alive: Seconds = Field(0, le=21600)
    """Keep the train stage's machines this long afterwards, billed (warm pool); AWS documents an hour as the most."""
    spot: bool = False
    """Use spot machines for the train stage: cheaper, and AWS may take them back at any time."""
    max_wait: Seconds | None = Field(None, ge=1, le=28 * 86400)
    """With spot: longest time from creation to end, waiting included; default: twice max_run."""
    training_plan: str | None = Field(None, pattern=r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+$")
    """ARN of a SageMaker training plan, whose reserved machines the train stage uses (TrainingPlanArn)."""
    infra_check: bool = False
    """SageMaker tests hardware and network of the train stage's machines before it starts (InfraCheckConfig)."""
    retries: int | None = Field(None, ge=1, le=30)
    """Times SageMaker itself starts the train job again after an InternalServerError; default: never."""
    session_tag_chaining: bool = False
    """Let the job use the session tags of whoever starts it (attribute-based access control)."""
    sdk: Literal["auto", "v3", "v2", "boto3"] = "auto"
    """What sends the request: SageMaker SDK v3 or v2, or boto3; `auto`: the SDK installed on AWS, boto3 locally."""
    capacity_wait: Seconds = 0
    """Try again for this long, from the first attempt on, when AWS has no machines (CapacityError); 0: do not."""
    fallback_instance_types: tuple[str, ...] = ()
    """Types for the train stage when there are no machines of instance_type, in this order; each must fit the mesh."""
    quota_wait: Seconds = 0
    """Wait this long for instances that a quota refuses (ResourceLimitExceeded); 0: say what to ask for, and end."""
    pool_wait: Seconds = 0
    """Wait this long for a warm pool that a matching job still uses; 0: start on other machines."""
    price_limit: float | None = Field(None, ge=0)
    """Dollars: a run on AWS whose plan costs more asks before it starts; default: it never asks."""
    image: str | None = None
    """Container image URI; default: the newest training image of the region for these machines (`smtrain images`)."""
    role: str | None = None
    """Execution role: its ARN or its name; needed with target aws, but in SageMaker Studio, which has one."""
    region: str | None = Field(None, pattern=r"^[a-z]{2,}(-[a-z]+)+-\d+$")
    """AWS region, such as us-west-2; default: that of the environment or profile, as boto3 finds it."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the container. Never put a secret here."""


class Checkpoint(Section):
    """Where training state is kept."""

    s3_uri: str | None = Field(None, pattern=r"^s3://.+")
    """s3:// prefix of the checkpoints; default: <output.s3_uri>/<name>/checkpoints/."""
    keep: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept; the only whole one is never deleted."""
    form: Literal["pt", "xser"] = "pt"
    """Engine nxd: one file per rank (pt), or one per tensor, written by all data-parallel ranks (xser)."""
    asynchronous: bool = False
    """Engine nxd: write in the background; a checkpoint is finished when the next one begins, or at the end."""
    resume: bool = True
    """Go on from the newest whole checkpoint of this run, if there is one."""
    verify: Literal["full", "size"] = "full"
    """Before the first step: compare the hash of every file that is read with the one written, or its size only."""
    step: int | None = Field(None, ge=0)
    """Resume from the checkpoint of this step and abandon later ones; default: the newest."""


class Output(Section):
    """Where results go."""

    s3_uri: str | None = Field(None, pattern=r"^s3://.+")
    """s3:// prefix of everything that runs write; default: s3://<SageMaker's default bucket>/smtrain."""
    kms_key: str | None = None
    """ID or ARN of the KMS key that encrypts results; default: the bucket's own encryption."""
    volume_kms_key: str | None = None
    """ID or ARN of the KMS key of the instances' disks; no effect on types with NVMe disks. Default: kms_key."""


class Export(Section):
    """What the export stage writes."""

    checkpoint: Literal["newest", "best"] = "newest"
    """Which checkpoint: the newest, or that with the lowest validation loss, which train.validation.keep_best keeps."""
    merge: bool = False
    """With train.adapter: write the model with the adapter merged into its weights, instead of the adapter alone."""
    megatron: bool = False
    """Also write the model as Megatron-core's `torch_dist`, in the folder `megatron` beside the Hugging Face files."""


class Generate(Section):
    """What the generate stage asks the exported model."""

    prompts: tuple[str, ...] = ("Once upon a time",)
    """Prompts to complete, one completion each; with train.objective sft, questions to answer."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(0.0, ge=0)
    """Randomness of the text: 0 takes the likeliest token each time, 1 follows the model's probabilities."""


class Evaluate(Section):
    """What the evaluate stage asks the exported model and the base model (lm-evaluation-harness)."""

    tasks: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")], ...] = Field((), max_length=20)
    """Tasks or groups by name, such as mmlu; without any there is no stage evaluate."""
    data: str | None = None
    """A folder or s3:// URI of task YAMLs with their data, or of MMLU (the hub's Parquet, or CSV folders), for which no
    network is needed; default: the data sets of the hub."""
    num_fewshot: int | None = Field(None, ge=0, le=100)
    """Worked examples before each question; default: what the task says (mmlu: 0; published numbers use 5)."""
    limit: int | None = Field(None, ge=1)
    """Questions of each task, of a group's each; default: all."""
    chat_template: bool = False
    """Put the questions in the tokenizer's chat template."""
    batch_size: int = Field(8, ge=1, le=4096)
    """Requests that the model takes at a time."""
    base: bool = True
    """Also evaluate the model that training started from, and compare the two question by question."""


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
    """The hosts of jobs on this machine; AWS does not look at it."""

    run_in: Literal["sandbox", "docker", "auto"] = "sandbox"
    """What a host is: `sandbox`, a process with this machine's Python; `docker`, a container of the image; `auto`, a
    container where Docker answers and has the image."""
    image: str | None = Field(None, min_length=1)
    """The image of containers here, in place of compute.image."""
    memory: str | None = Field(None, pattern=r"^([0-9]+[bkmg]?|instance)$")
    """Memory of each container as Docker writes it, 512m or 8g, or `instance`: as much as compute.instance_type has."""
    cpus: float | None = Field(None, gt=0, le=4096)
    """Processor cores of each container."""


def _or_auto(schema: dict[str, Any]) -> None:
    """In a file `parallel` may also be the word auto, which it is on AWS where it is left out: loading puts the
    planner's mesh in its place."""
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"const": "auto"}]


class JobConfig(Section):
    """A run from text to a trained model: every stage reads the part that concerns it."""

    name: str = Field("smtrain", pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,35}$")
    """Name of the run, at most 36 characters: its jobs and its folder in S3 begin with it."""
    target: Literal["local", "aws", "slurm"] = "local"
    """Where jobs run: `local` is this machine, `aws` SageMaker, `slurm` the cluster of section cluster; `--target`
    overrides it."""
    model: Model
    """The model that training starts from."""
    data: Data = Data()
    """The text, and how it is read."""
    parallel: Parallel = Field(Parallel(), json_schema_extra=_or_auto)
    """How the model is cut over processes; the word `auto` lets the planner choose the fastest cut that fits."""
    train: Train = Train()
    """The training itself: how long, how large, how fast it learns."""
    compute: Compute = Compute()
    """The machines, and for how long."""
    cluster: Cluster = Cluster()
    """A Slurm cluster, for target slurm."""
    checkpoint: Checkpoint = Checkpoint()
    """Where training state is kept, and what a resume reads."""
    output: Output = Output()
    """Where results go."""
    export: Export = Export()
    """What the export stage writes."""
    generate: Generate = Generate()
    """What the generate stage asks the exported model."""
    evaluate: Evaluate = Evaluate()
    """What the evaluate stage asks the exported model and the base model."""
    track: Track = Track()
    """Where curves go while a job trains: TensorBoard, MLflow, Weights & Biases."""
    network: Network = Network()
    """VPC and isolation."""
    machines: dict[MachineName, MachineEntry] = Field(default_factory=dict)
    """Machines of one's own by name, to plan for with `smtrain plan --machines NAME:COUNT` (docs/gpus.md)."""
    local: Local = Local()
    """What the hosts of jobs are on this machine."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of every job, as key: value. Everyone who may describe the job can read them."""

    @property
    def processes_per_instance(self) -> int:
        """Training processes on each host of the train stage."""
        row = instance(self.compute.instance_type)
        return self.compute.processes_per_instance or (row["cores"] if row else 1)

    @property
    def world_size(self) -> int:
        """Training processes in all."""
        return self.compute.instance_count * self.processes_per_instance

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.parallel.dp or max(1, self.world_size // (self.parallel.tp * self.parallel.pp))

    def for_stage(self, stage: Stage) -> dict[str, Any]:
        """The keys that decide what a stage does inside its container: its config file, and its identity.

        A stage whose keys are unchanged need not run again, so nothing else may go in: changing `train.lr` must
        not tokenize the text anew.
        """
        full = self.model_dump(mode="json")
        keys: dict[Stage, list[str]] = {
            "fetch": ["model.path", "model.token"],
            "prepare": ["model.path", "model.token", "data", "train.seq_len", "train.objective"],
            "convert": ["model.path", "parallel.tp", "parallel.pp"],
            "compile": ["name", "model.path", "data.sources", "data.document_mask", "parallel", "train"],
            "train": [
                "name",
                "model.path",
                "model.init",
                "data.sources",
                "data.document_mask",
                "parallel",
                "train",
                "checkpoint",
            ],
            "export": ["model.path"],
            "generate": ["model.path", "generate", "train.objective"],
            "evaluate": ["model.path", "evaluate"],
        }
        kept: dict[str, Any] = {}
        for key in keys[stage]:
            section, _, field = key.partition(".")
            if field:
                kept.setdefault(section, {})[field] = full[section][field]
            else:
                kept[section] = full[section]
        if stage in ("fetch", "convert", "train") and self.model.weights is not None:
            kept["model"]["weights"] = self.model.weights
        kept.get("train", {}).pop("max_global_batch_size", None)  # what was chosen by it counts
        if stage == "prepare":  # weights are the loader's: another mixture of the same tokens; so is the mask
            kept["data"]["sources"] = [{"path": source["path"]} for source in kept["data"]["sources"]]
            for key in ("document_mask", "machines", "spot"):  # the bytes are the same for any number of machines
                del kept["data"][key]
            if kept["data"]["encoding"] is None:  # as jobs were called before there was the key
                del kept["data"]["encoding"]
        held_out = self.train.validation
        if held_out is None or stage == "compile":  # no graph of a step depends on it
            kept.get("train", {}).pop("validation", None)
        if stage == "prepare" and held_out and held_out.chosen:
            kept["train"]["validation"] = held_out.chosen
        if stage == "compile":  # no weight changes a graph
            kept["model"]["init"], kept["train"]["steps"] = "scratch", TRACED_STEPS
        if stage == "train":  # a default takes no part in the identity of jobs begun before there was the key
            for key, default in (("verify", "full"), ("step", None)):
                if kept["checkpoint"][key] == default:
                    del kept["checkpoint"][key]
        if "train" in kept and kept["train"].get("adapter", 0) is None:
            del kept["train"]["adapter"]
        if stage in ("export", "generate"):  # defaults take no part in the identity of jobs made before the keys
            given = {"merge": self.export.merge and bool(self.train.adapter), "checkpoint": self.export.checkpoint}
            given["megatron"] = self.export.megatron
            written = {key: value for key, value in given.items() if value not in (False, "newest")}
            kept |= {"export": written} if written else {}
        if stage in ("compile", "train"):
            kept["parallel"]["dp"] = self.dp
            kept["compute"] = {
                "instance_count": self.compute.instance_count,
                "instance_type": self.compute.instance_type,
                "processes_per_instance": self.processes_per_instance,
            }
        return kept


VALIDATION_CHANNEL = "validation"
"""The prepare stage's input channel of `train.validation.path`."""


def text_channels(config: JobConfig) -> list[str]:
    """The prepare stage's input channel of each source: `text`, or `text_0`, `text_1`... of several."""
    return [f"text_{i}" for i in range(len(config.data.sources))] or ["text"]


def digest(value: Any) -> str:
    """sha256 (hex) of a JSON value in its one canonical spelling."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
