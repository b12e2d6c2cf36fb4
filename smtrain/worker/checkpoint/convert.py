"""Any weights to any layout: `convert` is what `smtrain.convert` and the convert stage call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from smtrain.core import text
from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.facts import table
from smtrain.core.model.families import ModelShape
from smtrain.core.model.hf_folder import OTHER_TOKENIZERS, folder_of, tokenizer_in
from smtrain.core.model.layout import KvOrder
from smtrain.core.near import hint
from smtrain.core.public import public
from smtrain.core.text import Say
from smtrain.worker.checkpoint.conversion_plan import MANIFEST
from smtrain.worker.checkpoint.dtypes import BY_PRECISION, DType
from smtrain.worker.checkpoint.huggingface.companions import OF_A_WHOLE_MODEL, Carried, companions_of
from smtrain.worker.checkpoint.huggingface.folder import is_hf_folder, write_hf
from smtrain.worker.checkpoint.megatron.names import Spelling
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.nemo_megatron.names import Release
from smtrain.worker.checkpoint.nemo_megatron.reader import NNMSource
from smtrain.worker.checkpoint.nxd.names import Qkv
from smtrain.worker.checkpoint.open import open_weights, step_names
from smtrain.worker.checkpoint.sources import Cast, WeightSource
from smtrain.worker.checkpoint.storage import is_uri, place, refuse_overlap

if TYPE_CHECKING:
    from smtrain.worker.checkpoint.merge import Changed

Kind = Literal["nxd", "hf", "native", "megatron", "nemo-megatron", "peft"]
Form = Literal["pt", "xser", "torch_dist", "torch"]
FORMS: dict[str, tuple[Form, ...]] = {
    "nxd": ("pt", "xser"),
    "megatron": ("torch_dist", "torch"),
    "nemo-megatron": ("pt", "xser"),
}
"""Those of a kind, its default first."""
_MESH, _UNEVEN = {"tp", "pp"}, {"first_stage_layers", "last_stage_layers", "layers_per_stage"}
_TAKES: dict[str, set[str]] = {
    "hf": {"max_shard_size", "dtype", "merge_adapter"},
    "nxd": {*_MESH, "form", "qkv", "kv_multiplier", "cuts", "dtype", "merge_adapter"},
    "native": {*_MESH, "dtype", "merge_adapter"},
    "megatron": {*_MESH, *_UNEVEN, "form", "spec", "vpp", "vocab_divisor", "dtype", "merge_adapter"},
    "nemo-megatron": {*_MESH, "form", "release", "vocab_divisor", "dtype", "merge_adapter"},
    "peft": {"dtype", "merge_adapter"},  # refused below, with better reasons
}
"""The options that have an effect on each kind of target; `config`, `kv_order` and `overwrite` have on all."""
_OF_RANKS = {"spec", "vpp"}
"""Those of Megatron's form of one file a rank alone."""
DTYPES: dict[str, DType] = {str(precision): dtype for precision, dtype in BY_PRECISION.items()}


