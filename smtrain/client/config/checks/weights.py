"""Rules for the model: its path, its weights, and its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from smtrain.client.config.checks.data import tokenizer_faults
from smtrain.client.config.checks.machines import MESH
from smtrain.client.config.checks.mesh import mesh_instead
from smtrain.client.config.checks.rule import ConfigRule as Rule
from smtrain.client.config.checks.rule import Fault, rule_faults
from smtrain.client.config.checks.train import TRAIN, engine_faults
from smtrain.core.config.schema import JobConfig
from smtrain.core.config.training import RopeSection
from smtrain.core.errors import ConfigError, Sentence, SmtrainError, first_line, read_remedy
from smtrain.core.facts.name_suggestions import is_gated, positions
from smtrain.core.files import read_value
from smtrain.core.model.extension import longer, positions_after
from smtrain.core.model.hf_config import normalise, positions_named
from smtrain.core.model.hf_folder import checkpoint_in, tokenizer_in, weights_in
from smtrain.core.model.lora import AdapterShape, Lora, stage_faults, targets_of
from smtrain.core.model.other_forms import megatron_lack
from smtrain.core.model.quantized import cut_faults
from smtrain.core.model.remedies import (
    archive_fault,
    broken_link,
    dequantize,
    file_kind,
    file_misfit,
    folder_misfit,
    missing_shards,
    unreadable_quantization,
)
from smtrain.core.model.rope import BORDERS, KINDS, ORIGINAL
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import is_multimodal, text_part
from smtrain.core.protocol.requests import is_of_run
from smtrain.core.protocol.uris import (
    A_URI,
    HUB,
    HUBS,
    JUMPSTART,
    JUMPSTART_MODEL,
    RUN,
    RUN_NAME,
    is_mounted,
    object_store,
    readable_schemes,
    spelling_fault,
)
from smtrain.core.suggest import near_path
from smtrain.core.targets import TARGETS
from smtrain.core.text import with_article

_SCHEMES = ("demo://", RUN, JUMPSTART, *HUBS)


def _hubs(config: JobConfig) -> set[str]:
    """The hubs that the model and the data come from."""
    paths = (config.model.path, *(source.path for source in config.data.all_sources))
    return {scheme for scheme in HUBS for path in paths if path.startswith(scheme)}


def _is_own(config: JobConfig) -> bool:
    """Whether a config starts from the run that it describes."""
    name = config.model.path.removeprefix(RUN)
    return name == config.name or is_of_run(name, config.name)


WEIGHTS = (
    Rule(
        "model.weights model.init",
        lambda c: c.model.init == "scratch",
        "model.weights: has no effect with model.init: scratch, which starts at random; set"
        " only one",
    ),
    Rule(
        "model.weights train.adapter export.merge",
        lambda c: c.train.adapter and not c.export.merge,
        "model.weights: an adapter alone needs a base that peft can load; set export.merge: true,"
        " or convert the weights with `smtrain convert --to hf` and name the result as model.path",
    ),
    Rule(
        "model.weights evaluate.base",
        lambda c: c.evaluate.tasks and c.evaluate.base,
        "model.weights: the base model is evaluated from a Hugging Face folder; set evaluate.base:"
        " false, or convert the weights with `smtrain convert --to hf` and name the result as"
        " model.path",
    ),
)

HUB_RULES = (
    Rule(
        "model.path",
        lambda c: (
            c.model.path.startswith(JUMPSTART) and not JUMPSTART_MODEL.fullmatch(c.model.path)
        ),
        lambda c: (
            f"model.path: {c.model.path} must look like jumpstart://MODEL_ID or"
            " jumpstart://MODEL_ID@VERSION"
        ),
    ),
    Rule(
        "model.path target",
        lambda c: c.model.path.startswith(JUMPSTART) and not TARGETS[c.target].sagemaker,
        lambda c: (
            f"model.path: {c.model.path} is in a bucket of AWS, which target {c.target} does not"
            " read; give the same model of the hub (hf://organization/model)"
        ),
    ),
    Rule(
        "model.path",
        lambda c: c.model.path.startswith(HUBS) and not HUB.fullmatch(c.model.path),
        lambda c: (
            f"model.path: {c.model.path} must look like "
            f"{c.model.path.partition('://')[0]}://organization/model@revision"
        ),
    ),
    Rule(
        "model.path",
        lambda c: c.model.path.startswith(RUN) and not RUN_NAME.fullmatch(c.model.path),
        lambda c: (
            f"model.path: {c.model.path} must look like run://NAME, the name of an earlier run"
        ),
    ),
    Rule(
        "model.path name",
        lambda c: c.model.path.startswith(RUN) and _is_own(c),
        lambda c: (
            f"model.path: {c.model.path} is this run itself; name the earlier run, or give this one"
            " another name"
        ),
    ),
    Rule(
        "model.token",
        lambda c: c.model.token and (c.model.token.secret is None) == (c.model.token.ssm is None),
        "model.token: must name one of secret (Secrets Manager) and ssm (a parameter)",
    ),
    Rule(
        "model.token model.path",
        lambda c: c.model.token and not _hubs(c),
        "model.token: has no effect unless the model or the data is on a hub (hf://,"
        " modelscope://); leave it out",
    ),
    Rule(
        "model.token model.path",
        lambda c: c.model.token and len(_hubs(c)) > 1,
        "model.token: is the token of one hub, and model and data are on two; use a model or text"
        " in S3",
    ),
    Rule(
        "network.isolation model.path",
        lambda c: c.network.isolation and c.model.path.startswith(HUBS),
        "network.isolation: keeps the fetch stage from the hub; fetch the model once without it,"
        " and give its s3://",
    ),
)

MEGATRON = Rule(
    "export.megatron train.adapter export.merge",
    lambda c: c.export.megatron and c.train.adapter and not c.export.merge,
    "export.megatron: Megatron has no form for an adapter alone; set export.merge: true",
)


PEFT = Rule(
    "model.rope train.adapter export.merge",
    lambda c: c.model.rope and c.train.adapter and not c.export.merge,
    "model.rope: peft would load the adapter on the model as it was before, which reads no longer"
    " texts; set export.merge: true",
)


def weights_faults(config: JobConfig) -> Iterator[Fault]:
    """Weights that cannot be read, and options that cannot be combined with `model.weights` or a
    hub.
    """
    yield from rule_faults([PEFT], config)
    yield from _rope_faults(config)
    yield from rule_faults([MEGATRON], config)
    if config.model.weights is not None:
        yield from _place_faults(config, "model.weights", config.model.weights)
        yield from rule_faults(WEIGHTS, config)
    if config.train.preference and config.train.preference.folder:
        yield from _place_faults(
            config, "train.dpo.reference", config.train.preference.folder, ("demo://", RUN)
        )
    yield from rule_faults(HUB_RULES, config)


_ROPE = {"model.rope", *(f"model.rope.{name}" for name in RopeSection.model_fields)}
"""Keys that faults of model.rope read: if one is wrong by itself, no other is judged by the rest.
"""


def _rope_faults(config: JobConfig) -> Iterator[Fault]:
    """Keys that model.rope lacks or its type does not have, and borders in the wrong order."""
    rope = config.model.rope
    if rope is None:
        return
    settings = {*rope.settings}
    if not settings:
        yield _ROPE, "model.rope: is empty, so it changes nothing; leave it out"
    if rope.type is None:
        if settings - {"rope_theta"}:
            yield (
                _ROPE,
                "model.rope.type: is missing, and other keys than theta need it; set it to yarn",
            )
        return
    required_keys, optional = KINDS[rope.type]
    if "factor" in required_keys and "factor" not in settings:
        words = "its type needs it; give the new longest sequence divided by that of the model"
        yield _ROPE, f"model.rope.factor: is missing, and {words}"
    known_keys = {
        "rope_type",
        "rope_theta",
        *required_keys,
        *optional,
        *({ORIGINAL} if rope.type == "linear" else ()),
    }
    for key in sorted(settings - known_keys):
        yield _ROPE, f"model.rope.{key}: has no effect with type {rope.type}; leave it out"
    for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
        if low in known_keys and (lower := getattr(rope, low) or 1) >= (
            getattr(rope, high) or BORDERS[high]
        ):
            yield _ROPE, f"model.rope.{high}: must be above {low}, which is {lower:g}; raise it"


def _place_faults(
    config: JobConfig, key: str, path: str, extra_schemes: tuple[str, ...] = ()
) -> Iterator[Fault]:
    """Weights of a key that are in no place that can be read; `extra_schemes` are further schemes
    that it takes.
    """
    store, schemes = object_store(config.target), (*extra_schemes, *readable_schemes(config.target))
    if hint := None if path.startswith(schemes) else spelling_fault(path, (store, *extra_schemes)):
        yield {key}, f"{key}: {hint}"
    elif path.startswith(RUN) and not RUN_NAME.fullmatch(path):
        yield {key}, f"{key}: {path} must look like run://NAME, the name of an earlier run"
    elif "://" in path and not path.startswith(schemes):
        yield {key}, f"{key}: {path} is not a folder or {A_URI[store]}"
    elif "://" in path and (archive := archive_fault(path)):
        yield {key}, f"{key}: {path} {archive}"
    elif "://" not in path and Path(path).is_file():
        yield (
            {key},
            f"{key}: {path} is a file, and {file_kind(Path(path))}; give the folder with weights",
        )
    elif "://" not in path and not Path(path).is_dir():
        remedy = f"{near_path(path)}give one with weights, or {A_URI[store]}"
        yield {key}, Sentence(f"{key}: {path} is not a folder; {remedy}", "model.not_found")


def gated_faults(config: JobConfig) -> Iterator[Fault]:
    """Models or data known to be gated on the hub, without a token.

    Not checked if HF_ENDPOINT names a mirror, which may need no token, nor when a config is loaded:
    a plan needs none.
    """
    if config.model.token or config.compute.environment.get("HF_ENDPOINT"):
        return
    login_remedy = "a token kept in Secrets Manager or SSM must be named in model.token (`smtrain help secrets`)"
    if is_gated(path := config.model.path):
        name = HUB.fullmatch(path)
        copy = (
            f"`hf download {name[2]} --local-dir FOLDER` with a token of yours"
            if name
            else "a download"
        )
        yield (
            {"model.path", "model.token"},
            (
                f"model.token: is missing, and {path} is gated: accept its licence on the hub, then"
                f" {login_remedy}; or copy the model here, {copy}, and give that folder"
            ),
        )
    for source in config.data.all_sources:
        if config.data.prepared is None and is_gated(source.path, data=True):
            yield (
                {"data.path", "model.token"},
                (
                    f"model.token: is missing, and {source.path} is gated: accept its licence on"
                    f" the hub, then {login_remedy}"
                ),
            )


def respelled_model(config: JobConfig) -> str | None:
    """Say how smtrain writes the address in `model.path`, if the config writes it in another
    way.
    """
    path, readable = config.model.path, readable_schemes(config.target)
    return (
        None
        if path.startswith(readable)
        else spelling_fault(path, (object_store(config.target), *_SCHEMES))
    )


def _demo_model_fault(path: str) -> str | None:
    if not path.startswith("demo://"):
        return None
    from smtrain.core.demo.inputs import MODELS, demo_fault

    return demo_fault(path, MODELS)


def folder_faults(config: JobConfig, *, shape_alone: bool = False) -> Iterator[Fault]:
    """Faults of `model.path` that can be found offline; `shape_alone` as for `model_faults`."""
    path = config.model.path
    if hint := respelled_model(config):
        yield {"model.path"}, f"model.path: {hint}"
    elif path.startswith(HUBS):
        longest, rope = positions(path), config.model.rope
        if longest is not None and rope is not None:
            longest = positions_after(longest, rope.settings, config.train.seq_len)
        if longest is not None and longest < config.train.seq_len:
            by = " with model.rope" if rope else ""
            yield (
                {"model.path", "model.rope", "train.seq_len"},
                (
                    f"train.seq_len: {config.train.seq_len} is beyond the {longest} positions of "
                    f"{path.removeprefix('hf://')}{by}; use at most that"
                ),
            )
    elif "://" in path:
        if not (path.startswith((*_SCHEMES, *readable_schemes(config.target))) or is_mounted(path)):
            store = object_store(config.target)
            yield (
                {"model.path"},
                (
                    f"model.path: {path} is not a folder, {store}, hf://, modelscope://, jumpstart://,"
                    " demo:// or run://"
                ),
            )
        elif archive := archive_fault(path):
            yield {"model.path"}, f"model.path: {path} {archive}"
        elif fault := _demo_model_fault(path):
            yield {"model.path"}, f"model.path: {fault}"
    else:
        hf_config, fault = _read_config(Path(path), object_store(config.target))
        if fault:
            yield {"model.path"}, fault if isinstance(fault, Sentence) else f"model.path: {fault}"
            return
        yield from shape_faults(config, hf_config)
        yield from _local_reference(config, hf_config)
        if not shape_alone:
            yield from _file_faults(config, Path(path), hf_config)
            yield from tokenizer_faults(config, Path(path), hf_config)


def _read_config(folder: Path, store: str) -> tuple[dict[str, Any], str]:
    """The config.json of a model's folder, and why it cannot be read, else an empty text."""
    file = folder / "config.json"
    if folder.is_file():
        return {}, f"{folder} is a file, and {file_kind(folder)}; give a Hugging Face model folder"
    if not folder.is_dir():
        name = "/".join(folder.parts[-2:])
        on_hub = not folder.parent.exists() and HUB.fullmatch(f"hf://{name}")
        hub = f" (a model of the hub is hf://{name})" if on_hub else ""
        remedy = f"{near_path(folder)}give a Hugging Face model folder or {store} URI{hub}"
        return {}, Sentence(f"model.path: {folder} is not a folder; {remedy}", "model.not_found")
    if not file.is_file():
        names = [path.relative_to(folder).as_posix() for path in folder.glob("*")]
        names += [path.relative_to(folder).as_posix() for path in folder.glob("*/*")]
        missing_note = f"{folder} holds no config.json; give a Hugging Face model folder"
        return {}, broken_link(folder) or folder_misfit(names, folder) or missing_note
    if misfit := file_misfit(file):
        return {}, misfit
    try:
        hf_config = read_value(file)
    except (OSError, ValueError) as error:
        remedy = read_remedy(error, "mend it there, or copy this one file again")
        return {}, f"{file} cannot be read ({first_line(error)}); {remedy}"
    if not isinstance(hf_config, dict):
        return (
            {},
            (
                f"{file} is {with_article(type(hf_config).__name__)}, not a mapping; copy this one"
                " file again"
            ),
        )
    return hf_config, ""


