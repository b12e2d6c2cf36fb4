"""`smtrain.convert`: any weights to any layout, in folders, S3 or OSS."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.client.backends.pai.backend import PaiBackend
from smtrain.client.backends.pai.registry import REGISTRY
from smtrain.client.jobs.copies import StoreCopy
from smtrain.client.jobs.results import md5_of
from smtrain.core import text
from smtrain.core.config.pai import OSS
from smtrain.core.errors import CheckpointError
from smtrain.core.files import home, only_writer
from smtrain.core.protocol.uris import split_uri
from smtrain.core.public_api import public
from smtrain.core.text import Say
from smtrain.worker.checkpoint import convert as worker
from smtrain.worker.checkpoint.convert import ReadOptions
from smtrain.worker.checkpoint.storage import is_uri
from smtrain.worker.checkpoint.targets import Target

if TYPE_CHECKING:
    from smtrain.worker.checkpoint.merge import MergeBase, MergeEffect

_MANIFEST = "manifest.json"
_AS_IT_IS = ReadOptions()


@public
def convert(
    source: Path | str,
    output: Path | str,
    *,
    to: Target,
    config: Path | str | None = None,
    read: ReadOptions = _AS_IT_IS,
    merge_adapter: Path | str | None = None,
    merge_base: MergeBase | None = None,
    overwrite: bool = False,
    say: Say = text.say,
) -> MergeEffect | None:
    """Write the weights of `source` into `output`, which appears whole or stays as it was.

    The source's kind and topology are read from it. Between native and torch's distributed
    checkpoints (`Dcp`), and from native to native, the optimizer's state goes along, and training
    resumes from the result. Run again after an interruption, it resumes; run again after it has
    ended, it leaves the result.

    Args:
        source: A folder, s3:// or oss:// URI: Hugging Face, NxD shards, a native checkpoint, one
            of Megatron's, or torch's distributed checkpoint of torchtitan or accelerate.
        output: The folder, s3:// or oss:// URI to write.
        to: The kind to write, with its options: `HuggingFace`, `Nxd`, `Native`, `Megatron`,
            `NemoMegatron` (neuronx-nemo-megatron), `Dcp` (torch.distributed.checkpoint); for a
            run's checkpoints with a LoRA adapter, `Peft`.
        config: The model's folder, or its config.json, if the source has none, as NxD's and
            Megatron's own saves. Its tokenizer, licence and other files go along. For `Peft` too.
        read: How to read a source whose files do not tell.
        merge_adapter: A LoRA adapter (peft's folder, or the checkpoints of a run that trains one)
            to add to the source's weights on the way, with constant memory.
        merge_base: For an adapter of a QLoRA training: `dequantized` adds it to the weights in NF4,
            unpacked again, as it was trained, `original` to those of the source. Default: as
            it was trained, if smtrain trained it; an adapter of another tool does not tell, and
            gets `original`.
        overwrite: Replace other files of the output.
        say: Called with a line for each reason why files next to the weights were left out.

    Returns:
        With `merge_adapter`, how many tensors it changed and by how much at most; else None.

    Raises:
        CheckpointError: The source cannot be read, the adapter is no plain LoRA or one of another
            model, the two overlap or, unless `overwrite`, other files of the output would be
            replaced.
        JobError: OSS refuses, or does not answer.
        ConfigError: A path is empty, or the model cannot be cut for (tp, pp).

    Examples:
        >>> run = smtrain.run("llama.yaml", say=lambda line: None)
        >>> folder = run.download("model")
        >>> smtrain.convert(folder, "shards", to=smtrain.Nxd(tp=2))
        >>> smtrain.convert("shards", "again", to=smtrain.HuggingFace())
    """
    paths = {"source": source, "config": config, "merge_adapter": merge_adapter}
    local_paths = {
        key: _fetch_copy(str(path), say) if _is_far(path) else path for key, path in paths.items()
    }
    local_output = _staging_folder(str(output)) if is_uri(output) else Path(output)
    # A folder has a lock next to it. A store has no locks, so two machines that write to one prefix
    # do not notice it.
    lock = (
        only_writer(str(output), CheckpointError, local_output.with_suffix(".lock"))
        if is_uri(output)
        else nullcontext()
    )
    with lock:
        change = worker.convert(
            local_paths["source"] or "",
            local_output if _is_far(output) else output,
            to=to,
            config=local_paths["config"],
            read=read,
            merge_adapter=local_paths["merge_adapter"],
            merge_base=merge_base,
            overwrite=overwrite,
            say=say,
        )
        if _is_far(output):
            try:
                _upload_folder(local_output, str(output), overwrite, say)
            except (
                CheckpointError
            ):  # refused; after an interruption it stays, and the same call resumes
                shutil.rmtree(local_output)
                raise
            shutil.rmtree(local_output)
    return change


def _is_far(path: Path | str | None) -> bool:
    return path is not None and str(path).startswith(OSS)


def _staging_folder(uri: str) -> Path:
    """The folder to write before it is sent to a URI; an interrupted conversion resumes in
    it.
    """
    return home() / "conversions" / hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:16]


def _fetch_copy(uri: str, say: Say) -> Path:
    """A copy of what is below an oss:// URI; files that are here already are not fetched again."""
    copy = StoreCopy(PaiBackend(REGISTRY.section_of()), uri)
    say(f"fetching {copy.uri} into {copy.folder}")
    return copy.fetch()


def _upload_folder(folder: Path, uri: str, overwrite: bool, say: Say) -> None:
    """Write the files of a folder below an oss:// URI, the manifest last."""
    cloud, prefix = PaiBackend(REGISTRY.section_of()).cloud, f"{uri.rstrip('/')}/"
    bucket, key = split_uri(prefix)
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    remote_files = {item["Key"][len(key) :]: item for item in cloud.listing(prefix)}
    stale_names = [
        name
        for name, item in remote_files.items()
        if name not in files or not _is_same(files[name], item)
    ]
    if stale_names and not overwrite:
        raise CheckpointError(
            f"{uri} has other files, such as {stale_names[0]}; name another prefix, or use"
            " --overwrite"
        )
    for name in stale_names:
        cloud.remove(f"{OSS}{bucket}/{key}{name}")
    last = [name for name in files if name.rpartition("/")[2] == _MANIFEST]
    for names_to_send in ([name for name in files if name not in last], last):
        cloud.put(prefix, [(name, files[name]) for name in names_to_send], say)


def _is_same(path: Path, item: dict[str, Any]) -> bool:
    """Whether an object has a file's content, as far as OSS says: one that was sent in parts has no
    MD5.
    """
    etag = str(item.get("ETag", "")).strip('"')
    return bool(item["Size"] == path.stat().st_size) and (len(etag) != 32 or etag == md5_of(path))
