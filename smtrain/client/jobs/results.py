"""A job's results in S3 (model, checkpoints, metrics): find and copy them."""

from __future__ import annotations

import filecmp
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from smtrain.client.backends.base import Backend
from smtrain.core.config import textfiles
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.files import only_writer
from smtrain.core.protocol.requests import stage_of
from smtrain.core.protocol.uris import split_uri
from smtrain.core.suggest import hint

if TYPE_CHECKING:
    from smtrain.client.jobs.job import Job

ResultKind = Literal["model", "checkpoints", "metrics", "all"]
_KINDS: tuple[ResultKind, ...] = ("model", "checkpoints", "metrics")
_OF_A_MODEL = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*.json",
    "*.jinja",
)
"""Files that libraries load from the folder of a model without being told their names."""
_RESULT_NAMES = {
    "model": "a model, nor any other file, in /opt/ml/model",
    "checkpoints": "a whole checkpoint",
    "metrics": "metrics in /opt/ml/output/data, which SageMaker copies when the job has ended",
}


@dataclass(frozen=True)
class ResultPart:
    """One S3 prefix (or one archive) of a job's results, and its folder relative to the chosen
    one.
    """

    uri: str
    folder: str = ""


def parts(
    job: Job, result_kind: ResultKind, description: dict[str, Any] | None = None
) -> list[ResultPart]:
    """The existing results of one kind. `description` is the job's last description."""
    description = description or job.describe()
    if result_kind == "all":
        return [
            ResultPart(p.uri, f"{kind}/{p.folder}".rstrip("/"))
            for kind in _KINDS
            for p in parts(job, kind, description)
        ]
    if result_kind == "checkpoints":
        return [
            ResultPart(uri, uri.rstrip("/").rpartition("/")[2])
            for uri in job.checkpoint_uris(description)
        ]
    base = f"{description['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{job.name}/output"
    folder, archive = (
        ("model", "model.tar.gz") if result_kind == "model" else ("data", "output.tar.gz")
    )
    return [
        ResultPart(uri)
        for uri in (f"{base}/{folder}/", f"{base}/{archive}")
        if job.target.listing(uri)
    ]


def fetch(
    job: Job, folder: str | Path, result_kind: ResultKind, *, overwrite: bool = False
) -> Path:
    """Copy one kind of result into `folder`; `all` makes a folder for each kind.

    Checkpoints are copied completely, one folder a step. Raises `JobError` if the job left nothing
    of that kind, if another process writes there, or if, without `overwrite`, other files would be
    replaced.
    """
    if not str(folder):
        raise JobError(
            "the folder to download into is an empty name; name one (`.` is the working directory)"
        )
    if result_kind not in get_args(ResultKind):
        raise ConfigError(
            f"what: got {result_kind!r}; {hint(str(result_kind), get_args(ResultKind))}",
            code="config.wrong_value",
        )
    description = job.describe()
    results = parts(job, result_kind, description)
    if not results:
        raise JobError(_explain_no_result(job, result_kind, description))
    if Path(folder).is_file():
        raise JobError(f"{folder} is a file; name a folder to download into")
    _refuse_folder_of_text(job, Path(folder))
    places = [(part.uri, Path(folder, part.folder)) for part in results]
    is_new_folder = not Path(folder).exists()
    try:
        with only_writer(Path(folder), JobError, Path(folder, ".lock")):
            download(job.target, places, overwrite=overwrite)
    except BaseException:
        if is_new_folder:
            with suppress(OSError):  # it has files, which the next call keeps
                Path(folder).rmdir()
        raise
    return Path(folder)


def _refuse_folder_of_text(job: Job, folder: Path) -> None:
    """Raise `JobError` for tokens that would be written among the files of a text."""
    if (
        (stage_of(job.name) or ("", ""))[1] != "prepare"
        or not folder.is_dir()
        or (folder / "manifest.json").exists()
    ):
        return
    if texts := [name for name, _ in textfiles.choose_in(folder, "auto")[0].read]:
        raise JobError(
            f"{folder} holds text ({texts[0]}), and {job.name} left tokens; name another folder,"
            f" such as {folder.parent / f'{folder.resolve().name}-tokens'}"
        )


