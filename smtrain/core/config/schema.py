"""`JobConfig`: typed, frozen, without unknown keys; each section has its module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from smtrain.core.config.cluster import Cluster
from smtrain.core.config.compute import Compute, Local, MachineEntry, MachineName, Network
from smtrain.core.config.data import Data
from smtrain.core.config.kubernetes import Kubernetes
from smtrain.core.config.outputs import Checkpoint, Evaluate, Export, Generate, Notify, Output
from smtrain.core.config.pai import Pai
from smtrain.core.config.section import Section
from smtrain.core.config.track import Track
from smtrain.core.config.training import Model, Parallel, Train
from smtrain.core.facts.engines import cores_of, lnc_of
from smtrain.core.model.extension import extend_rope
from smtrain.core.targets import GRACE, TARGETS, TargetName

Stage = str
"""Name of a stage; smtrain.stages describes each."""
# In a cache of compiled graphs: written when all graphs of a config are in it.
GRAPHS_COMPLETE = "smtrain-complete.json"
TRACED_STEPS = 10  # what AWS advises for the run in which neuron_parallel_compile sees the graphs


def _or_auto(schema: dict[str, Any]) -> None:
    """Allow the word auto for `parallel` in a file, which is the default on AWS; loading replaces
    it by the planner's mesh.
    """
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"const": "auto"}]


def is_of_aws(machine: str) -> bool:
    """Whether the name of a machine is a type of AWS's, which `machines` may describe too."""
    return machine.startswith("ml.")


