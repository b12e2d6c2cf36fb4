"""A model and its tokenizer, loaded to generate; an adapter on it without merging it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from smtrain.core.errors import CheckpointError, SmtrainError, first_line
from smtrain.core.extras import missing
from smtrain.core.model import hf_tokenizer
from smtrain.core.model.families import FAMILIES
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.hf_folder import OTHER_TOKENIZERS, tokenizer_in
from smtrain.core.model.remedies import file_misfit, quantization
from smtrain.core.model.transformers_build import check_model, transformers_config
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.merge import refuse_other_base

ADAPTER = "adapter_config.json"
NO_MODEL = (OSError, ValueError, KeyError)
"""What transformers raises for a folder that holds none."""
MISFITS = (*NO_MODEL, RuntimeError, TypeError)
"""What peft raises for an adapter that is none for a model."""


@dataclass
class Loaded:
    """A model that is ready to generate."""

    folder: Path
    model: Any
    tokenizer: Any
    adapted: bool = False
    """Whether it has an adapter on it, which `plain` switches off."""
    learned: bool = False
    """Whether its positions are a table, beyond whose end it can compute nothing."""

    @property
    def padding(self) -> int:
        """The id that fills a batch up: that of the end of a text, if the model has it."""
        rows = self.model.get_input_embeddings().num_embeddings
        return next((i for i in self.ends if 0 <= i < rows), 0)

    @property
    def positions(self) -> int | None:
        """The longest text that the model has positions for, prompt and answer together."""
        told = getattr(self.model.config, "max_position_embeddings", None)
        return told if isinstance(told, int) else None

    @property
    def ends(self) -> list[int]:
        """Ids of the tokens that end a text."""
        told = self.model.generation_config.eos_token_id
        told = self.tokenizer.eos_token_id if told is None else told
        return list(told) if isinstance(told, (list, tuple)) else [] if told is None else [told]

    @contextmanager
    def plain(self, on: bool = True) -> Iterator[None]:
        """Within, the model answers without its adapter."""
        if not (on and self.adapted):
            yield
            return
        with self.model.disable_adapter():
            yield


def load(folder: Path, *, adapter: Path | None = None) -> Loaded:
    """Load a Hugging Face folder in its own number format, on an accelerator if there is one.

    Raises `CheckpointError` where transformers does not load it, or builds another model than config.json describes,
    where the tokenizer has ids that the model lacks, and where the adapter is none for this model.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give the Hugging Face folder that export wrote.")
    try:
        described = json.loads((folder / "config.json").read_text("utf-8"))
        known = isinstance(described, dict) and described.get("model_type") in FAMILIES
        normal = normalise(described) if known else None
        source = HFSource(folder) if known and quantization(described) is None else None
        refuse_no_tokenizer(folder)
        tokenizer = hf_tokenizer.load(folder)
        refuse_unknown_ids(folder, tokenizer, described)
        options = {"config": transformers_config(described)} if known else {}
        if source is not None and source.renamed:
            model: Any = _by_our_names(source, options["config"])
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto", **options)
    except (*NO_MODEL, AttributeError) as error:
        raise CheckpointError(not_loaded(folder, error)) from error
    if normal is not None:
        check_model(model, normal)
    if adapter is not None:
        model = _adapted(model, folder, adapter)
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    model.eval()
    learned = normal is not None and normal.rope is None
    return Loaded(folder, model, tokenizer, adapted=adapter is not None, learned=learned)


def refuse_unknown_ids(folder: Path, tokenizer: Any, described: Any) -> None:
    """Raises `CheckpointError` if the tokenizer of a folder can write ids that the model of its config.json lacks."""
    vocabulary = hf_tokenizer.vocabulary_of(described) if isinstance(described, dict) else None
    if fault := hf_tokenizer.vocabulary_fault(tokenizer.get_vocab(), vocabulary):
        raise CheckpointError(f"{folder}: {fault}.")


def refuse_no_tokenizer(folder: Path) -> None:
    """Raises `CheckpointError` for a model's folder without a tokenizer, or with a file that is none."""
    files = tokenizer_in(path.name for path in folder.iterdir())
    if found := next(filter(None, (file_misfit(folder / name) for name in (*files, "tokenizer_config.json"))), None):
        raise CheckpointError(f"{found}.")
    if not files and not any((folder / name).is_file() for name in OTHER_TOKENIZERS):
        raise CheckpointError(
            f"{folder} has no tokenizer; copy the tokenizer's files (tokenizer.json and tokenizer_config.json, or "
            "tokenizer.model) from the model that training started from into it."
        )


def _by_our_names(source: HFSource, config: Any) -> Any:
    """The model with weights that transformers would not find, as their names have words in front."""
    family = FAMILIES[config.model_type]
    modules = {file: module for module, file in family.module_names.items()}
    model: Any = AutoModelForCausalLM.from_config(config)
    held = set(model.state_dict())
    names = {name: name if name in held else modules.get(name, name) for name in source.names()}
    dtypes = {source.dtype(name) for name in names}
    model.to(source.read(next(iter(names))).dtype if len(dtypes) == 1 else torch.float32)
    model.load_state_dict({module: source.read(name) for name, module in names.items()}, strict=False)
    model.tie_weights()
    return model


def not_loaded(folder: Path, error: BaseException) -> str:
    """The sentence for a folder that transformers does not load: it names the file that is damaged, if one is."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        file = folder / name
        if found := file_misfit(file):
            return f"{found}."
        try:
            json.loads(file.read_text("utf-8") if file.is_file() else "{}")
        except (OSError, ValueError) as broken:
            return f"{file} is not JSON ({first_line(broken)}); mend it there, or copy this file again."
    if not (folder / "config.json").is_file():
        return (
            f"{folder} is not a model that transformers loads (it has no config.json); copy the model's into it, or "
            "name the folder that export or `smtrain convert --to hf` wrote."
        )
    return (
        f"{folder} is not a model that transformers loads ({first_line(error)}); mend what it names, or write the "
        f"folder again with `smtrain convert {folder} NEW --to hf`."
    )


def _adapted(model: Any, folder: Path, adapter: Path) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise SmtrainError(missing("peft")) from None
    if not (adapter / ADAPTER).is_file():
        raise CheckpointError(f"{adapter} has no {ADAPTER}; an adapter is a folder as PEFT writes it")
    refuse_other_base(adapter, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers 5 by an older name
            return PeftModel.from_pretrained(model, str(adapter))
    except MISFITS as error:
        raise CheckpointError(not_an_adapter_for(folder, adapter, error)) from error


def not_an_adapter_for(folder: Path, adapter: Path, error: BaseException) -> str:
    """What to say of one of `MISFITS`."""
    shapes = "size mismatch" in str(error)
    why = "its factors have the shapes of another model's" if shapes else first_line(error)
    return f"{adapter} is not an adapter for the model in {folder} ({why}); name the model that it was trained on"
