"""`smtrain convert`: any checkpoint to any checkpoint."""

from __future__ import annotations

import re
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.cli.typed import typed
from smtrain.errors import ConfigError
from smtrain.text import say

app = options.app()
FLAGS = {
    **{key: f"--{key}".replace("_", "-") for key in ("to", "tp", "pp", "qkv", "kv_order", "kv_multiplier", "dtype")},
    "form": "--format",
    "max_shard_size": "--max-shard-size",
    "config": "--config",
    "source": "SRC",
    "target": "DST",
    "parallel.tp": "--tp",
    "parallel.pp": "--pp",
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or s3:// URI; its kind is read from it.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Folder or s3:// URI; appears when it is complete.")],
    to: Annotated[str, typer.Option(help="Kind of checkpoint to write: nxd, hf or native.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    cuts: Annotated[Optional[str], typer.Option(help="Last layer of every stage except the last, e.g. 3,7,11.")] = None,  # noqa: UP045
    form: Annotated[str, typer.Option("--format", help="Format of NxD's shards: pt or xser.")] = "pt",
    qkv: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="How q, k and v are stored: separate, grouped, fused or fused_mha."),
    ] = None,
    kv_multiplier: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="How many copies of each key/value head are kept."),
    ] = None,
    kv_order: Annotated[str, typer.Option(help="Order of repeated heads: tiled (trn1) or grouped (trn2).")] = "tiled",
    dtype: Annotated[Optional[str], typer.Option(help="bf16, fp32 or fp16; the source's by default.")] = None,  # noqa: UP045
    max_shard_size: Annotated[str, typer.Option(help="Largest size of one Hugging Face file.")] = "5GB",
    config: Annotated[Optional[str], typer.Option(help="Folder of config.json, where the source has none.")] = None,  # noqa: UP045
    overwrite: options.Overwrite = False,
) -> None:
    """Convert weights; run it again after an interruption and it goes on where it was."""
    import smtrain

    typed(FLAGS)
    try:
        places = None if cuts is None else [int(cut) for cut in cuts.split(",") if cut]
    except ValueError:
        raise ConfigError([f"--cuts {cuts}: must be layer numbers with commas between, e.g. 3,7,11"]) from None
    smtrain.convert(
        source,
        target,
        to=to,  # type: ignore[arg-type]  # checked there
        tp=tp,
        pp=pp,
        cuts=places,
        form=form,  # type: ignore[arg-type]
        qkv=qkv,  # type: ignore[arg-type]
        kv_multiplier=kv_multiplier,
        kv_order=kv_order,  # type: ignore[arg-type]
        dtype=dtype,
        max_shard_size=_bytes(max_shard_size),
        config=config,
        overwrite=overwrite,
    )
    say(f"{target} is complete")


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", size.strip().lower())
    if match is None:
        raise ConfigError([f"--max-shard-size {size}: must be a size like 5GB or 500MB"])
    return int(float(match[1]) * _UNITS[match[2]])