def export_job_name(job: Job, description: dict[str, Any]) -> str | None:
    """The name of the job that exported the model of an ended train job; None if it was not
    exported yet.
    """
    run_and_stage, end_time = stage_of(job.name), description.get("TrainingEndTime")
    if run_and_stage is None or run_and_stage[1] != "train" or end_time is None:
        return None
    rows = (row for page in job.target.rows(f"{run_and_stage[0]}-export-", 1000) for row in page)
    exports = (
        row
        for row in rows
        if row["TrainingJobStatus"] == "Completed" and row["CreationTime"] >= end_time
    )
    return next(
        (
            name
            for row in exports
            if stage_of(name := row["TrainingJobName"]) == (run_and_stage[0], "export")
        ),
        None,
    )


def _explain_no_result(job: Job, result_kind: ResultKind, description: dict[str, Any]) -> str:
    if result_kind == "all":
        return f"{job.name} has left nothing yet; `smtrain status {job.name}` shows its state"
    sentence = f"{job.name} has not left {_RESULT_NAMES[result_kind]}"
    if result_kind == "model" and (export := export_job_name(job, description)):
        return f"{sentence}; {export} exported its model: `smtrain download {export} FOLDER`"
    if other_kinds := [
        kind for kind in _KINDS if kind != result_kind and parts(job, kind, description)
    ]:
        sentence += (
            f"; it has left {' and '.join(other_kinds)}: `smtrain download {job.name} FOLDER --what"
            f" {other_kinds[0]}`"
        )
    if (
        result_kind == "model"
        and (run_and_stage := stage_of(job.name))
        and run_and_stage[1] == "train"
    ):
        sentence += "; `smtrain run CONFIG` exports the model"
    return sentence


@dataclass(frozen=True)
class _Item:
    uri: str
    """The prefix that it was listed under."""
    bucket: str
    key: str
    size: int
    etag: str
    folder: Path
    path: Path

    @property
    def part(self) -> Path:
        return self.path.with_name(f".{self.path.name}.part")


class _Fetching:
    """Copies objects, some of which may be deleted meanwhile."""

    def __init__(self, target: Backend) -> None:
        self._target = target
        self._left: dict[str, set[str]] = {}
        """Prefix -> the keys that were there when it was listed last."""

    def __call__(self, item: _Item) -> bool:
        """Copy it to its temporary file; False if it was deleted after it was listed."""
        try:
            self._target.fetch(item.bucket, item.key, item.part)
        except Exception:
            if not self._is_gone(item):
                raise
            item.part.unlink(missing_ok=True)
            return False
        return True

    def _is_gone(self, item: _Item) -> bool:
        if (
            item.uri not in self._left or item.key in self._left[item.uri]
        ):  # the last listing still had it: list again
            self._left[item.uri] = {object_["Key"] for object_ in self._target.listing(item.uri)}
        return item.key not in self._left[item.uri]


def download(
    target: Backend,
    places: Sequence[tuple[str, Path]],
    *,
    overwrite: bool = False,
    is_wanted: Callable[[str], bool] = lambda _: True,
) -> int:
    """Copy the objects under each prefix into its folder, each atomically; returns how many there
    are.

    `is_wanted` chooses among the objects by their paths below the prefix.

    Existing files with the same content are kept, so a second call resumes the first. Objects that
    a running job deletes meanwhile, such as old checkpoints, are skipped, together with what this
    call has copied of their folder. Raises `JobError` if there are no objects, if a key would leave
    its folder, if a folder holds other parts of a model and, unless `overwrite`, if other files
    have the same names; it checks this before it writes anything. Raises it also if objects
    change meanwhile.
    """
    fetch = _Fetching(target)
    items = [
        item
        for uri, folder in places
        for item in _items(target, uri, folder)
        if is_wanted(item.path.relative_to(folder).as_posix())
    ]
    _refuse_what_is_in_the_way(items)
    _refuse_mixture(items)
    existing_items = [item for item in items if item.path.exists()]
    same_items = {item for item in existing_items if _is_same(item)}
    if not overwrite:
        differing_items = [item for item in existing_items if item not in same_items]
        _refuse_others([item for item in differing_items if item.path.stat().st_size != item.size])
        different = []
        for item in (
            differing_items
        ):  # of the same size: S3 has no hash of an object that was sent in parts
            if not fetch(item):
                continue
            if filecmp.cmp(item.part, item.path, shallow=False):
                same_items.add(item)
            else:
                different.append(item)
            item.part.unlink()
        _refuse_others(different)
    new = [item for item in items if item not in same_items]
    for item in new:  # all of them first, or a kill would leave a mixture of old and new files
        item.path.unlink(missing_ok=True)
    complete = True
    for item in new:
        item.path.parent.mkdir(parents=True, exist_ok=True)
        if fetch(item):
            item.part.replace(item.path)
        else:
            complete = False
    if not new:
        return len(items)
    remaining_objects = {
        object_["Key"]: object_ for uri, _ in places for object_ in target.listing(uri)
    }
    _refuse_changed(remaining_objects, new)
    return len(items) if complete else len(items) - _drop_deleted(remaining_objects, places, new)