@public
def convert(
    source: Path | str,
    target: Path | str,
    *,
    to: Kind = "nxd",
    tp: int = 1,
    pp: int = 1,
    form: Form | None = None,
    qkv: Qkv | None = None,
    kv_multiplier: int | None = None,
    kv_order: KvOrder = "tiled",
    cuts: Sequence[int] | None = None,
    spec: Spelling = "te",
    vpp: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    layers_per_stage: Sequence[int] | None = None,
    vocab_divisor: int | None = None,
    release: Release = "2.21",
    dtype: str | None = None,
    max_shard_size: int = 5_000_000_000,
    config: Path | str | None = None,
    masters: bool = False,
    reordered_qkv: bool = False,
    merge_adapter: Path | str | None = None,
    overwrite: bool = False,
    say: Say = text.say,
) -> Changed | None:
    """Write the weights of `source` into `target`, which appears whole or stays as it was.

    The source's kind and topology are read from it. From native to native the optimizer's state goes along, and
    training goes on from the result. Run again after an interruption, it goes on where it was; run again after
    it has ended, it leaves what it made.

    Args:
        source: A folder or s3:// URI: Hugging Face, NxD shards, a native checkpoint or one of Megatron's.
        target: The folder or s3:// URI to write.
        to: The kind to write: `hf`, `nxd`, `native`, `megatron` or `nemo-megatron` (neuronx-nemo-megatron); of a run's
            checkpoints with a LoRA adapter, `peft`.
        tp: Tensor-parallel degree of the target.
        pp: Pipeline-parallel degree of the target.
        form: How shards of NxD and neuronx-nemo-megatron are written: `pt`, one file a rank (default), or `xser`, one
            file a tensor. Megatron's:
            `torch_dist` (default), which any mesh reads, or `torch`, the older form of one file a rank.
        qkv: How NxD keeps the three projections of attention. Default: `separate`, or `grouped` where heads repeat.
        kv_multiplier: How often NxD repeats the key and value heads. Default: as often as tp needs.
        kv_order: The chip's order of repeated heads, of the target and of a source without a manifest: `tiled` (trn1)
            or `grouped` (trn2).
        cuts: NxD: the last layer of each pipeline stage but the last. Default: equal parts.
        spec: Megatron, form `torch`: the layer spec whose names are written, `te` (Transformer Engine) or `local`.
        vpp: Megatron, form `torch`: virtual stages of each pipeline stage.
        first_stage_layers: Megatron: layers of the first pipeline stage, where they are not even.
        last_stage_layers: Megatron: layers of the last pipeline stage, where they are not even.
        layers_per_stage: Megatron: layers of every pipeline stage, as MindSpeed-LLM's --num-layer-list.
        vocab_divisor: make_vocab_size_divisible_by; the vocabulary is padded to a multiple of it times tp. Default: 128
            for Megatron, 8 for neuronx-nemo-megatron, as their configs have it.
        release: neuronx-nemo-megatron: whose names and row orders are written, `2.15` or `2.21`.
        dtype: `bf16`, `fp32` or `fp16`, converted on the way. Default: as they are.
        max_shard_size: Bytes of a file of a Hugging Face target.
        config: The model's folder, or its config.json, if the source has none, as NxD's and Megatron's own saves. Its
            tokenizer, licence and other files go along. For `peft` too.
        masters: Take the fp32 master weights that neuronx-nemo-megatron's ZeRO-1 kept in the optimizer's files, in
            place of the bf16 weights beside them.
        reordered_qkv: The source is a GPT-NeoX that convert_HF_to_nemo_neox.py of neuronx-nemo-megatron has made, whose
            attention rows are in a wrong order; they are read in the right one.
        merge_adapter: A LoRA adapter (peft's folder, or the checkpoints of a run that trains one) to add to the
            source's weights on the way, with constant memory.
        overwrite: Replace other files of the target.
        say: Called with a line for each reason why files next to the weights were left out.

    Returns:
        With `merge_adapter`, how many tensors it changed and by how much at most; else None.

    Raises:
        CheckpointError: The source cannot be read, the adapter is no plain LoRA or one of another model, the two
            overlap or, unless `overwrite`, other files of the target would be replaced.
        ConfigError: An option is none of those above, or the model cannot be cut for (tp, pp).

    Examples:
        >>> run = smtrain.run("llama.yaml", say=lambda line: None)
        >>> folder = run.download("model")
        >>> smtrain.convert(folder, "shards", to="nxd", tp=2)
        >>> smtrain.convert("shards", "again", to="hf")
    """
    choices: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("to", to, get_args(Kind)),
        ("spec", spec, get_args(Spelling)),
        ("release", release, get_args(Release)),
        ("kv_order", kv_order, get_args(KvOrder)),
    ]
    if to in get_args(Kind):
        choices.append(("form", form, (None, *FORMS.get(to, ()))))
    choices += [("qkv", qkv, (*get_args(Qkv), None)), ("dtype", dtype, (*DTYPES, None))]
    others = table("word_names")["values"]
    faults = [
        f"{key}: got {got!r}; {hint(str(got), map(str, filter(None, known)), others)}"
        for key, got, known in choices
        if got not in known
    ]
    whole = [("tp", tp), ("pp", pp), ("kv_multiplier", kv_multiplier), ("vpp", vpp), ("vocab_divisor", vocab_divisor)]
    whole += [("first_stage_layers", first_stage_layers), ("last_stage_layers", last_stage_layers)]
    faults += [f"{key}: got {got}; must be at least 1" for key, got in whole if got is not None and got < 1]
    optional = [("config", config), ("merge_adapter", merge_adapter)]
    named = [("source", source), ("target", target), *((key, given) for key, given in optional if given is not None)]
    faults += [f"{key}: is an empty name; name a folder or an s3:// URI" for key, got in named if not str(got).strip()]
    if max_shard_size < 1:
        faults.append(f"max_shard_size: got {max_shard_size} bytes; must be at least 1")
    given = {
        "tp": tp, "pp": pp, "form": form, "qkv": qkv, "kv_multiplier": kv_multiplier, "cuts": cuts, "spec": spec,
        "vpp": vpp, "first_stage_layers": first_stage_layers, "last_stage_layers": last_stage_layers,
        "layers_per_stage": layers_per_stage, "vocab_divisor": vocab_divisor, "release": release,
        "max_shard_size": max_shard_size,
    }  # fmt: skip
    faults += list(_without_effect(to, form, given))
    if to == "peft" and merge_adapter is not None:
        faults.append("merge_adapter: makes a model, and to: peft writes an adapter; take one of the two")
    if to == "peft" and dtype is not None:
        faults.append("dtype: an adapter stays fp32, as it was trained; leave it out with to: peft")
    if faults:
        raise ConfigError(faults)
    source, config = folder_of(str(source)), None if config is None else folder_of(str(config))
    merge_adapter = None if merge_adapter is None else folder_of(str(merge_adapter))
    for read in (source, *(() if merge_adapter is None else (merge_adapter,))):
        refuse_overlap(read, target)
    _refuse_another_kind(target, to)
    if to == "peft":
        from smtrain.worker.checkpoint.adapter import native_adapter
        from smtrain.worker.checkpoint.huggingface.peft import write_peft

        adapter = native_adapter(place(source)) if is_uri(source) or Path(source).is_dir() else None
        if adapter is None:
            raise CheckpointError(f"{source} holds no checkpoint of a run with train.adapter; name its checkpoints.")
        carried = Carried() if config is None else companions_of(place(config), OF_A_WHOLE_MODEL)
        write_peft(adapter, target, config, overwrite, carried=carried)
        carried.tell(say)
        return None
    told = None if config is None else read_beside(config)
    weights = open_weights(source, told, kv_order, masters)
    if masters and not isinstance(weights, NNMSource):
        raise CheckpointError(
            f"{source} is not a neuronx-nemo-megatron checkpoint, and --masters reads only those; leave out "
            "--masters (masters=True)."
        )
    carried = companions_of(place(config)) if config is not None else _companions(source, weights)
    state = StateReader.present(weights) if to == "native" else None
    if reordered_qkv:
        from smtrain.worker.checkpoint.huggingface.reordered import Reordered

        weights, state = Reordered(weights), None
    merged = None
    if merge_adapter is not None:
        from smtrain.worker.checkpoint.adapter import open_adapter
        from smtrain.worker.checkpoint.merge import Merged

        weights = merged = Merged(weights, open_adapter(merge_adapter, ModelShape.from_config(weights.config)))
        state = None
    weights = weights if dtype is None else Cast(weights, DTYPES[dtype])
    if to == "hf":
        beside = config if config is not None else (source if is_hf_folder(place(source)) else None)
        write_hf(weights, target, beside, max_shard_size, overwrite, carried=carried)
    elif to == "native":
        from smtrain.worker.checkpoint.native.writer import write_native

        write_native(weights, target, tp=tp, pp=pp, state=state, overwrite=overwrite, carried=carried)
    elif to == "nemo-megatron":
        from smtrain.worker.checkpoint.megatron.legacy_writer import MegatronCut
        from smtrain.worker.checkpoint.nemo_megatron.writer import write_nnm

        write_nnm(
            weights, target, MegatronCut(tp, pp, vocab_divisor=vocab_divisor or 8), release, form == "xser", overwrite,
            carried,
        )  # fmt: skip
    elif to == "megatron":
        from smtrain.worker.checkpoint.megatron.legacy_writer import MegatronCut, write_megatron
        from smtrain.worker.checkpoint.megatron.torch_dist_writer import write_torch_dist

        cut = MegatronCut(tp, pp, vpp, first_stage_layers, last_stage_layers, layers_per_stage, vocab_divisor or 128)
        if form == "torch":
            write_megatron(weights, target, cut, spec, overwrite, carried)
        else:
            write_torch_dist(weights, target, cut, overwrite, carried)
    else:
        from smtrain.worker.checkpoint.nxd.writer import write_nxd

        write_nxd(
            weights,
            target,
            tp=tp,
            pp=pp,
            qkv=qkv,
            kv_order=kv_order,
            kv_multiplier=kv_multiplier,
            cuts=cuts,
            form="xser" if form == "xser" else "pt",
            overwrite=overwrite,
            carried=carried,
        )
    carried.tell(say)
    if to == "hf" and not tokenizer_in(carried.files) and not {*OTHER_TOKENIZERS} & {*carried.files}:
        say(f"{target} has no tokenizer, as {config or source} has none; name the model's folder with --config")
    return None if merged is None else merged.changed()


