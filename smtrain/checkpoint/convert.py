"""Any weights to any layout: `convert` is what `smtrain.convert` and the convert stage call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from smtrain.checkpoint.dtypes import BF16, FP16, FP32
from smtrain.checkpoint.hf import is_hf_folder, write_hf
from smtrain.checkpoint.native import StateReader
from smtrain.checkpoint.native_writer import write_native
from smtrain.checkpoint.nxd_names import Qkv
from smtrain.checkpoint.nxd_writer import Format, write_nxd
from smtrain.checkpoint.open import open_weights
from smtrain.checkpoint.places import place
from smtrain.checkpoint.sources import Cast
from smtrain.checkpoint.staging import refuse_overlap
from smtrain.edge import public
from smtrain.errors import ConfigError
from smtrain.model.layout import KvOrder

Kind = Literal["nxd", "hf", "native"]
DTYPES = {"bf16": BF16, "fp32": FP32, "fp16": FP16}


@public
def convert(
    source: Path | str,
    target: Path | str,
    *,
    to: Kind = "nxd",
    tp: int = 1,
    pp: int = 1,
    form: Format = "pt",
    qkv: Qkv | None = None,
    kv_multiplier: int | None = None,
    kv_order: KvOrder = "tiled",
    cuts: Sequence[int] | None = None,
    dtype: str | None = None,
    max_shard_size: int = 5_000_000_000,
    config: Path | str | None = None,
    overwrite: bool = False,
) -> None:
    """Write the weights of `source` into `target`, which appears whole or stays as it was.

    The source's kind and topology are read from it. From native to native the optimizer's state goes along, and
    training goes on from the result. Run again after an interruption, it goes on where it was; run again after
    it has ended, it leaves what it made.

    Args:
        source: A folder or s3:// URI: Hugging Face, NxD shards or a native checkpoint.
        target: The folder or s3:// URI to write.
        to: The kind to write: `hf`, `nxd` or `native`.
        tp: Tensor-parallel degree of the target.
        pp: Pipeline-parallel degree of the target.
        form: How NxD's shards are written: `pt`, one file a rank, or `xser`, one file a tensor.
        qkv: How NxD keeps the three projections of attention. Default: `separate`, or `grouped` where heads repeat.
        kv_multiplier: How often NxD repeats the key and value heads. Default: as often as tp needs.
        kv_order: The chip's order of repeated heads, of the target and of a source without a manifest: `tiled` (trn1)
            or `grouped` (trn2).
        cuts: The last layer of each pipeline stage but the last. Default: equal parts.
        dtype: `bf16`, `fp32` or `fp16`, converted on the way. Default: as they are.
        max_shard_size: Bytes of a file of a Hugging Face target.
        config: The folder of the config.json (and, for `hf`, tokenizer and licence) where the source has none, as NxD's
            own saves.
        overwrite: Replace other files of the target.

    Raises:
        CheckpointError: The source cannot be read, the two overlap or, unless `overwrite`, other files of the target
            would be replaced.
        ConfigError: An option is none of those above, or the model cannot be cut for (tp, pp).

    Examples:
        >>> run = smtrain.run("llama.yaml", say=lambda line: None)
        >>> folder = run.download("model")
        >>> smtrain.convert(folder, "shards", to="nxd", tp=2)
        >>> smtrain.convert("shards", "again", to="hf")
    """
    choices: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("to", to, get_args(Kind)),
        ("form", form, get_args(Format)),
        ("kv_order", kv_order, get_args(KvOrder)),
    ]
    choices += [("qkv", qkv, (*get_args(Qkv), None)), ("dtype", dtype, (*DTYPES, None))]
    faults = [
        f"{key}: got {got!r}; take one of {', '.join(map(str, known))}"
        for key, got, known in choices
        if got not in known
    ]
    whole = [("tp", tp), ("pp", pp), ("kv_multiplier", 1 if kv_multiplier is None else kv_multiplier)]
    faults += [f"{key}: got {got}; must be at least 1" for key, got in whole if got < 1]
    named = [("source", source), ("target", target), *([] if config is None else [("config", config)])]
    faults += [f"{key}: is an empty name; name a folder or an s3:// URI" for key, got in named if not str(got).strip()]
    if max_shard_size < 1:
        faults.append(f"max_shard_size: got {max_shard_size} bytes; must be at least 1")
    if faults:
        raise ConfigError(faults)
    refuse_overlap(source, target)
    told = None if config is None else read_beside(config)
    weights = open_weights(source, told, kv_order)
    state = StateReader.present(weights) if to == "native" else None
    weights = weights if dtype is None else Cast(weights, DTYPES[dtype])
    if to == "hf":
        beside = config if config is not None else (source if is_hf_folder(place(source)) else None)
        write_hf(weights, target, beside, max_shard_size, overwrite)
    elif to == "native":
        write_native(weights, target, tp=tp, pp=pp, state=state, overwrite=overwrite)
    else:
        write_nxd(
            weights,
            target,
            tp=tp,
            pp=pp,
            qkv=qkv,
            kv_order=kv_order,
            kv_multiplier=kv_multiplier,
            cuts=cuts,
            form=form,
            overwrite=overwrite,
        )


def read_beside(folder: Path | str) -> dict[str, Any]:
    """The config.json in a folder, or that is itself named."""
    from smtrain.checkpoint.hf import read_config

    path = str(folder)
    return read_config(path.removesuffix("/config.json") if path.endswith("/config.json") else path)
