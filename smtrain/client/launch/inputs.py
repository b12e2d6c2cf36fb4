"""Turn local paths into content-addressed S3 prefixes, so that an input is uploaded once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from smtrain.client.backends.base import Backend, Body, size_of
from smtrain.client.backends.checksums import sha256_of
from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.defaults import sagemaker_defaults, with_defaults
from smtrain.client.backends.sagemaker.s3 import has_content, list_prefix, send
from smtrain.client.config.checks.local_data import local_data_faults
from smtrain.client.config.checks.weights import gated_faults, shape_faults
from smtrain.client.jobs.jumpstart import JumpStartModel, model_on
from smtrain.client.jobs.parents import Parent, parent_on
from smtrain.core.aws_errors import FULL
from smtrain.core.config import JobConfig
from smtrain.core.config.schema import other_inputs
from smtrain.core.config.textfiles import matches
from smtrain.core.config.training import Train
from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.files import files_below, read_object
from smtrain.core.model.hf_folder import is_checkpoint_file
from smtrain.core.protocol.uris import HUBS, JUMPSTART, RUN, is_mounted, split_uri
from smtrain.core.spinner import spinner
from smtrain.core.text import Say
from smtrain.plane.hosts import note

# Weights, configs, tokenizers, templates and the papers that go with them, as Hugging Face folders
# have them.
_MODEL_FILES = (
    "*.safetensors",
    "*.bin",
    "*.index.json",
    "config.json",
    "*_config.json",
    "params.json",
    "manifest.json",
    "smtrain.json",
    "source.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.bpe",
    "*.vocab",
    "encoder.json",
    "tekken.json",
    "chat_template*.json",
    "*.jinja",
    "*.py",
    "readme*",
    "license",
    "license.*",
    "license-*",
    "notice",
    "notice.*",
    "use_policy*",
    "copying",
)


def is_model_file(name: str) -> bool:
    """Whether a file, named relative to the folder, is part of a model.

    Hidden files and folders never are.
    """
    if is_checkpoint_file(name):
        return True
    path = PurePosixPath(name)
    if any(part.startswith(".") for part in path.parts):
        return False
    return any(fnmatchcase(path.name.lower(), pattern) for pattern in _MODEL_FILES)


def is_weights_file(name: str) -> bool:
    """Whether a file of model.weights is uploaded: all but the optimizer's own files."""
    *folders, last = PurePosixPath(name).parts
    is_hidden = any(part.startswith(".") for part in folders) or (
        last.startswith(".") and last != ".metadata"
    )
    return not is_hidden and last != "distrib_optim.pt" and not {"optim", "optimizer"} & {*folders}


_PARTS = {"model": is_model_file, "weights": is_weights_file}
"""Files of an input's folder that are uploaded, by channel; all files of any other."""
SMALL = 512 << 10  # bytes; what is larger is looked for before it is sent


@dataclass(frozen=True)
class Upload:
    """A local file or folder, or bytes, that must lie under an S3 prefix before the job starts."""

    uri: str
    files: tuple[tuple[str, Body], ...]
    sha256: tuple[str, ...] = ()
    """SHA-256 (hex) of each file that the prefix is named after; empty if the files are bytes."""
    left_out: tuple[str, ...] = ()
    """Files next to a model that are not part of it."""
    origin: str = ""
    """Its path or demo:// URI in the config; empty for bytes."""

    @property
    def digests(self) -> tuple[str, ...]:
        """SHA-256 (hex) of each file."""
        return self.sha256 or tuple(sha256_of(body) for _, body in self.files)


@dataclass(frozen=True)
class ResolvedInputs:
    """A config whose every path is an s3:// URI and whose region, role and output are filled in."""

    config: JobConfig
    uploads: tuple[Upload, ...]
    model_config: dict[str, Any] | None = None
    """The model's config.json, if the model is on this machine or an earlier run exported it."""


