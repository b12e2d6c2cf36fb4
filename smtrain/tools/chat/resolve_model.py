"""Find the model that a word names: a folder, run, job, s3:// prefix or demo:// URI; fetch it if it
is not here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.sagemaker.backend import unknown_run
from smtrain.client.jobs.copies import StoreCopy
from smtrain.core.errors import CheckpointError, JobError
from smtrain.core.files import home, parse_object, read_value
from smtrain.core.model.hf_folder import ADAPTER, folder_of, is_adapter, tokenizer_in
from smtrain.core.model.hf_folder import weights_in as first_of_weights
from smtrain.core.model.remedies import (
    HEAD,
    broken_link,
    file_kind,
    file_misfit,
    folder_misfit,
    misfit,
    missing_shards,
)
from smtrain.core.protocol.uris import OSS, RUN, RUN_NAME, not_here, spelling_fault
from smtrain.core.suggest import near_path
from smtrain.core.targets import TargetName
from smtrain.core.text import Say
from smtrain.core.yaml_text import config_hint
from smtrain.tools.chat.remote_folder import RemoteFolder
from smtrain.worker.checkpoint.huggingface.damage import edited_files
from smtrain.worker.checkpoint.storage import LocalPlace, Place
from smtrain.worker.generation.memory_fit import WEIGHTS, Need, described_in, need_of, weights_in

STORES = ("s3://", OSS)
_OF_CHECKPOINT = re.compile(r"([^/]+/){0,2}manifest\.json|(.*/)?dp_rank_00_tp[^/]*(/.*)?")


@dataclass(frozen=True)
class FoundModel:
    """A Hugging Face folder, an adapter or a checkpoint, here or in an object store."""

    name: str
    model_config: dict[str, Any]
    """Its config.json, or its adapter_config.json."""
    weights: float
    """Bytes of its weights."""
    is_adapter: bool
    folder: Path
    """Its folder on this machine, which `fetch` fills."""
    store_copy: StoreCopy | None = None
    """The copy of a model in an object store; None: it is on this machine."""
    checkpoint: bool = False
    """Whether it is a checkpoint of a training, which `worker.generation.ranks` reads."""
    base: FoundModel | None = None
    """The model with config.json and tokenizer, if a checkpoint has none."""

    @property
    def need(self) -> Need:
        """Memory to hold it."""
        return need_of(self.name, self.weights, {} if self.is_adapter else self.model_config)

    def identity(self) -> list[Any]:
        """Equal for equal content: the files' names, sizes and ETags, or times of the last change
        on this machine.
        """
        if self.store_copy is not None:
            files = [[file, *object_stat] for file, object_stat in self.store_copy.files.items()]
        else:
            stats = (
                (path.relative_to(self.folder), path.stat())
                for path in self.folder.rglob("*")
                if path.is_file()
            )
            files = [[file.as_posix(), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
        return [sorted(files), None if self.base is None else self.base.identity()]

    def fetch(self, say: Say) -> Path:
        """The complete folder; files from an earlier call are not fetched again.

        Says which small files are edited.
        """
        if self.store_copy is not None:
            self._copy(self.store_copy, say)
        if not self.checkpoint and (edited_names := edited_files(self.folder)):
            say(
                f"{', '.join(edited_names)} in {self.folder}"
                f" {'is' if len(edited_names) == 1 else 'are'} not as exported"
            )
        return self.folder

    def _copy(self, store_copy: StoreCopy, say: Say) -> None:
        free, missing_bytes = shutil.disk_usage(home()).free, store_copy.missing_bytes
        subfolder = self.folder.relative_to(store_copy.folder).as_posix()
        uri = store_copy.uri if subfolder == "." else f"{store_copy.uri}{subfolder}/"
        if missing_bytes > free:
            raise JobError(
                f"{uri} holds {missing_bytes / 1e9:,.1f} GB more than is here, and {home()} has"
                f" {free / 1e9:,.1f} GB free; free space there, or set SMTRAIN_HOME to a folder on"
                " another disk",
                code="disk.full",
            )
        if missing_bytes:
            say(f"fetching {missing_bytes / 1e9:,.2f} GB from {uri} into {self.folder}")
        store_copy.fetch()


def find(model: Any, target: TargetName | None = None) -> FoundModel:
    """The model of a folder, a `Run`, a `Job`, the name of one, run://NAME, an s3:// prefix or a
    demo:// URI. Loads nothing.

    Raises `CheckpointError` for a folder that holds no model, `JobError` for a name of no folder,
    and no run or job with an exported model.
    """
    if hasattr(model, "config") and hasattr(model, "results"):
        return _model_of_job(model.job("export"), model.config.name)
    if hasattr(model, "describe") and hasattr(model, "output"):
        return _model_of_job(model, model.name)
    text = folder_of(str(model))
    if hint_uri := not_here(text):
        raise CheckpointError(hint_uri)
    if hint := spelling_fault(text, (*STORES, "demo://", RUN)):
        raise CheckpointError(hint)
    if text.startswith("demo://"):
        from smtrain.core.demo import materialise

        return _local_model(materialise(text), text)
    if text.startswith(RUN):
        return _model_of_name(_run_named(text), target)
    if text.startswith(STORES):
        return _model_in_store(_store(text, target), text, text)
    if not text.strip():
        raise CheckpointError(
            "the model is an empty name; name a folder, a run, a job or an s3:// prefix"
        )
    path = Path(text).expanduser()
    if path.exists():
        return _local_model(path, text)
    if "/" in text or text.startswith("."):
        raise CheckpointError(
            f"{text}: there is no such folder{_hub_hint(text)}", code="model.not_found"
        )
    return _model_of_name(text, target)


def find_trained(model: Any, target: TargetName | None = None, config: Any = None) -> FoundModel:
    """`find`, which also takes checkpoints of engine native or nxd, in a folder or below a URI.

    `config` is the model with their config.json and tokenizer. Raises `CheckpointError` if it is
    needed or not used.
    """
    location = _checkpoints_at(model, target)
    if location is None:
        if config is not None:
            raise CheckpointError(
                f"config: {model} is not a checkpoint, and has its own config.json and tokenizer;"
                " leave this out"
            )
        return find(model, target)
    from smtrain.worker.checkpoint.open import open_weights

    base = None if config is None else find(config, target)
    source = open_weights(location, None if base is None else base.model_config)
    weights_location = source.location
    has_tokenizer = base is None and tokenizer_in(weights_location.files())
    if base is None and not has_tokenizer:
        raise CheckpointError(
            f"{model} is a checkpoint, and has no tokenizer; name the model that training started"
            " from with --config MODEL (config=)",
            code="model.not_found",
        )
    weights = sum(prod(source.shape(name)) * source.dtype(name).itemsize for name in source.names())
    if not isinstance(weights_location, RemoteFolder):
        folder = weights_location.path() or Path(str(model))
        return FoundModel(
            str(model), source.config, float(weights), False, folder, checkpoint=True, base=base
        )
    store_copy = weights_location.copy.restrict_to(weights_location.contains(_has_no_optimizer))
    return FoundModel(
        str(model),
        source.config,
        float(weights),
        False,
        weights_location.folder,
        store_copy,
        True,
        base,
    )


def _checkpoints_at(model: Any, target: TargetName | None) -> Place | None:
    """The folder or prefix, if there are checkpoints of a training in it, and no model to load as
    it is.
    """
    if not isinstance(model, (str, Path)):
        return None
    text = folder_of(str(model))
    if text.startswith(STORES):
        remote_folder = RemoteFolder(_store(text, target), text)
        is_model = any(
            file in remote_folder.files() for file in ("config.json", ADAPTER)
        ) and first_of_weights(remote_folder.files())
        return remote_folder if not is_model and _are_checkpoint(remote_folder.files()) else None
    path = Path(text).expanduser()
    return (
        LocalPlace(path) if path.is_dir() and not _model_in(path) and _is_checkpoint(path) else None
    )


def _store(uri: str, target: TargetName | None) -> Backend:
    """The backend that reads an s3:// or oss:// URI."""
    from smtrain.client.backends.choose import backend_by_name, backend_of_job

    return backend_by_name("pai-dlc") if uri.startswith(OSS) else backend_of_job(uri, target)[1]


