"""Load a model and its tokenizer for generation, with an unmerged adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from smtrain.core.errors import CheckpointError, SmtrainError, first_line, read_remedy
from smtrain.core.extras import missing_module
from smtrain.core.files import read_value
from smtrain.core.model import hf_tokenizer
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.hf_folder import ADAPTER, OTHER_TOKENIZERS, tokenizer_in
from smtrain.core.model.remedies import file_misfit, unreadable_quantization
from smtrain.core.model.shape import ModelShape
from smtrain.core.model.text_part import is_multimodal, text_part
from smtrain.core.model.transformers_build import check_model, transformers_config
from smtrain.core.text import with_article
from smtrain.worker.checkpoint.adapter import precision_of_base
from smtrain.worker.checkpoint.huggingface.damage import refuse_damaged
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.merge import refuse_other_base
from smtrain.worker.checkpoint.nf4 import quantize_linears
from smtrain.worker.checkpoint.sources import precisions_of

NO_MODEL = (OSError, ValueError, KeyError)
"""Errors of transformers for a folder without a model."""
MISFITS = (*NO_MODEL, RuntimeError, TypeError)
"""Errors of peft for an adapter that does not fit the model."""

GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class LoadedModel:
    """A model ready to generate."""

    folder: Path
    model: Any
    tokenizer: Any
    has_adapter: bool = False
    """Whether it has an adapter, which `plain` switches off."""
    has_learned_positions: bool = False
    """Whether positions are a learned table, beyond whose end the model cannot compute."""
    close: Callable[[], object] = lambda: None
    """End the other processes of a divided model."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template for all conversations."""

    @property
    def vocabulary(self) -> int:
        """The number of ids that the model has."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def padding(self) -> int:
        """The id for padding: the end of a text, if the model has that id."""
        return next((i for i in self.ends if 0 <= i < self.vocabulary), 0)

    @property
    def positions(self) -> int | None:
        """The longest text that the model has positions for, prompt and answer together."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end a text."""
        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        return list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]

    def refuse_unknown_token(self, ids: list[int]) -> None:
        """Raise `CheckpointError` if a text has a token with an id that the model lacks."""
        if (largest := max(ids, default=0)) >= self.vocabulary:
            token, added_tokens = (
                self.tokenizer.convert_ids_to_tokens(largest),
                self.tokenizer.added_tokens_decoder,
            )
            fault = hf_tokenizer.unknown_token(
                token, largest, self.vocabulary, is_added=largest in added_tokens
            )
            raise CheckpointError(
                f"a text for the model is bad: {fault}; take the token out of it."
            )

    @contextmanager
    def plain(self, on: bool = True) -> Iterator[None]:
        """Switch the adapter off within the block."""
        if not (on and self.has_adapter):
            yield
            return
        with self.model.disable_adapter():
            yield


def load(folder: Path, *, adapter: Path | None = None) -> LoadedModel:
    """Load a Hugging Face folder in its own number format, on an accelerator if there is one.

    Raises `CheckpointError` if transformers does not load it, or builds another model than
    config.json describes, if exported weights are damaged, or if the adapter is for another model.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give the Hugging Face folder that export wrote.",
            code="checkpoint.missing",
        )
    if (folder / ADAPTER).is_file() and (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds a whole model and an adapter ({ADAPTER}), which transformers would add"
            " and training does not; move the adapter's files to a separate folder, and name"
            " it as the adapter."
        )
    for checked_folder in (folder, *([adapter] if adapter else [])):
        refuse_damaged(checked_folder)
    try:
        hf_config = read_value(folder / "config.json")
        is_known_family = (
            isinstance(hf_config, dict) and text_part(hf_config).get("model_type") in FAMILIES
        )
        normal = normalise(hf_config) if is_known_family else None
        source = (
            HFSource(folder)
            if is_known_family and unreadable_quantization(hf_config) is None
            else None
        )
        refuse_no_tokenizer(folder)
        tokenizer = hf_tokenizer.load(folder)
        options: dict[str, Any] = (
            {"config": transformers_config(hf_config)} if is_known_family else {}
        )
        generation_ids = named_ends(folder)
        if (
            generation_ids is not None
        ):  # or transformers reads the file, and refuses settings that do not count here
            options["generation_config"] = generation_ids
        if source is not None and (source.renamed or is_multimodal(hf_config)):
            model: Any = _by_our_names(source, options["config"])
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype="auto", **options
            )
    except (*NO_MODEL, AttributeError) as error:
        raise CheckpointError(not_loaded(folder, error)) from error
    if normal is not None:
        check_model(model, normal)
    model.generation_config = generation_ids or only_ids(model.generation_config.to_dict())
    if adapter is not None:
        model = _apply_adapter(model, folder, adapter)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    model.eval()
    has_learned_positions = normal is not None and normal.rope is None
    return LoadedModel(
        folder,
        model,
        tokenizer,
        has_adapter=adapter is not None,
        has_learned_positions=has_learned_positions,
    )


def named_ends(folder: Path) -> GenerationConfig | None:
    """The ids in a folder's generation_config.json; None without the file.

    Raises ValueError if it is no object.

    Its other settings do not count: transformers would use each that `Sampling` leaves open, also
    for greedy text.
    """
    file = folder / GENERATION
    if not file.is_file():
        return None
    settings = read_value(file)
    if not isinstance(settings, dict):
        raise ValueError(
            f"{GENERATION} holds {with_article(type(settings).__name__)}, no JSON object"
        )
    return only_ids(settings)


def only_ids(settings: Mapping[str, Any]) -> GenerationConfig:
    """A generation config with nothing but the ids of the tokens that begin, end and pad a text."""
    config_class: Any = GenerationConfig
    config: GenerationConfig = config_class(**{key: settings.get(key) for key in _IDS})
    return config


def refuse_no_tokenizer(folder: Path) -> None:
    """Raise `CheckpointError` for a model's folder without a tokenizer, or with a broken one."""
    files = tokenizer_in(path.name for path in folder.iterdir())
    if fault := next(
        filter(None, (file_misfit(folder / name) for name in (*files, "tokenizer_config.json"))),
        None,
    ):
        raise CheckpointError(f"{fault}.")
    if not files and not any((folder / name).is_file() for name in OTHER_TOKENIZERS):
        raise CheckpointError(
            f"{folder} has no tokenizer; copy the tokenizer's files (tokenizer.json and"
            " tokenizer_config.json, or tokenizer.model) from the model that training started from"
            " into it."
        )


