"""The record of a stage, what a stage may ask of its chain, and the URIs of what jobs leave."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from smtrain.core.config import JobConfig
from smtrain.core.config.identity import identity_of
from smtrain.core.model.footprint import PROCESS, width
from smtrain.core.model.shape import ModelShape

CHECKPOINT_PATH = "/opt/ml/checkpoints"
START_S = 300.0
"""Seconds until a machine has started and pulled its image."""


class Inputs(Protocol):
    """The chain that a stage belongs to (`client.launch.stages.Chain`): its config and the other
    stages' outputs.
    """

    config: JobConfig

    @property
    def graphs(self) -> str:
        """s3:// URI of the cache that stage compile fills.

        Raises `ConfigError` if there is nothing to compile.
        """
        ...

    def output(self, stage: str) -> str | None:
        """s3:// prefix that a finished stage left; None if it has not been done."""
        ...

    def need(self, stage: str, upstream: str) -> str:
        """The output of `upstream`. Raises `JobError` if it has not been done."""
        ...

    def has(self, stage: str) -> bool:
        """Whether a run of this config has the stage."""
        ...

    def model(self, stage: str) -> str:
        """s3:// prefix of the model's folder, which stage fetch may have written; it ends in
        "/".
        """
        ...


@dataclass(frozen=True)
class StageNeed:
    """Resources of a stage on one machine."""

    memory: float
    """Bytes; 0 for a stage on accelerators."""
    disk: float
    """Bytes; what a prepare stage writes depends on the text and is not included."""
    seconds: float
    """A rough figure, by the assumptions in core/facts/prices.toml."""
    reads_text: bool = False
    """Whether `seconds` leaves out the text that the stage reads."""
    left_out: str = ""
    """Other work that `seconds` leaves out, as a noun."""


class JobStage:
    """One stage of a run, which is one job.

    A module of this package makes one and calls it STAGE.
    """

    name: ClassVar[str]
    """The module's name; entrypoints/NAME.py runs in the job."""
    follows: ClassVar[str | None] = None
    """The stage that it follows in a run."""
    upstream: ClassVar[tuple[str, ...]] = ()
    """Stages whose identity is part of this one's: if they change, it is another job."""
    on_accelerators: ClassVar[bool] = False
    """It runs on compute.instance_type; other stages run on CPU machines."""
    resumable: ClassVar[bool] = False
    """A further attempt resumes the last one; it is retried, and resubmitted at a cluster's time
    limit.
    """
    is_shared: ClassVar[bool] = True
    """One job serves all trials of a tuning; False if trained keys change its work."""

    def is_needed(self, config: JobConfig, target: str) -> bool:
        """Whether a run of this config has the stage on `target`."""
        return True

    def keys(self, config: JobConfig) -> dict[str, Any]:
        """The config keys that decide what the stage does: its config file and its identity.

        A stage whose keys are unchanged is not run again, so no other key may be in it: another
        `train.lr` must not tokenize the text again.
        """
        raise NotImplementedError

    def identity(self, chain: Inputs) -> object | None:
        """A value that identifies the stage's job in place of its keys; None if the keys do."""
        return None

    def inputs(self, chain: Inputs) -> dict[str, str]:
        """s3:// prefix of each input channel.

        Raises `JobError` if a stage that it reads from has not been done.
        """
        raise NotImplementedError

    def resources(
        self, config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float]
    ) -> StageNeed | None:
        """Memory, disk and time on one machine; None if there is no estimate, as of train, which
        the planner times.

        Weights are converted tensor by tensor, so a conversion holds a few of the largest at a
        time. `assumptions` is the table of assumptions in core/facts/prices.toml.
        """
        return None

    def machines(self, config: JobConfig) -> int:
        """Instances of the job."""
        return 1

    def is_distributed(self, config: JobConfig) -> bool:
        """Whether the machines of the job talk to each other."""
        return self.machines(config) > 1

    def spot(self, config: JobConfig) -> bool:
        """Whether the job runs on spot capacity."""
        return False

    def metrics(self, config: JobConfig, hf_config: Mapping[str, Any] | None) -> tuple[str, ...]:
        """Names of the numbers in its log lines, which CloudWatch and the control plane collect.

        `hf_config` is the model's config.json if it can be read.
        """
        return ()

    def console_values(self, config: JobConfig) -> dict[str, Any]:
        """Hyperparameters for the console's job page; the container reads the config file
        instead.
        """
        return {}

    def extend(self, config: JobConfig, request: dict[str, Any]) -> None:
        """Add what only this stage has to its CreateTrainingJob request."""