def _run_named(text: str) -> str:
    """NAME of a run://NAME."""
    if (match := RUN_NAME.fullmatch(text)) is None:
        raise CheckpointError(
            f"{text} must look like run://NAME, the name of a run", code="model.not_found"
        )
    return match[1]


def _hub_hint(text: str) -> str:
    """A hint: a folder with a similar name, or the model `organization/name` of the hub."""
    if suggestion := near_path(Path(text).expanduser()):
        return f"; {suggestion.rstrip('; ')}"
    hub_hint = (
        not_here(f"hf://{text}") if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) else None
    )
    return f"; if it is a model of the hub, {hub_hint.partition('; ')[2]}" if hub_hint else ""


def _local_model(path: Path, name: str) -> FoundModel:
    if not path.is_dir():
        raise CheckpointError(
            f"{name} is a file, and {file_kind(path)}; {config_hint(path)}name the folder of a"
            " Hugging Face model"
        )
    if model_folder := _model_in(path):
        folder, is_adapter = model_folder
        model_config = _read_json_object(folder / ADAPTER) if is_adapter else described_in(folder)
        return FoundModel(name, model_config, weights_in(folder), is_adapter, folder)
    if _is_checkpoint(path):
        file_names = [file.name for file in path.rglob("*") if file.is_file()]
        config = "" if tokenizer_in(file_names) else " --config MODEL"
        explanation = (
            " (MODEL is the folder of the model that training started from, for its tokenizer)"
            if config
            else ""
        )
        raise CheckpointError(
            f"{name} is not a Hugging Face folder; `smtrain convert {name} FOLDER --to hf{config}`"
            f" makes one of a checkpoint{explanation}",
            code="model.not_found",
        )
    names = [
        file.relative_to(path).as_posix() for pattern in ("*", "*/*") for file in path.glob(pattern)
    ]
    if (path / "config.json").is_file() and (fault := file_misfit(path / "config.json")):
        raise CheckpointError(fault)
    if fault := broken_link(path) or folder_misfit(names, name):
        raise CheckpointError(fault)
    lacks = "no weights" if (path / "config.json").is_file() else f"no config.json and no {ADAPTER}"
    raise CheckpointError(f"{name} holds {lacks}; name the folder of a Hugging Face model")