def shape_faults(config: JobConfig, hf_config: dict[str, object]) -> Iterator[Fault]:
    """Settings that the shape in the model's config.json rules out."""
    try:
        original = model = normalise(hf_config)
    except SmtrainError as error:
        yield {"model.path"}, f"model.path: {error}"
        return
    try:
        if config.model.rope is not None and not any(_rope_faults(config)):
            model = normalise(config.extend_rope(hf_config))
    except ConfigError as error:
        yield {"model.path", "model.rope"}, error.faults[0]
        return
    shape, length = model.shape, config.train.seq_len
    padding = text_part(hf_config).get("pad_token_id")
    if isinstance(padding, int) and not -shape.vocab <= padding < shape.vocab:
        yield (
            {"model.path"},
            (
                f"model.path: pad_token_id is {padding} and the model has the ids 0 to"
                f" {shape.vocab - 1} (vocab_size {shape.vocab}); correct pad_token_id in its"
                " config.json, or set it to null"
            ),
        )
    if config.export.megatron and model.parallel_residual:
        yield (
            {"export.megatron", "model.path"},
            (
                "export.megatron: Megatron-core has no parallel residual, which config.json asks"
                " for (use_parallel_residual); leave it out"
            ),
        )
    if config.export.megatron and (lack := megatron_lack(model)):
        yield {"export.megatron", "model.path"}, f"export.megatron: {lack}; leave it out"
    longest = shape.positions or (
        positions_named(hf_config) if model is original else model.positions
    )
    if longest is not None and longest < length:
        by = " with model.rope" if config.model.rope else ""
        suffix = ", which it has learned one by one" if shape.positions is not None else ""
        if rope := longer(original, length):
            suffix = f", or set model.rope: {rope} to train it on longer ones"
        yield (
            {"model.path", "model.rope", "train.seq_len"},
            (
                f"train.seq_len: {length} is beyond the model's {longest} positions{by}; use at"
                f" most that{suffix}"
            ),
        )
    new_tokens = config.generate.max_new_tokens
    is_chosen = "max_new_tokens" in config.generate.model_fields_set and config.generate.prompts
    if longest is not None and is_chosen and new_tokens >= longest:
        yield (
            {"model.path", "model.rope", "generate.max_new_tokens"},
            (
                f"generate.max_new_tokens: {new_tokens} and a prompt are beyond the model's"
                f" {longest} positions; set at most {longest - 1}"
            ),
        )
    if config.train.engine == "nxd" and not shape.by_nxd:
        yield (
            {"model.path", "train.engine"},
            f"model.path: engine nxd trains no {shape.family} models; set train.engine: native"
            + (
                ""
                if TARGETS[config.target].here
                else " and take ml.p5.48xlarge or ml.trn2.48xlarge, which run it"
            ),
        )
    if config.train.adapter and not config.export.merge and is_multimodal(hf_config):
        yield (
            {"model.path", "train.adapter"},
            (
                "train.adapter: peft would not find the layers of the text part of a multimodal"
                f" model ({hf_config.get('model_type')}) by an adapter's names; set export.merge:"
                " true"
            ),
        )
    mesh_faults = shape.mesh_faults(
        config.parallel.tp, config.parallel.pp, config.parallel.ep, cp=config.parallel.cp
    )
    stages = list(_stage_faults(config, shape.layers))
    yield from stages
    yield from _expert_faults(config, shape)
    if config.train.quantizes and config.train.engine == "native" and not mesh_faults:
        for fault in cut_faults(shape, config.parallel.tp):
            yield {"model.path", "train.adapter.quantize", "parallel.tp"}, fault
    if config.train.adapter and (targets := config.train.adapter.targets):
        try:
            adapters = AdapterShape.of(shape, Lora(1, 1.0, targets=targets_of(shape, targets)))
            if (
                config.train.aux_by_layer
                and config.train.aux_loss is None
                and not adapters.lora.of_experts
            ):
                yield (
                    {"train.adapter.targets", "train.aux_loss", "train.aux_by_layer"},
                    (
                        "train.aux_by_layer: adapters without experts have no auxiliary loss; leave"
                        " it out, or set train.aux_loss"
                    ),
                )
            if len(shape.kinds) > 1 and not mesh_faults and not stages:
                for fault in stage_faults(adapters, config.parallel.pp, config.parallel.cuts):
                    yield {"model.path", "train.adapter.targets", "parallel.pp"}, fault
        except ConfigError as error:
            yield {"model.path", "train.adapter.targets"}, error.faults[0]
    if mesh_faults:
        remedy = mesh_instead(config, shape, lambda candidate: _other_faults(candidate, hf_config))
        for fault in mesh_faults:
            suffix = "" if "; " in fault else f"; {remedy}"
            yield {"model.path", "parallel.tp", "parallel.pp", "parallel.ep"}, fault + suffix