def resolve(config: JobConfig, target: Backend) -> ResolvedInputs:
    """Fill in what the target decides and name every local input by its content. Uploads nothing.

    Raises `ConfigError` for what the target cannot know by itself (the role on AWS).
    """
    if target.record.rented:
        config = with_defaults(config, sagemaker_defaults(sagemaker(target)))
    _refuse_unmounted(config, target)
    role = target.role(config.compute.role)
    region = config.compute.region or target.region_name()
    base = target.base(config.output.s3_uri)
    uploads: dict[str, Upload] = {}

    def place(path: str | None, kind: str) -> str | None:
        if path is None or path.startswith(("s3://", *HUBS, "fsx://", "efs://")):
            return path
        if (uri_in_place := target.in_place(path)) and not path.startswith("demo://"):
            return uri_in_place
        with spinner(f"reading {path}"):
            upload = _content_addressed(
                _materialise_path(path), f"{base}/inputs/{kind}", _PARTS.get(kind)
            )
        upload = replace(upload, origin=path)
        uploads[upload.uri] = upload
        return upload.uri

    parent = _parent(config.model.path, target)
    model_path = parent.uri if parent else _materialise_path(config.model.path)
    model_config = parent.model_config if parent else None
    if isinstance(model_path, Path):
        model_config = read_object(model_path / "config.json")
    faults = (
        [] if model_config is None else [text for _, text in shape_faults(config, model_config)]
    )
    if faults := [
        *faults,
        *(text for _, text in (*gated_faults(config), *local_data_faults(config, model_config))),
    ]:
        raise ConfigError(faults, code="config.combination")
    resolved_config = config.model_copy(
        update={
            "model": config.model.model_copy(
                update={
                    "path": parent.uri if parent else place(config.model.path, "model"),
                    "weights": place(config.model.weights, "weights"),
                }
            ),
            "data": config.data.model_copy(
                update={
                    "path": place(config.data.path, "text"),
                    "prepared": place(config.data.prepared, "prepared"),
                    "sources": tuple(
                        source.model_copy(update={"path": place(source.path, "text")})
                        for source in config.data.sources
                    ),
                    "decontaminate": _place_path(config.data.decontaminate, "path", place),
                    "language": _place_path(config.data.language, "model", place),
                }
            ),
            "train": _placed_train(config, target, place),
            "evaluate": config.evaluate.model_copy(
                update={
                    "data": place(config.evaluate.data, "tasks"),
                    "text": place(config.evaluate.text, "text"),
                }
            ),
            "compute": config.compute.model_copy(update={"role": role, "region": region}),
            "output": config.output.model_copy(update={"s3_uri": base}),
        }
    )
    return ResolvedInputs(resolved_config, tuple(uploads.values()), model_config)


def _parent(path: str, target: Backend) -> Parent | JumpStartModel | None:
    """The run or the JumpStart model of a path; None for any other model."""
    if path.startswith(JUMPSTART):
        return model_on(path, sagemaker(target))
    return parent_on(path, target) if path.startswith(RUN) else None


def _place_path(section: Any, key: str, place: Callable[[str | None, str], str | None]) -> Any:
    """An optional section with the text in `key`, if it names one, under a URI."""
    path = section and getattr(section, key)
    return section.model_copy(update={key: place(path, "text")}) if path else section


def _placed_train(
    config: JobConfig, target: Backend, place: Callable[[str | None, str], str | None]
) -> Train:
    """The section `train` with the held-out text and the reference of dpo under URIs."""
    train = config.train
    if (validation := _place_path(train.validation, "path", place)) is not train.validation:
        train = train.model_copy(update={"validation": validation})
    if train.dpo is not None and train.dpo.folder is not None:
        path = train.dpo.folder
        if path.startswith(RUN):
            path = parent_on(path, target, "train.dpo.reference").uri
        reference = train.dpo.model_copy(update={"reference": place(path, "weights")})
        train = train.model_copy(update={"dpo": reference})
    return train


def _refuse_unmounted(config: JobConfig, target: Backend) -> None:
    """A file system is reached from within its VPC, which the defaults file may name."""
    uris = [config.data.prepared, *(path for _, _, path in other_inputs(config))]
    uris += [source.path for source in config.data.all_sources]
    mount_uri = next((uri for uri in uris if is_mounted(uri)), None)
    if mount_uri and not target.record.rented:
        raise ConfigError(
            [
                f"data: {mount_uri} is a file system of AWS, which no local run can mount; give a"
                " folder or an s3:// URI"
            ],
            code="config.combination",
        )
    if mount_uri and not config.network.subnets:
        raise ConfigError(
            [
                f"network.subnets: {mount_uri} can only be reached from within its VPC; set "
                "network.subnets and network.security_group_ids"
            ],
            code="config.combination",
        )