def _by_our_names(source: HFSource, config: Any) -> Any:
    """Load weights that transformers would not find because their names have a prefix, or that it
    would load in fp8.
    """
    shape = ModelShape.from_config(source.config)
    dtypes = precisions_of(source)
    dtype = source.read(next(iter(source.names()))).dtype if len(dtypes) == 1 else torch.float32
    # As from_pretrained builds it: a cast afterwards would round the rotary frequencies, which stay
    # in fp32.
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    names = set(source.names())
    with torch.no_grad():
        for module_name, tensor in model.state_dict().items():  # views of the model's memory
            parts = [*shape.file_parts(module_name, tuple(tensor.shape))]
            if names.issuperset(parts):
                pieces = [source.read(part) for part in parts]
                values = pieces[0] if len(pieces) == 1 else torch.cat([*map(torch.flatten, pieces)])
                tensor.copy_(values.view(tensor.shape))
    model.tie_weights()
    return model


def not_loaded(folder: Path, error: BaseException) -> str:
    """Explain why transformers does not load a folder; names the damaged file if there is one."""
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ):
        file = folder / name
        if fault := file_misfit(file):
            return f"{fault}."
        try:
            if file.exists():
                read_value(file)
        except OSError as broken:
            return (
                f"{file} cannot be read ({first_line(broken)});"
                f" {read_remedy(broken, 'check the disk')}."
            )
        except ValueError as broken:
            return (
                f"{file} is not JSON ({first_line(broken)}); mend it there, or copy this file"
                " again."
            )
    if not (folder / "config.json").is_file():
        return (
            f"{folder} is not a model that transformers loads (it has no config.json); copy the"
            " model's into it, or name the folder that export or `smtrain convert --to hf` wrote."
        )
    return (
        f"{folder} is not a model that transformers loads ({first_line(error)}); mend the file that"
        f" it names, or write the folder again with `smtrain convert {folder} NEW --to hf`."
    )


def _apply_adapter(model: Any, folder: Path, adapter: Path) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise SmtrainError(missing_module("peft")) from None
    if not (adapter / ADAPTER).is_file():
        raise CheckpointError(
            f"{adapter} has no {ADAPTER}; an adapter is a folder as PEFT writes it",
            code="checkpoint.missing",
        )
    refuse_other_base(adapter, folder)
    if (precision := precision_of_base(adapter)) is not None:
        quantize_linears(
            model, ModelShape.from_config(read_value(folder / "config.json")), precision
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # peft uses an old name of transformers 5
            return PeftModel.from_pretrained(model, str(adapter))
    except MISFITS as error:
        raise CheckpointError(not_an_adapter_for(folder, adapter, error)) from error


def not_an_adapter_for(folder: Path, adapter: Path, error: BaseException) -> str:
    """Explain one of `MISFITS`."""
    shapes = "size mismatch" in str(error)
    reason = "its factors have the shapes of another model's" if shapes else first_line(error)
    return (
        f"{adapter} is not an adapter for the model in {folder} ({reason}); name the model that it"
        " was trained on"
    )