def _other_faults(config: JobConfig, hf_config: dict[str, object]) -> Iterator[str]:
    """The faults of the rules that a mesh may break."""
    shape, parallel = normalise(hf_config).shape, config.parallel
    yield from (text for _, text in (*rule_faults((*MESH, *TRAIN), config), *engine_faults(config)))
    if not shape.mesh_faults(parallel.tp, parallel.pp, parallel.ep, cp=parallel.cp):
        yield from (text for _, text in shape_faults(config, hf_config))


def _expert_faults(config: JobConfig, shape: ModelShape) -> Iterator[Fault]:
    """Options of mixtures of experts that mean nothing for this model or this training."""
    expert_options = {
        "parallel.expert_capacity": config.parallel.expert_capacity is not None,
        "train.aux_loss": config.train.aux_loss is not None,
        "train.aux_by_layer": config.train.aux_by_layer,
        "train.router_bias_update_rate": config.train.router_bias_update_rate > 0,
    }
    for key in (key for key, is_set in expert_options.items() if is_set and shape.experts is None):
        yield (
            {
                "model.path",
                key,
            },
            f"{key}: {with_article(shape.family)} model has no experts; leave it out",
        )
    names, adapter = shape.rules.experts, config.train.adapter
    if (
        config.train.router_bias_update_rate
        and shape.experts is not None
        and (names is None or names.bias is None or adapter)
    ):
        reason = (
            "adapters leave the model's routers as they are"
            if adapter
            else f"routers of {with_article(shape.family)} model have no such biases"
        )
        yield (
            {"model.path", "train.router_bias_update_rate", "train.adapter"},
            f"train.router_bias_update_rate: {reason}; leave it out",
        )
    if expert_options["parallel.expert_capacity"] and config.parallel.cp > 1:
        yield (
            {"parallel.expert_capacity", "parallel.cp"},
            (
                "parallel.expert_capacity: counts the tokens of whole sequences, which parallel.cp"
                " cuts; leave one of the two out"
            ),
        )