def _companions(source: str, weights: WeightSource) -> Carried:
    """The files next to the weights, or next to the folder of the step that they are of."""
    found = companions_of(weights.where)
    return found if found.files or str(weights.where) == source else companions_of(place(source))


def _refuse_another_kind(target: Path | str, to: str) -> None:
    """Checkpoints of a run beside a converted model: nobody could say which of the two is meant."""
    if is_uri(target) or not Path(target).is_dir():
        return
    where = place(target)
    if to != "native" and (steps := step_names(where)):
        raise CheckpointError(
            f"{target} holds checkpoints of a run ({steps[-1]}), which no conversion replaces; name another folder."
        )
    if to == "native" and (is_hf_folder(where) or MANIFEST in where.files()):
        raise CheckpointError(
            f"{target} holds a model of another kind, beside which no checkpoint is written; name another folder."
        )


def _without_effect(to: str, form: Form | None, given: dict[str, Any]) -> Iterator[str]:
    """A sentence for each option that says something the target does not take."""
    defaults = inspect.signature(convert).parameters
    for key, value in given.items():
        if to not in _TAKES or value == defaults[key].default:
            continue
        if key not in _TAKES[to]:
            if key != "form":  # whose values are checked by kind
                yield f"{key}: has no effect with to: {to}; leave it out"
        elif to == "megatron" and form != "torch" and key in _OF_RANKS:
            yield f"{key}: has no effect with form: torch_dist, which any mesh reads; leave it out, or take form: torch"


def read_beside(folder: Path | str) -> dict[str, Any]:
    """The config.json in a folder, or that is itself named."""
    from smtrain.worker.checkpoint.huggingface.folder import read_config

    return read_config(folder_of(str(folder)))