def select_keys(config: JobConfig, *keys: str) -> dict[str, Any]:
    """The config's values of `section` and `section.field` keys, as plain values by section.

    A key that was added later (`AddedLater`) is not among them at its default, which has no part in
    a job's name.
    """
    full = identity_of(config)
    values: dict[str, Any] = {}
    for key in keys:
        section, _, field = key.partition(".")
        if not field:
            values[section] = full[section]
        elif field in full[section]:
            values.setdefault(section, {})[field] = full[section][field]
        elif field not in type(getattr(config, section)).model_fields:
            raise KeyError(key)
    return values


def with_export(config: JobConfig, keys: dict[str, Any]) -> dict[str, Any]:
    """`keys` with what section export sets; without an adapter `merge` and `merge_base` do nothing."""
    export_keys = select_keys(config, "export")["export"]
    if not config.train.adapter:
        export_keys.pop("merge", None)
        export_keys.pop("merge_base", None)
    return keys | ({"export": export_keys} if export_keys else {})


def weights_of(config: JobConfig) -> dict[str, str]:
    """The channel of weights that lie apart from the model's folder."""
    weights = config.model.weights
    return {"weights": f"{weights.rstrip('/')}/"} if weights else {}


def keeps_adapter(config: JobConfig) -> bool:
    """Whether the exported model is an adapter, which needs its base model to generate."""
    return config.train.adapter is not None and not config.export.merge


def weights_bytes(config: JobConfig, shape: ModelShape) -> float:
    """Bytes of the model's weights in the precision of training."""
    return float(shape.parameters() * width(config.train.precision))


def moving_seconds(weights: float, assumptions: Mapping[str, float], times: int) -> float:
    """Seconds of a stage that copies `weights` bytes from or to S3 so many times, with the start of
    its machine.
    """
    return START_S + times * weights / (assumptions["s3_gb_per_s"] * 1e9)


def conversion_need(
    config: JobConfig, shape: ModelShape, assumptions: Mapping[str, float], times: int
) -> StageNeed:
    """Resources of a stage that copies all weights `times` times and holds a few of the largest
    tensors in fp32.
    """
    weights = weights_bytes(config, shape)
    return StageNeed(
        PROCESS + 4 * 4.0 * shape.largest, weights, moving_seconds(weights, assumptions, times)
    )


def run_uri(config: JobConfig) -> str:
    """The run's folder in S3, ending in "/"."""
    return f"{(config.output.s3_uri or '').rstrip('/')}/{config.name}/"


def jobs_uri(config: JobConfig) -> str:
    """The prefix below which SageMaker puts `<job>/output/...`."""
    return f"{run_uri(config)}jobs"


def checkpoint_uri(config: JobConfig) -> str:
    """The run's checkpoint prefix.

    It ends in "/", or a sibling whose name begins alike would be synced too.
    """
    return (
        f"{config.checkpoint.s3_uri.rstrip('/')}/"
        if config.checkpoint.s3_uri
        else f"{run_uri(config)}checkpoints/"
    )


def parts_uri(config: JobConfig, job_name: str) -> str:
    """The prefix in which all attempts at a prepare stage keep their finished work."""
    first = re.sub(r"(-prepare-[0-9a-f]{8})-[0-9]+$", r"\1", job_name)
    return f"{run_uri(config)}prepare/{first}/"


def output_uri(config: JobConfig, job_name: str) -> str:
    """The prefix of what a job left in /opt/ml/model."""
    return f"{jobs_uri(config)}/{job_name}/output/model/"
