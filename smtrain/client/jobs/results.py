"""A job's results in S3 (model, checkpoints, metrics): find and copy them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from smtrain.client.backends.sagemaker.downloads import download
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.near import hint
from smtrain.core.protocol.requests import stage_of

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

What = Literal["model", "checkpoints", "metrics", "all"]
_KINDS: tuple[What, ...] = ("model", "checkpoints", "metrics")
_HELD = {
    "model": "a model, nor any other file, in /opt/ml/model",
    "checkpoints": "a whole checkpoint",
    "metrics": "metrics in /opt/ml/output/data, which SageMaker copies when the job has ended",
}


@dataclass(frozen=True)
class ResultPart:
    """One S3 prefix (or one archive) of a job's results, and its folder relative to the chosen one."""

    uri: str
    folder: str = ""


def parts(job: Job, what: What, told: dict[str, Any] | None = None) -> list[ResultPart]:
    """The existing results of one kind. `told` is the job's last description."""
    told = told or job.describe()
    if what == "all":
        return [ResultPart(p.uri, f"{kind}/{p.folder}".rstrip("/")) for kind in _KINDS for p in parts(job, kind, told)]
    if what == "checkpoints":
        return [ResultPart(uri, uri.rstrip("/").rpartition("/")[2]) for uri in job.saved(told)]
    base = f"{told['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{job.name}/output"
    folder, archive = ("model", "model.tar.gz") if what == "model" else ("data", "output.tar.gz")
    return [ResultPart(uri) for uri in (f"{base}/{folder}/", f"{base}/{archive}") if job.target.listing(uri)]


def fetch(job: Job, folder: str | Path, what: What, *, overwrite: bool = False) -> Path:
    """Copy one kind of result into `folder`; `all` makes a folder for each kind.

    Checkpoints are copied completely, one folder a step. Raises `JobError` if the job left nothing of that kind, or if,
    without `overwrite`, other files would be replaced.
    """
    if not str(folder):
        raise JobError("the folder to download into is an empty name; name one (`.` is the working directory)")
    if what not in get_args(What):
        raise ConfigError([f"what: got {what!r}; {hint(str(what), get_args(What))}"])
    told = job.describe()
    found = parts(job, what, told)
    if not found:
        raise JobError(_nothing(job, what, told))
    download(job.target, [(part.uri, Path(folder, part.folder)) for part in found], overwrite=overwrite)
    return Path(folder)


def exported(job: Job, told: dict[str, Any]) -> str | None:
    """The name of the job that exported the model of an ended train job; None if it was not exported yet."""
    ours, ended = stage_of(job.name), told.get("TrainingEndTime")
    if ours is None or ours[1] != "train" or ended is None:
        return None
    rows = (row for page in job.target.rows(f"{ours[0]}-export-", 1000) for row in page)
    done = (row for row in rows if row["TrainingJobStatus"] == "Completed" and row["CreationTime"] >= ended)
    return next((name for row in done if stage_of(name := row["TrainingJobName"]) == (ours[0], "export")), None)


def _nothing(job: Job, what: What, told: dict[str, Any]) -> str:
    if what == "all":
        return f"{job.name} has left nothing yet; `smtrain status {job.name}` shows where it stands"
    sentence = f"{job.name} has not left {_HELD[what]}"
    if what == "model" and (export := exported(job, told)):
        return f"{sentence}; {export} exported what it trained: `smtrain download {export} FOLDER`"
    if others := [kind for kind in _KINDS if kind != what and parts(job, kind, told)]:
        sentence += f"; it has left {' and '.join(others)}: `smtrain download {job.name} FOLDER --what {others[0]}`"
    if what == "model" and (ours := stage_of(job.name)) and ours[1] == "train":
        sentence += "; `smtrain run CONFIG` exports the model"
    return sentence