def _stage_faults(config: JobConfig, layers: int) -> Iterator[Fault]:
    """Stages that do not hold the model's layers."""
    parallel = config.parallel
    if parallel.layers_per_stage and sum(parallel.layers_per_stage) != layers:
        yield (
            {"model.path", "parallel.layers_per_stage"},
            (
                f"parallel.layers_per_stage: {list(parallel.layers_per_stage)} adds up to"
                f" {sum(parallel.layers_per_stage)} layers, and the model has {layers}; correct it,"
                " or leave it out"
            ),
        )
    if parallel.pipeline_cuts and any(
        a >= b for a, b in pairwise((-1, *parallel.pipeline_cuts, layers - 1))
    ):
        yield (
            {"model.path", "parallel.pipeline_cuts"},
            (
                f"parallel.pipeline_cuts: {list(parallel.pipeline_cuts)} must be rising layer"
                f" numbers from 0 to {layers - 2}, as the model has {layers} layers; correct it, or"
                " leave it out"
            ),
        )


def reference_faults(
    hf_config: Mapping[str, Any], reference: Mapping[str, Any], path: str
) -> Iterator[Fault]:
    """Differences of a dpo reference's config.json from the model's, of which both read the same
    tokens.
    """
    text, reference_text = text_part(hf_config), text_part(reference)
    for key in ("vocab_size", "model_type"):
        our_value, reference_value = text.get(key), reference_text.get(key)
        if our_value is not None and reference_value is not None and our_value != reference_value:
            yield (
                {"train.dpo.reference", "model.path"},
                (
                    f"train.dpo.reference: {path} is another kind of model than model.path ({key}"
                    f" {reference_value} and {our_value}); name the model that this run starts"
                    " from, or set train.dpo.reference: start"
                ),
            )
            return


