"""`smtrain convert`: any checkpoint to any checkpoint."""

from __future__ import annotations

import re
from typing import Annotated, Optional

import typer

from smtrain.cli import options
from smtrain.cli.dispatch import register_flags
from smtrain.core.errors import ConfigError
from smtrain.core.text import say

app = options.app()
FLAGS = {
    **{
        key: f"--{key}".replace("_", "-")
        for key in (
            "to",
            "tp",
            "pp",
            "qkv",
            "kv_order",
            "kv_multiplier",
            "dtype",
            "spec",
            "vpp",
            "first_stage_layers",
            "last_stage_layers",
            "layers_per_stage",
            "release",
            "max_shard_size",
            "config",
            "merge_adapter",
            "merge_base",
        )
    },
    "form": "--format",
    "vocab_divisor": "--make-vocab-size-divisible-by",
    "source": "SRC",
    "output": "DST",
    "parallel.tp": "--tp",
    "parallel.pp": "--pp",
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@app.command(
    groups={
        "What is written": "--to --format --dtype --max-shard-size --overwrite",
        "How it is cut": "--tp --pp --ep --cuts --qkv --kv-multiplier --kv-order",
        "What is read": "--config --merge-adapter --merge-base --masters --reordered-qkv",
        "Megatron and NeMo": (
            "--spec --vpp --first-stage-layers --last-stage-layers --layers-per-stage "
            "--make-vocab-size-divisible-by --release"
        ),
        "Older names": "--xser",
    },
)
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="Folder, s3:// or oss:// URI, or demo://; its kind is read from it."
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="Folder, s3:// or oss:// URI; appears when it is complete."
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            help=(
                "Kind to write: nxd, hf, native, megatron, nemo-megatron, dcp"
                " (torch.distributed.checkpoint); of LoRA checkpoints, peft."
            )
        ),
    ],
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[
        int, typer.Option(min=1, help="native: ranks that divide the experts of each layer.")
    ] = 1,
    cuts: Annotated[
        Optional[str], typer.Option(help="Last layer of every stage except the last, e.g. 3,7,11.")  # noqa: UP045
    ] = None,
    form: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--format",
            "--form",
            help="nxd: pt (default) or xser; megatron: torch_dist (default) or torch; dcp:"
            " torchtitan (default) or accelerate.",
        ),
    ] = None,
    qkv: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="How q, k and v are stored: separate, grouped, fused or fused_mha."),
    ] = None,
    kv_multiplier: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="How many copies of each key/value head are kept."),
    ] = None,
    kv_order: Annotated[
        str, typer.Option(help="Order of repeated heads: tiled (trn1) or grouped (trn2).")
    ] = "tiled",
    dtype: Annotated[
        Optional[str], typer.Option(help="bf16, fp32 or fp16; the source's by default.")  # noqa: UP045
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest size of one Hugging Face file.")
    ] = "5GB",
    spec: Annotated[
        str, typer.Option(help="megatron, torch: names of the te or the local layer spec.")
    ] = "te",
    vpp: Annotated[
        int, typer.Option(min=1, help="megatron, torch: virtual stages of a pipeline stage.")
    ] = 1,
    first_stage_layers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1, help="megatron: layers of the first pipeline stage, if they are not even."
        ),
    ] = None,
    last_stage_layers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1, help="megatron: layers of the last pipeline stage, if they are not even."
        ),
    ] = None,
    layers_per_stage: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="megatron: layers of every pipeline stage, e.g. 16,15,17."),
    ] = None,
    vocab_divisor: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--make-vocab-size-divisible-by",
            min=1,
            help=(
                "Pad the vocabulary to a multiple of this times tp: megatron 128, nemo-megatron 8."
            ),
        ),
    ] = None,
    release: Annotated[
        str, typer.Option(help="nemo-megatron: the release to write for, 2.15 or 2.21.")
    ] = "2.21",
    xser: Annotated[bool, typer.Option("--xser", help="The same as --format xser.")] = False,
    config: Annotated[
        Optional[str], typer.Option(help="The model's folder or config.json, if SRC has none.")  # noqa: UP045
    ] = None,
    masters: Annotated[
        bool,
        typer.Option(
            "--masters",
            help="nemo-megatron: read the fp32 master weights of the optimizer's files.",
        ),
    ] = False,
    reordered_qkv: Annotated[
        bool,
        typer.Option(
            "--reordered-qkv",
            help="The source was made by convert_HF_to_nemo_neox.py: undo its row order.",
        ),
    ] = False,
    merge_adapter: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="LoRA adapter to add to the weights: peft's folder, or a run's checkpoints."
        ),
    ] = None,
    merge_base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="For --merge-adapter of a QLoRA training: `dequantized` weights, as it was trained"
            " (default, if smtrain trained it), or the `original` ones.",
            metavar="dequantized|original",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Convert weights; run it again to resume after an interruption.

    $ smtrain convert model shards --to nxd --tp 8 --pp 4  # a Hugging Face folder, cut for 32 cores
    $ smtrain convert checkpoints model --to hf  # checkpoints of any kind, back to Hugging Face
    """
    import smtrain
    from smtrain.worker.checkpoint.targets import make_target

    register_flags(FLAGS)
    last_layers = _numbers("--cuts", cuts, "layer numbers with commas between, e.g. 3,7,11")
    stages = _numbers(
        "--layers-per-stage",
        layers_per_stage,
        "numbers of layers with commas between, e.g. 16,15,17",
    )
    target = make_target(
        to,
        tp=tp,
        pp=pp,
        ep=ep,
        cuts=last_layers,
        form="xser" if xser and form is None else form,
        qkv=qkv,
        kv_multiplier=kv_multiplier,
        kv_order=kv_order,
        spec=spec,
        vpp=vpp,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        layers_per_stage=stages,
        vocab_divisor=vocab_divisor,
        release=release,
        dtype=dtype,
        max_shard_size=_bytes(max_shard_size),
    )
    change = smtrain.convert(
        options.resolve_folder(source),
        output,
        to=target,
        config=options.resolve_folder(config) if config else config,
        read=smtrain.ReadOptions(kv_order=kv_order, masters=masters, reordered_qkv=reordered_qkv),  # type: ignore[arg-type]  # checked there
        merge_adapter=merge_adapter,
        merge_base=merge_base,  # type: ignore[arg-type]  # checked there
        overwrite=overwrite,
    )
    if change:
        say(f"the adapter changed {change.tensors} tensors, by {change.largest:.3g} at most")
    say(f"{output} is complete")


def _numbers(flag: str, value: str | None, requirement: str) -> list[int] | None:
    try:
        return None if value is None else [int(number) for number in value.split(",") if number]
    except ValueError:
        raise ConfigError(
            f"{flag} {value}: must be {requirement}", code="config.wrong_value"
        ) from None


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", size.strip().lower())
    if match is None:
        raise ConfigError(
            f"--max-shard-size {size}: must be a size like 5GB or 500MB", code="config.wrong_value"
        )
    return int(float(match[1]) * _UNITS[match[2]])