def _drop_deleted(
    remaining_objects: Mapping[str, Any], places: Sequence[tuple[str, Path]], new: Sequence[_Item]
) -> int:
    """Delete copies of objects that are gone from S3, so that no incomplete folder stays; returns
    how many.

    `remaining_objects` are the objects that are there, by key.
    """
    deleted_items = [item for item in new if item.key not in remaining_objects]
    for item in deleted_items:
        item.path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds more
            item.path.parent.rmdir()
    if not remaining_objects:
        raise JobError(
            f"{places[0][0]} was deleted while it was being copied; there is nothing to download"
        )
    return len(deleted_items)


def _items(target: Backend, uri: str, folder: Path) -> list[_Item]:
    bucket, prefix = split_uri(uri)
    items = []
    for object_ in target.listing(uri):
        name = (
            object_["Key"][len(prefix) :].lstrip("/") or object_["Key"].rpartition("/")[2]
        )  # the prefix is an object
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise JobError(f"{object_['Key']}: points outside {folder}; not downloaded")
        items.append(
            _Item(uri, bucket, object_["Key"], object_["Size"], _etag(object_), folder, path)
        )
    if not items:
        raise JobError(f"{uri} is empty; there is nothing to download")
    return items


def _refuse_what_is_in_the_way(items: Sequence[_Item]) -> None:
    """Raise `JobError` for a folder in place of a file, or the reverse: no option replaces
    those.
    """
    for item in items:
        if item.folder.exists() and not item.folder.is_dir():
            raise JobError(f"{item.folder} is a file; name a folder to download into")
        if item.path.is_dir():
            raise JobError(
                f"{item.path} is a folder, but the download has a file of this name; name another"
                " folder"
            )
        for parent in item.path.parents:
            if parent == item.folder:
                break
            if parent.exists() and not parent.is_dir():
                raise JobError(
                    f"{parent} is a file, but the download has a folder of this name; name another"
                    " folder"
                )


def _refuse_mixture(items: Sequence[_Item]) -> None:
    """Raise `JobError` if a folder that gets weights holds other parts of a model, which would be
    loaded with them.
    """
    new = {item.path for item in items}
    for folder in {path.parent for path in new if path.suffix == ".safetensors"}:
        existing_paths = {path for pattern in _OF_A_MODEL for path in folder.glob(pattern)}
        if foreign_names := sorted(path.name for path in existing_paths - new):
            raise JobError(
                f"{folder} holds parts of another model ({', '.join(foreign_names[:3])}); delete"
                " them, or name another folder"
            )


def _refuse_changed(remaining_objects: Mapping[str, Any], copied_items: Sequence[_Item]) -> None:
    """Raise `JobError` if an object of `remaining_objects` (by key) is no longer what was
    listed before it was copied.
    """
    for item in copied_items:
        current = remaining_objects.get(item.key)
        if current is not None and (current["Size"], _etag(current)) != (item.size, item.etag):
            raise JobError(
                f"{item.uri} changed while it was being copied; run the same command again with"
                " --overwrite (overwrite=True)"
            )


def _etag(object_: dict[str, Any]) -> str:
    return str(object_.get("ETag", "")).strip('"')


def _refuse_others(different: Sequence[_Item]) -> None:
    if not different:
        return
    folder = different[0].folder
    names = ", ".join(item.path.relative_to(item.folder).as_posix() for item in different[:3])
    suffix = f" and {len(different) - 3} more" if len(different) > 3 else ""
    raise JobError(
        f"{folder} holds other files of the same names ({names}{suffix}); name another folder, or"
        " replace them with --overwrite (overwrite=True)"
    )


def _is_same(item: _Item) -> bool:
    """True if the file has the object's content: S3's ETag is the MD5 of an object that was sent in
    one piece.
    """
    of_one_piece = len(item.etag) == 32
    return of_one_piece and item.path.stat().st_size == item.size and item.etag == md5_of(item.path)


def md5_of(path: Path) -> str:
    """The MD5 of a file, which S3 and OSS give as the ETag of an object that was sent in one
    piece.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