def _local_reference(config: JobConfig, hf_config: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of a reference in a folder of this machine."""
    path = config.train.preference.folder if config.train.preference else None
    if path is None or "://" in path or not Path(path).is_dir():
        return
    reference, fault = _read_config(Path(path), object_store(config.target))
    if fault:
        yield {"train.dpo.reference"}, f"train.dpo.reference: {fault}"
    else:
        yield from reference_faults(hf_config, reference, path)


def _file_faults(config: JobConfig, folder: Path, hf_config: Mapping[str, Any]) -> Iterator[Fault]:
    """Files that the model's folder needs besides its config.json."""
    names = [path.name for path in folder.iterdir()]
    if is_multimodal(hf_config) and weights_in(names) is None and not missing_shards(names)[0]:
        yield (
            {"model.path"},
            (
                f"model.path: {folder} has the config.json of a multimodal model"
                f" ({hf_config.get('model_type')}) and no weights, and the export is to keep its"
                " other parts: give the whole folder, or the text model's own config.json (its"
                " text_config)"
            ),
        )
    elif config.model.init == "weights" and config.model.weights is None:
        yield from (
            ({"model.path"}, f"model.path: {fault}") for fault in _misfits(folder, names, hf_config)
        )
    if config.data.prepared is not None:
        return
    tokenizer = tokenizer_in(names)
    read = [folder / name for name in (*tokenizer, "tokenizer_config.json")]
    if misfit := next(filter(None, map(file_misfit, read)), None):
        yield {"model.path"}, f"model.path: {misfit}"
    if not tokenizer:
        yield (
            {"model.path"},
            (
                f"model.path: {folder} holds no tokenizer.json (nor vocab.json with merges.txt, nor"
                " tokenizer.model), which preparing text needs; save the tokenizer there with"
                " AutoTokenizer.from_pretrained(...).save_pretrained(...), or set data.prepared"
            ),
        )


def _misfits(folder: Path, names: list[str], hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Weights that are missing, incomplete, or not in the form that their names say; by names and
    first bytes only.
    """
    first = weights_in(names)
    present, absent = missing_shards(names)
    if first is None and not present:
        if not checkpoint_in(names):
            yield (
                broken_link(folder)
                or folder_misfit(names, folder)
                or (
                    f"{folder} holds no model.safetensors or pytorch_model.bin (nor an index); save"
                    " the weights as safetensors, or set model.init: scratch"
                )
            )
        return
    if absent and (first is None or first.endswith(".index.json")):
        yield (
            f"{folder} lacks {len(absent)} of its {len(present) + len(absent)} files of weights "
            f"({', '.join(absent[:3])}); copy those files into it"
        )
    read = (
        [first]
        if first is not None and not first.endswith(".index.json")
        else [*filter(None, [first]), *present]
    )
    if misfit := next((fault for name in read if (fault := file_misfit(folder / name))), None):
        yield misfit
    if method := unreadable_quantization(hf_config):
        yield (
            f"{folder}/config.json says that the weights are quantized ({method}), which cannot be"
            f" trained; {dequantize(method)}; if they are plain numbers, take quantization_config"
            " out of config.json"
        )
