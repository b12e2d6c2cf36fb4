"""One function makes the tokenizer of a folder, and one decides which weights count, for every
command and stage.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import smtrain
from smtrain.core.errors import CheckpointError
from smtrain.core.model import hf_tokenizer
from smtrain.core.model.hf_folder import is_adapter
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.data.read.reading import strings
from smtrain.worker.data.tokenize import encoder
from smtrain.worker.data.tokenizer import load_tokenizer, settled_json
from smtrain.worker.generation.load import load
from tests.core.model.test_generate import make

ROOT = Path(smtrain.__file__).parent
TEXTS = [
    "the hat",
    " the  hat",
    "</s><s>[INST] the hat [/INST] a hat</s>the",
    "a\nthe</s> a",
    "12 345",
    "\u00e9\u4eac",
]


def legacy_llama(folder: Path, **settings: Any) -> Path:
    """Llama 2's own tokenizer.json in small: each stretch between special tokens gets a space, also
    a second one.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a")]
    for piece in [
        *"\u2581abcdefghijklmnopqrstuvwxyz[]/INST0123456789",
        *("".join(pair) for pair in merges),
    ]:
        vocab.setdefault(piece, len(vocab))
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if not settings.pop("in_pieces", False):
        made.add_special_tokens(
            [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")]
        )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return saved(
        folder,
        made,
        len(vocab),
        {"tokenizer_class": "LlamaTokenizer", "legacy": True, **named, **settings},
    )


def spaced(folder: Path) -> Path:
    """GPT-2's kind, with a setting in tokenizer_config.json that its tokenizer.json contradicts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate([*alphabet, "</s>"])}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["</s>"])
    return saved(
        folder,
        made,
        257,
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "eos_token": "</s>"},
    )


def saved(folder: Path, made: Tokenizer, size: int, settings: dict[str, Any]) -> Path:
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


MAKERS = {
    "Llama 2": legacy_llama,
    "its end named as an object": lambda folder: legacy_llama(
        folder,
        in_pieces=True,
        eos_token={"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False},
    ),
    "its end named only": lambda folder: legacy_llama(folder, in_pieces=True),
    "its end listed": lambda folder: legacy_llama(
        folder, in_pieces=True, added_tokens_decoder={"2": {"content": "</s>", "special": True}}
    ),
    "a contradiction": spaced,
}


@pytest.mark.parametrize("maker", MAKERS)
def test_text_gets_the_same_ids_in_preparing_generating_and_preferences(
    maker: str, tmp_path: Path
) -> None:
    folder = MAKERS[maker](tmp_path)
    ours, theirs = load_tokenizer(folder), hf_tokenizer.load(folder)
    again = Tokenizer.from_str(settled_json(folder)[0].decode())
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert (
            theirs(text, add_special_tokens=False)["input_ids"]
            == ids
            == again.encode(text, add_special_tokens=False).ids
        )
        assert encoder.choose(folder)[0].encode(strings([text]), True)[0].tolist() == ids
        assert theirs.decode(ids) == ours.decode(ids, False)
    end = theirs.eos_token_id
    assert ours.encode("a</s>the", add_special_tokens=False).ids.count(end) == 1


@pytest.mark.parametrize(
    "forms", [("one", "index"), ("one", "bin"), ("index", "bin")], ids="-".join
)
def test_of_several_forms_of_weights_all_take_the_same(
    forms: tuple[str, str], tmp_path: Path
) -> None:
    """A folder that was saved again in shards of another size, or converted, holds two sets of
    weights.
    """
    folder = make(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for number, form in enumerate(forms):
        shifted = {name: tensor + number for name, tensor in tensors.items()}
        if form == "bin":
            torch.save(shifted, folder / "pytorch_model.bin")
        elif form == "one":
            save_file(shifted, folder / "model.safetensors", {"format": "pt"})
        else:
            save_file(shifted, folder / "model-00001-of-00001.safetensors", {"format": "pt"})
            index = {
                "metadata": {},
                "weight_map": dict.fromkeys(shifted, "model-00001-of-00001.safetensors"),
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    source, model = HFSource(folder), load(folder).model.cpu()
    for name, parameter in model.named_parameters():
        assert torch.equal(source.read(name), parameter), name
        assert torch.equal(parameter, tensors[name]), "the form listed first counts"


def test_a_whole_model_with_an_adapter_is_read_in_one_way(tmp_path: Path) -> None:
    """transformers adds such an adapter to the model, and training does not."""
    folder = make(tmp_path / "model", "llama")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"})
    )
    names = [path.name for path in folder.iterdir()]
    assert not is_adapter(names)
    assert is_adapter({*names, "adapter_model.safetensors"} - {"model.safetensors"}), (
        "config.json may be next to it"
    )
    with pytest.raises(
        CheckpointError, match=r"a whole model and an adapter .* move the adapter's files"
    ):
        load(folder)


def calls(path: Path) -> set[str]:
    """The functions that a module calls, with the name before the last dot."""
    names = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    return {
        ast.unparse(name).split("(")[0]
        for name in names
        if isinstance(name, (ast.Attribute, ast.Name))
    }


MAKES_TOKENIZERS = {
    "core/model/hf_tokenizer.py": {
        "transformers.AutoTokenizer.from_pretrained",
        "loader.from_pretrained",
        "Tokenizer.from_str",
    },
    # gigatoken reads the content of `settled_json`, and is compared with tokenizers
    "worker/data/tokenize/encoder.py": {"gigatoken.Tokenizer.from_json"},
}
"""Modules that may read the tokenizer of a folder, and their calls."""
READS_WEIGHTS = {
    "worker/generation/load.py": {
        "AutoModelForCausalLM.from_pretrained",
        "PeftModel.from_pretrained",
    },
    "tools/doctor/trial.py": {
        "AutoModelForCausalLM.from_pretrained",
        "torch.load",
    },  # of its own export
}
"""Modules in which other libraries read weights; all else takes `HFSource`."""


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (
            (
                "AutoTokenizer",
                "PreTrainedTokenizer",
                "Tokenizer.from_",
                "loader.from_",
                "convert_slow",
            ),
            MAKES_TOKENIZERS,
        ),
        (
            (
                "AutoModel",
                "PeftModel",
                "safe_open",
                "safetensors.torch",
                " load_file",
                "torch.load",
            ),
            READS_WEIGHTS,
        ),
    ],
    ids=["tokenizer", "weights"],
)
def test_no_other_module_reads_one(words: tuple[str, ...], allowed: dict[str, set[str]]) -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        if any(word in source for word in words):
            names = {name for name in calls(path) if any(word in name for word in words)}
            loading = {name for name in names if not name.endswith("from_config")}
            found |= {path.relative_to(ROOT).as_posix(): loading} if loading else {}
    assert found == allowed
