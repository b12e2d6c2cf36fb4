"""The result of a run: its stages, its losses, its model, its texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import jobs_of
from smtrain.client.jobs.results import ResultKind
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.units import spell
from smtrain.core.errors import JobError, first_line
from smtrain.core.files import parse_json
from smtrain.core.public_api import public_class

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
    """True if the stage had been done before."""


@public_class
@dataclass
class Run:
    """A whole run: its stages, its losses, its model, its text."""

    config: JobConfig
    results: list[StageResult] = field(default_factory=list)

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
        attempts = jobs_of(target, self.config.name, "train")
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
        name, run = self.config.name, [result for result in self.results if not result.skipped]
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
        """Prompt and completion of each generated text."""
        job = self.job("generate")
        try:
            texts: list[dict[str, str]] = parse_json(job.read("generation.json"))
        except ValueError as error:
            raise JobError(
                f"generation.json of {job.name} is damaged ({first_line(error)}); generate again"
            ) from None
        return texts