def _model_in(path: Path) -> tuple[Path, bool] | None:
    """The folder of a Hugging Face model, or (True) of an adapter: this one, or `model` in it."""
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file() and weights_in(folder) and _has_weights(folder):
            return folder, False
        if folder.is_dir() and is_adapter(file.name for file in folder.iterdir()):
            return folder, True
    return None


def _is_checkpoint(path: Path) -> bool:
    return _are_checkpoint(LocalPlace(path).files())


def _are_checkpoint(files: Iterable[str]) -> bool:
    """Whether files below a folder are checkpoints of engine native or nxd, whole or not."""
    return any(_OF_CHECKPOINT.fullmatch(file) for file in files)


def _has_no_optimizer(file: str) -> bool:
    """Whether a file below a model or checkpoint is needed without its optimizer."""
    return not file.startswith("optim/")


def _has_weights(folder: Path) -> bool:
    """True if weights have the file names by which they are read."""
    names = [path.name for path in folder.iterdir()]
    return first_of_weights(names) is not None or bool(missing_shards(names)[0])


def _read_json_object(file: Path) -> dict[str, Any]:
    try:
        content = read_value(file)
    except (OSError, ValueError):
        reason = (
            file_misfit(file)
            or f"{file} cannot be read as JSON; mend it there, or copy this file again"
        )
        raise CheckpointError(reason) from None
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file} is not a JSON object; copy it again", code="checkpoint.damaged"
        )
    return content


def _model_of_name(name: str, target: TargetName | None) -> FoundModel:
    from botocore.exceptions import ClientError

    from smtrain.client.backends.choose import backend_of_job
    from smtrain.client.jobs.job import Job
    from smtrain.client.jobs.listing import jobs_of
    from smtrain.core.aws_errors import is_unanswered

    job, place = backend_of_job(name, target)
    try:
        exports = jobs_of(place, job, "export")
        finished_export = next((export for export in exports if export.known_done), None)
        if finished_export is not None:
            return _model_of_job(finished_export, name)
        if exports or jobs_of(place, job, "train"):
            raise JobError(
                f"{name} has not exported a model yet; `smtrain run CONFIG` exports one",
                code="model.not_found",
            )
        export_job = Job(job, place)
        export_job.describe()
    except (ClientError, JobError) as error:
        if is_unanswered(error) or "exported" in str(error):
            raise
        nowhere = f"{name}: there is no such folder, and no run or job"
        raise unknown_run(nowhere, name, place, near_path(name), "model.not_found") from None
    return _model_of_job(export_job, name)


def _model_of_job(job: Any, name: str) -> FoundModel:
    from smtrain.client.jobs.job import Job
    from smtrain.client.jobs.results import export_job_name
    from smtrain.core.protocol.requests import stage_of

    name_parts = stage_of(job.name)
    if name_parts is not None and name_parts[1] == "train":
        export_name = export_job_name(job, job.describe())
        if export_name is None:
            raise JobError(
                f"what {job.name} trained has not been exported yet; `smtrain run CONFIG`"
                " exports it",
                code="model.not_found",
            )
        job = Job(export_name, job.target)
    try:
        return _model_in_store(job.target, job.output, name)
    except CheckpointError:
        raise JobError(
            f"{job.name} left no Hugging Face model; name the run, or its export job",
            code="model.not_found",
        ) from None


def _model_in_store(target: Backend, uri: str, name: str) -> FoundModel:
    store_copy = StoreCopy(target, uri).restrict_to(_has_no_optimizer)
    sizes = {file: object_stat.size for file, object_stat in store_copy.files.items()}
    kind = ADAPTER if is_adapter(sizes) else "config.json" if "config.json" in sizes else None
    if kind is None:
        if fault := folder_misfit(sizes, uri):
            raise CheckpointError(fault)
        problem = "is empty" if not sizes else f"holds no config.json and no {ADAPTER}"
        raise CheckpointError(f"{uri} {problem}; name the prefix of a Hugging Face model")
    body = target.read(store_copy.uri + kind)
    try:
        model_config = parse_object(body)
    except ValueError:
        reason = (
            misfit(kind, body[:HEAD], len(body))
            or "cannot be read as JSON; mend it there, or copy this file again"
        )
        raise CheckpointError(f"{uri}: {kind} {reason}") from None
    weights = next(
        (
            sum(file_sizes)
            for ending in WEIGHTS
            if (file_sizes := [size for file, size in sizes.items() if file.endswith(ending)])
        ),
        0,
    )
    return FoundModel(
        name, model_config, float(weights), kind == ADAPTER, store_copy.folder, store_copy
    )