def upload_all(target: SageMakerBackend, uploads: list[Upload], say: Say) -> None:
    """Upload what is not there yet, or has another content than its name says.

    Makes SageMaker's default bucket if it is missing. Raises `JobError` if it may not be used.
    """
    from botocore.exceptions import ClientError

    if target.record.here:
        note({upload.uri: upload.origin for upload in uploads if upload.origin})
    for upload in uploads:
        bucket, _ = split_uri(upload.uri)
        try:
            try:
                _upload(target, upload, say)
            except ClientError as error:
                if error.response["Error"].get("Code") not in ("404", "NoSuchBucket"):
                    raise
                _make_bucket(target, bucket)
                _upload(target, upload, say)
        except ClientError as error:
            if error.response["Error"].get("Code") == FULL:
                raise JobError(error.response["Error"]["Message"], code="aws.refused") from None
            raise JobError(
                f"bucket {bucket} cannot be used ({error.response['Error'].get('Code')}); check its"
                " name, that it belongs to this account, and your permissions s3:ListBucket and"
                " s3:PutObject, or set output.s3_uri",
                code="aws.refused",
            ) from None


def described_uploads(uploads: Sequence[Upload]) -> list[str]:
    """A line for every file of some uploads, below their prefixes, and one for files next to a
    model that are left out.
    """
    lines: list[str] = []
    for upload in dict.fromkeys(uploads):
        size = sum(size_of(body) for _, body in upload.files)
        lines.append(f"{upload.uri}  {len(upload.files)} files, {spell_bytes(size)}")
        lines += [f"  {spell_bytes(size_of(body)):>10}  {name}" for name, body in upload.files]
        lines += [f"    left out  {name}" for name in upload.left_out]
    return lines


def _upload(target: SageMakerBackend, upload: Upload, say: Say) -> None:
    bucket, prefix = split_uri(upload.uri)
    missing_files = list(upload.files)
    if sum(size_of(body) for _, body in missing_files) > SMALL:
        remote_objects = {item["Key"]: item for item in list_prefix(target, upload.uri)}
        missing_files = [
            (name, body)
            for name, body in missing_files
            if (item := remote_objects.get(prefix + name)) is None
            or not has_content(target, bucket, item, body)
        ]
        if missing_files:
            say(
                f"uploading {spell_bytes(sum(size_of(body) for _, body in missing_files))} to"
                f" {upload.uri}"
            )
    if missing_files and upload.left_out:
        say(f"not uploaded, as no part of a model: {', '.join(upload.left_out)}")
    hashes = dict(zip((name for name, _ in upload.files), upload.sha256, strict=False))
    for name, body in missing_files:
        if reused_bytes := send(target, bucket, prefix + name, body, hashes.get(name)):
            say(f"{name}: {spell_bytes(reused_bytes)} of it were there already")


def _materialise_path(path: str) -> Path | str:
    if path.startswith("demo://"):
        from smtrain.core.demo import materialise

        folder: Path = materialise(path)
        return folder
    return path if "://" in path else Path(path)


def _content_addressed(
    path: Path | str, base: str, part: Callable[[str], bool] | None = None
) -> Upload:
    """The upload of a file or folder.

    `part` selects files by name; without it all but hidden files are uploaded.
    """
    assert isinstance(path, Path)
    if path.is_file():
        files = [(path.name, path)]
    elif not path.exists():
        matching_files = [file for file in matches(path) if file.is_file()]
        root = (
            Path(os.path.commonpath([p.parent for p in matching_files])) if matching_files else path
        )
        files = [(p.relative_to(root).as_posix(), p) for p in matching_files]
    else:
        files = sorted(
            (p.relative_to(path).as_posix(), p)
            for p in files_below(path)
            if not any(part.startswith(".") for part in p.relative_to(path).parts)
            or (part is not None and part(p.relative_to(path).as_posix()))
        )
    left_out = tuple(
        file_entry[0] for file_entry in files if part is not None and not part(file_entry[0])
    )
    files = [file_entry for file_entry in files if file_entry[0] not in left_out]
    if not files:
        raise ConfigError(
            [f"{path}: holds no files; give a folder that has some"], code="config.wrong_value"
        )
    hashes = tuple(sha256_of(file) for _, file in files)
    hasher = hashlib.sha256()
    for (name, _), digest in zip(files, hashes, strict=True):
        hasher.update(f"{name}\0{digest}\n".encode())
    return Upload(f"{base}/{hasher.hexdigest()[:16]}/", tuple(files), hashes, left_out)


def _make_bucket(target: SageMakerBackend, bucket: str) -> None:
    if target.record.rented and bucket != target.default_bucket():
        raise JobError(
            f"bucket {bucket} does not exist; create it or set output.s3_uri", code="aws.refused"
        )
    place = (
        {} if target.region_name() == "us-east-1" else {"LocationConstraint": target.region_name()}
    )
    target.s3.create_bucket(
        Bucket=bucket, **({"CreateBucketConfiguration": place} if place else {})
    )