class JobConfig(Section):
    """A run from text to a trained model; each stage reads its part."""

    name: str = Field("smtrain", pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,35}$")
    """Name of the run, at most 36 characters: its jobs and its folder in S3 begin with it."""
    target: TargetName = "local"
    """Backend of the jobs: `local` is this machine, `aws` SageMaker, `slurm` the cluster of section
    cluster, `pai-dlc` Alibaba Cloud, `kubernetes` a cluster of pods; `--target` overrides it.
    """
    model: Model
    """The model that training starts from."""
    data: Data = Data()
    """The text and how to read it."""
    parallel: Parallel = Field(Parallel(), json_schema_extra=_or_auto)
    """Division of the model over processes; the word `auto` lets the planner choose the fastest
    that fits.
    """
    train: Train = Train()
    """The training itself: how long, how large, how fast it learns."""
    compute: Compute = Compute()
    """The machines, and for how long."""
    cluster: Cluster = Cluster()
    """A Slurm cluster, for target slurm."""
    pai: Pai = Pai()
    """Alibaba Cloud PAI-DLC, for target pai-dlc."""
    kubernetes: Kubernetes = Kubernetes()
    """A Kubernetes cluster, for target kubernetes."""
    checkpoint: Checkpoint = Checkpoint()
    """The training checkpoints, and what a resume reads."""
    output: Output = Output()
    """The destination of results."""
    export: Export = Export()
    """Options of stage export."""
    generate: Generate = Generate()
    """Prompts for the exported model."""
    evaluate: Evaluate = Evaluate()
    """Evaluation of the exported model and the base model."""
    track: Track = Track()
    """Trackers of the training curves: TensorBoard, MLflow, Weights & Biases."""
    notify: Notify = Notify()
    """Notifications when the run ends."""
    network: Network = Network()
    """VPC and isolation."""
    machines: dict[MachineName, MachineEntry] = Field(default_factory=dict)
    """Machines of your own by name, to plan for with `smtrain plan --machines NAME:COUNT`, and new
    types of AWS's by theirs, such as ml.p7.48xlarge, to run on (smtrain help gpus).
    """
    local: Local = Local()
    """The hosts of jobs on this machine."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of every job, as key: value. Anyone who may describe the job can read them."""

    @property
    def processes_per_instance(self) -> int:
        """Training processes on each host of the train stage."""
        compute, machine = self.compute, self.own_machine
        cores = machine.devices if machine else cores_of(compute.instance_type, compute.environment)
        return compute.processes_per_instance or cores

    @property
    def lnc(self) -> int:
        """Physical cores behind each Neuron core of the train stage."""
        return lnc_of(self.compute.instance_type, self.compute.environment)

    @property
    def own_machine(self) -> MachineEntry | None:
        """The entry of `machines` that `compute.instance_type` names; None if it is one of
        SageMaker's types.
        """
        return self.machines.get(self.compute.instance_type)

    @property
    def target_section(self) -> Section | None:
        """The section that describes the target; None if the target has none."""
        section = TARGETS[self.target].section
        return getattr(self, section) if section else None

    @property
    def has_own_machine(self) -> bool:
        """Whether it trains on the user's entry of `machines`, not on an instance type of AWS."""
        return self.own_machine is not None and not is_of_aws(self.compute.instance_type)

    @property
    def own_command(self) -> str | None:
        """The user's command that a run's only stage runs instead of smtrain's training."""
        return getattr(self.target_section, "command", None)

    @property
    def stop_grace(self) -> int:
        """Seconds between SIGTERM and SIGKILL: SageMaker's 120, or what the config asks for."""
        return getattr(self.target_section, "grace", GRACE)

    @property
    def world_size(self) -> int:
        """Training processes in all."""
        return self.compute.instance_count * self.processes_per_instance

    @property
    def needs_attention_mask(self) -> bool:
        """Whether attention stays within the samples or documents of a row, which takes masks."""
        return self.train.objective != "pretrain" or self.data.document_mask

    def extend_rope(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model's config.json with model.rope, as the run trains it.

        Raises `ConfigError` if that cannot be.
        """
        if self.model.rope is None:
            return dict(config)
        return extend_rope(config, self.model.rope.settings, self.train.seq_len)

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.parallel.dp or max(
            1, self.world_size // (self.parallel.tp * self.parallel.pp * self.parallel.cp)
        )

    @property
    def shards(self) -> int:
        """Processes that hold the same parameters and share the optimizer's state: dp x cp."""
        return self.dp * self.parallel.cp

    @property
    def mesh_words(self) -> str:
        """The mesh for people: tp 8 x pp 2 x dp 4, with cp, ep and stages if they are not the usual
        ones.
        """
        long = f" x cp {self.parallel.cp}" if self.parallel.cp > 1 else ""
        experts = f", ep {self.parallel.ep}" if self.parallel.ep > 1 else ""
        layers = self.parallel.layers_per_stage
        stages = f", stages of {' + '.join(map(str, layers))} layers" if layers else ""
        shard = ", shard full" if self.parallel.shard == "full" else ""
        mesh = f"tp {self.parallel.tp} x pp {self.parallel.pp}{long} x dp {self.dp}"
        return f"{mesh}{experts}{shard}{stages}"


VALIDATION_CHANNEL, TESTS_CHANNEL, LANGUAGE_CHANNEL = "validation", "tests", "language"
"""The prepare stage's input channels of `train.validation.path`, `data.decontaminate.path`,
`data.language.model`.
"""


def other_inputs(config: JobConfig) -> list[tuple[str, str, str]]:
    """(key, channel, path) of each input of stage prepare other than the model and the text to
    train on.
    """
    held_out, tests, language = (
        config.train.validation,
        config.data.decontaminate,
        config.data.language,
    )
    inputs = [
        ("train.validation.path", VALIDATION_CHANNEL, held_out and held_out.path),
        ("data.decontaminate.path", TESTS_CHANNEL, tests and tests.path),
        ("data.language.model", LANGUAGE_CHANNEL, language and language.model),
    ]
    return [(key, channel, path) for key, channel, path in inputs if path]


def with_inputs(config: JobConfig, place: Callable[[str, str], str]) -> JobConfig:
    """The config with place(channel, path) for the path of each of `other_inputs`."""
    for key, channel, path in other_inputs(config):
        config = _with_value(config, key.split("."), place(channel, path))
    return config


def _with_value(section: Any, keys: list[str], value: str) -> Any:
    """The section with another value of the key that `keys` lead to."""
    key, *inner_keys = keys
    inner = _with_value(getattr(section, key), inner_keys, value) if inner_keys else value
    return section.model_copy(update={key: inner})


def inputs_of(config: JobConfig) -> list[tuple[str, str]]:
    """(key, path) of everything that the stages of a run read: models, text, tests, prepared data,
    tasks.
    """
    reference = config.train.preference.folder if config.train.preference else None
    inputs = [
        ("model.path", config.model.path),
        ("model.weights", config.model.weights),
        ("train.dpo.reference", reference),
        ("data.prepared", config.data.prepared),
        ("evaluate.data", config.evaluate.data),
        ("evaluate.text", config.evaluate.text),
        *((config.data.text_key, source.path) for source in config.data.all_sources),
        *((key, path) for key, _, path in other_inputs(config)),
    ]
    return [(key, path) for key, path in inputs if path]


def text_channels(config: JobConfig) -> list[str]:
    """The prepare stage's input channel of each source: `text`, or `text_0`, `text_1`... of
    several.
    """
    return [f"text_{i}" for i in range(len(config.data.sources))] or ["text"]


FILE = Path(__file__).with_name("smtrain.schema.json")
"""Made by scripts/config-reference."""


def schema_text() -> str:
    """The JSON Schema of a config, as `FILE` holds it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **JobConfig.model_json_schema(),
    }
    return json.dumps(schema, indent=2) + "\n"
