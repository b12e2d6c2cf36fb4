"""Sections of a config: checkpoints, output, the stages after training, and notifications."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator

from smtrain.core.config.identity import ADDED_LATER, AddedLater
from smtrain.core.config.section import Section

NEEDLE, POSITIONS = LONG_TASKS = ("needle", "loss_by_position")
"""Tasks of stage evaluate that are smtrain's own, for long texts."""


_PACKAGE = r"^arn:aws[a-z-]*:sagemaker:[a-z0-9-]{{9,16}}:\d{{12}}:model-package{}/\S{{1,2048}}$"


class Checkpoint(Section):
    """The training checkpoints."""

    s3_uri: str | None = Field(None, pattern=r"^s3://.+")
    """s3:// prefix of the checkpoints; default: <output.s3_uri>/<name>/checkpoints/."""
    keep: int = Field(2, ge=1)
    """Number of newest checkpoints to keep; the only complete one is never deleted."""
    form: Literal["pt", "xser"] = "pt"
    """Engine nxd: one file per rank (pt), or one per tensor, written by all data-parallel ranks
    (xser).
    """
    asynchronous: bool = False
    """Engine nxd: write in the background; a checkpoint is finished when the next one begins, or at
    the end.
    """
    format: Annotated[Literal["native", "dcp"], ADDED_LATER] = "native"
    """Engine native with parallel.shard: full: smtrain's own files, or the folders of
    torch.distributed.checkpoint that accelerate's FSDP reads (dcp).
    """
    resume: bool = True
    """Resume from the newest complete checkpoint of this run, if there is one."""
    verify: Annotated[Literal["full", "size"], ADDED_LATER] = "full"
    """Before the first step: compare the hash of every file to read with the one written, or
    its size only.
    """
    step: Annotated[int | None, ADDED_LATER] = Field(None, ge=0)
    """Resume from the checkpoint of this step and abandon later ones; default: the newest."""


class Output(Section):
    """The destination of results."""

    s3_uri: str | None = Field(None, pattern=r"^s3://.+")
    """s3:// prefix of everything that runs write; default: s3://<SageMaker's default
    bucket>/smtrain.
    """
    kms_key: str | None = None
    """ID or ARN of the KMS key that encrypts results; default: the bucket's own encryption."""
    model_package_group: str | None = Field(None, pattern=_PACKAGE.format("-group"))
    """ARN of a model package group, in which SageMaker makes a version of the exported model
    (ModelPackageConfig).
    """
    source_model_package: str | None = Field(None, pattern=_PACKAGE.format(""))
    """With model_package_group: ARN of the model package that the training started from."""
    volume_kms_key: str | None = None
    """ID or ARN of the KMS key of the instances' disks; no effect on types with NVMe disks.

    Default: kms_key.
    """


class Export(Section):
    """Options of stage export."""

    checkpoint: Annotated[Literal["newest", "best"], ADDED_LATER] = "newest"
    """Which checkpoint: the newest, or that with the lowest validation loss, which
    train.validation.keep_best keeps.
    """
    merge: Annotated[bool, ADDED_LATER] = False
    """With train.adapter: write the model with the adapter merged into its weights, instead of the
    adapter alone.
    """
    merge_base: Annotated[Literal["dequantized", "original"] | None, ADDED_LATER] = None
    """With train.adapter.quantize and merge: merge into the weights in 4 bits, unpacked again, as
    the adapter was trained (dequantized, the default), or into the model's own weights (original).
    """
    megatron: Annotated[bool, ADDED_LATER] = False
    """Also write the model as Megatron-core's `torch_dist`, in the folder `megatron` next to the
    Hugging Face files.
    """


class Generate(Section):
    """Prompts for the exported model (stage generate)."""

    prompts: tuple[str, ...] = ("Once upon a time",)
    """Prompts to complete, one completion each; with train.objective sft or dpo, questions to
    answer. With [] there is no stage generate.
    """
    max_new_tokens: int = Field(64, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(0.0, ge=0)
    """Randomness of the text: 0 takes the likeliest token each time, 1 follows the model's
    probabilities.
    """


class Evaluate(Section):
    """Evaluation of the exported model and the base model (lm-evaluation-harness)."""

    tasks: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")], ...] = Field(
        (), max_length=20
    )
    """Tasks or groups by name, such as mmlu; without any there is no stage evaluate. `needle` and
    `loss_by_position` are smtrain's own, for long texts (smtrain help validation).
    """
    lengths: Annotated[tuple[int, ...], ADDED_LATER] = Field((), max_length=20)
    """needle and loss_by_position: lengths of the texts in tokens, rising; default: an eighth, a
    quarter, a half and all of the trained model's positions.
    """
    text: Annotated[str | None, AddedLater(("",))] = None
    """Long documents, in every form that data.path takes but hf://: what loss_by_position reads,
    and what needle hides its sentences in; default: sentences of smtrain's own, for needle.
    """
    data: str | None = None
    """A folder or s3:// URI of task YAMLs with their data, or of the files of MMLU, BoolQ, BBH,
    AGIEval, C-Eval or HumanEval, which needs no network; default: the data sets of the hub.
    """
    num_fewshot: int | None = Field(None, ge=0, le=100)
    """Worked examples before each question; default: what the task says (mmlu: 0; published numbers
    use 5).
    """
    limit: int | None = Field(None, ge=1)
    """Questions of each task, of a group's each; default: all."""
    chat_template: bool = False
    """Put the questions in the tokenizer's chat template."""
    batch_size: int = Field(8, ge=1, le=4096)
    """Requests that the model takes at a time."""
    base: bool = True
    """Also evaluate the model that training started from, and compare the two question by question.
    """
    run_generated_code: Annotated[bool, ADDED_LATER] = False
    """Run the code that the model writes for tasks such as humaneval, each program in a confined
    process; such tasks are refused without it.
    """

    @field_validator("lengths")
    @classmethod
    def _rising(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in pairwise((63, *lengths))):
            raise ValueError("rising numbers of at least 64 are needed, such as [2048, 4096, 8192]")
        return lengths

    @property
    def long_tasks(self) -> tuple[str, ...]:
        """The names in `tasks` that are smtrain's own."""
        return tuple(task for task in self.tasks if task in LONG_TASKS)

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """The names in `tasks` that are of lm-evaluation-harness."""
        return tuple(task for task in self.tasks if task not in LONG_TASKS)


Occasion = Literal["finished", "failed", "stopped"]


class Notify(Section):
    """Notifications when a run has finished, or when one of its jobs failed or was stopped."""

    on: tuple[Occasion, ...] = Field(("finished", "failed", "stopped"), min_length=1)
    """The events to notify of."""
    sns: str | None = Field(
        None, pattern=r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:\d{12}:[A-Za-z0-9_-]{1,256}$"
    )
    """ARN of an SNS topic, on AWS: an EventBridge rule sends the jobs' changes of state there, also
    if no command follows them.
    """
    webhook_env: str | None = Field(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of an environment variable that holds the URL to which the following command posts JSON.
    """
    command: tuple[str, ...] = ()
    """A command that the following command starts, with the event as JSON on its standard input."""
