"""`smtrain.convert`: any weights to any layout, in folders, S3 or OSS."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from smtrain.core import text
from smtrain.core.errors import CheckpointError
from smtrain.core.files import home, only_writer
from smtrain.core.protocol.uris import OSS
from smtrain.core.public_api import public
from smtrain.core.text import Say
from smtrain.worker.checkpoint import convert as worker
from smtrain.worker.checkpoint.convert import ReadOptions
from smtrain.worker.checkpoint.storage import is_uri
from smtrain.worker.checkpoint.targets import Target

if TYPE_CHECKING:
    from smtrain.worker.checkpoint.merge import MergeBase, MergeEffect

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
    if any(map(_is_far, (*paths.values(), output))):
        # Here, because the backend takes as long to import as everything else of a conversion.
        from smtrain.tools.convert_oss import fetch_copy, upload_folder
    local_paths = {
        key: fetch_copy(str(path), say) if _is_far(path) else path for key, path in paths.items()
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
                upload_folder(local_output, str(output), overwrite, say)
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
