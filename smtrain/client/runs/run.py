"""The result of a run: its stages, its losses, its model, its texts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from smtrain.client.backends.choose import backend_of_job
from smtrain.client.backends.sagemaker.retry import short_patience
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import jobs_of, newest_by_stage
from smtrain.client.jobs.results import ResultKind
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.units import spell
from smtrain.core.errors import JobError, first_line
from smtrain.core.files import parse_json
from smtrain.core.protocol.requests import stage_of
from smtrain.core.public_api import public_class
from smtrain.core.targets import TargetName

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class StageResult:
    """The result of one stage of a run."""

    stage: Stage
    job: Job
    seconds: float
    output: str
    skipped: bool
    """True if the call that returned the run found the stage done."""


@public_class
class Run:
    """A whole run: its stages, its losses, its model, its text.

    Args:
        source: The name of a run, or of one of its jobs, whose newest job of each stage counts. Or
            a config, for a run whose stages are added to `results`.
        target: the name of a target. Default: the one that has a run of that name,
            first here, then on AWS.

    Raises:
        JobError: There is no such run.

    Examples:
        >>> run = smtrain.Run("llama-train-1a2b3c4d")
        >>> [result.stage for result in run.results]
        ['prepare', 'convert', 'train', 'export', 'generate']
        >>> len(run.loss)
        6
        >>> run.config.train.steps
        6
    """

    def __init__(self, source: JobConfig | str, target: TargetName | None = None) -> None:
        """Find the stages of a run by its name; a config has none yet."""
        self.results: list[StageResult] = []
        """The result of each stage, in the order of the run."""
        if isinstance(source, JobConfig):
            self.name: str = source.name
            self._config: JobConfig | None = source
            return
        name, place = backend_of_job(source, target)
        self.name, self._config = (stage_of(name) or (name, ""))[0], None
        jobs = newest_by_stage(place, self.name)
        if not jobs:
            place.describe(
                name, short_patience(place.name)
            )  # its sentence about an unknown job has a similar name
            raise JobError(
                f"{name} is a job that belongs to no run; `smtrain.Job({name!r})` shows it",
                code="job.not_found",
            )
        self.results = [_result(stage, job) for stage, job in jobs.items()]

    def __repr__(self) -> str:
        stages = ", ".join(result.stage for result in self.results) or "no stage yet"
        return f"<smtrain.Run {self.name}: {stages}>"

    @property
    def config(self) -> JobConfig:
        """The config of the run; of a run that was found by its name, the one that its jobs keep.

        Raises `JobError` if its jobs keep none that this version reads.
        """
        if self._config is None:
            from smtrain.client.config.load import draft
            from smtrain.client.runs.config_of_jobs import config_of_jobs, original_config

            place = self.results[0].job.target
            jobs = {result.stage: result.job.describe() for result in self.results}
            raw, _ = original_config(config_of_jobs(self.name, place, jobs), place)
            config_draft = draft(raw)
            if config_draft.config is None or config_draft.left_out:
                raise JobError(
                    f"the jobs of {self.name} keep no config that this version reads; load its file"
                    " with smtrain.load_config"
                )
            self._config = config_draft.config
        return self._config

    def job(self, stage: Stage) -> Job:
        """The job of a stage; raises `JobError` for a stage the run does not have."""
        for result in self.results:
            if result.stage == stage:
                return result.job
        raise JobError(
            f"this run has no stage {stage}; it has {', '.join(r.stage for r in self.results)}"
        )

    @property
    def loss(self) -> list[float]:
        """Loss by step, over every attempt at the train stage."""
        return [record["loss"] for record in self.records if "loss" in record]

    @property
    def records(self) -> list[dict[str, float]]:
        """Every logged step's numbers, over every attempt at the train stage."""
        target = self.job("train").target
        attempts = jobs_of(target, self.name, "train")
        by_step = {record["step"]: record for job in reversed(attempts) for record in job.records}
        return [by_step[step] for step in sorted(by_step)]

    def metrics(self) -> DataFrame:
        """`records` as a pandas DataFrame by step."""
        from smtrain.client.follow.curve import frame

        return frame(self.records)

    @property
    def model(self) -> str:
        """s3:// prefix of the exported Hugging Face model."""
        return self.job("export").output

    def summary(self, folder: str | Path | None = None) -> str:
        """The result of the run in lines: loss, time, the model's place, and commands to use it.

        `folder` is the copy of the model, if one was made.
        """
        name, run = self.name, [result for result in self.results if not result.skipped]
        took, earlier_count = (
            spell(sum(result.seconds for result in run)),
            len(self.results) - len(run),
        )
        further = (
            f"smtrain push {folder} YOU/{name}" if folder else f"smtrain download {name} FOLDER"
        )
        lines = [
            *self._first_and_last("loss", "loss"),
            *self._first_and_last("validation", "val_loss"),
            (
                "time",
                took
                + (
                    f"; {earlier_count} of {len(self.results)} stages were done before"
                    if earlier_count
                    else ""
                ),
            ),
            ("model", str(folder or self.model)),
            ("next", f"smtrain chat {name}"),
            ("", f"smtrain report {name}"),
            ("", further),
        ]
        return "\n".join(f"{label + ':' if label else '':12}{text}" for label, text in lines)

    def _first_and_last(self, label: str, key: str) -> list[tuple[str, str]]:
        """The first and last value of one of a step's numbers, if it has any."""
        records = [record for record in self.records if key in record]
        if not records:
            return []
        first, last = records[0], records[-1]
        return [
            (
                label,
                (
                    f"{first[key]:.4f} -> {last[key]:.4f} (steps {first['step']:.0f} to"
                    f" {last['step']:.0f})"
                ),
            )
        ]

    def download(
        self, folder: str | Path, what: ResultKind = "model", *, overwrite: bool = False
    ) -> Path:
        """Copy the exported Hugging Face model into `folder`; returns the folder.

        `checkpoints` and `metrics` are those of the train stage's last job, as `Job.download` has
        them; `all` makes a folder of each. Other files are replaced only with `overwrite`.
        """
        if what == "model":
            return self.job("export").download(folder, overwrite=overwrite)
        if what == "all":
            self.job("export").download(Path(folder) / "model", overwrite=overwrite)
            for kind in ("checkpoints", "metrics"):
                self.job("train").download(Path(folder) / kind, kind, overwrite=overwrite)
            return Path(folder)
        return self.job("train").download(folder, what, overwrite=overwrite)

    @property
    def texts(self) -> list[dict[str, str]]:
        """Prompt and completion of each generated text; empty for a run without stage generate."""
        if all(result.stage != "generate" for result in self.results):
            return []
        job = self.job("generate")
        try:
            texts: list[dict[str, str]] = parse_json(job.read("generation.json"))
        except ValueError as error:
            raise JobError(
                f"generation.json of {job.name} is damaged ({first_line(error)}); generate again"
            ) from None
        return texts


def _result(stage: Stage, job: Job) -> StageResult:
    """The result of a stage whose job exists already; its seconds count from the job's creation."""
    description = job.describe()
    end = description.get("TrainingEndTime") or datetime.now(timezone.utc)
    checkpoints = description.get("CheckpointConfig", {}).get("S3Uri")
    output = checkpoints if stage == "train" and checkpoints else job.output
    seconds = (end - description["CreationTime"]).total_seconds()
    return StageResult(stage, job, seconds, output, skipped=False)
