"""A GPT-2 as old repositories hold it - .bin shards, vocab.json and merges.txt - from a hub to an
exported model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import smtrain
from smtrain.core.model.card import front_matter
from tests.client.launch.hub import COMMIT, Hub

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def repository(trained_inputs: dict[str, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "onnx").mkdir(parents=True)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=401)
    model = GPT2LMHeadModel(config)
    (folder / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]})
    )
    # as openai-community/gpt2: no prefix, and buffers that are computed today
    weights = dict(model.transformer.state_dict()) | {
        "h.0.attn.bias": torch.ones(1, 1, 64, 64).tril()
    }
    weight_map: dict[str, str] = {}
    for n in range(2):
        part = {name: weights[name].contiguous() for name in sorted(weights)[n::2]}
        torch.save(part, folder / f"pytorch_model-{n + 1:05d}-of-00002.bin")
        weight_map |= dict.fromkeys(part, f"pytorch_model-{n + 1:05d}-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    made = tokenizers.ByteLevelBPETokenizer()
    made.train(
        [str(trained_inputs["text"] / "a.jsonl")],
        400,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    made.save_model(str(folder))
    about = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    others = [
        "LICENSE",
        "NOTICE.txt",
        "USE_POLICY.md",
        "chat_template.jinja",
        "README.md",
        "training_args.bin",
    ]
    for name in [*others, "onnx/config.json", "onnx/model.onnx", "tf_model.h5"]:
        (folder / name).write_text(f"{name} of the repository")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [old]\n---\n\n# Old\n")
    return folder


def test_it_is_fetched_trained_and_exported_with_all_that_belongs_to_it(
    repository: Path, trained_inputs: dict[str, Path], local_home: Path, tmp_path: Path
) -> None:
    hub = Hub(repository, "org/old")
    raw: dict[str, Any] = {
        "name": "old",
        "model": {"path": "hf://org/old"},
        "data": {"path": trained_inputs["text"]},
        "train": {
            "seq_len": 32,
            "steps": 2,
            "global_batch_size": 2,
            "precision": "fp32",
            "lr": 1e-9,
        },
        "compute": {"processes_per_instance": 1, "environment": {"HF_ENDPOINT": hub.url}},
    }
    try:
        said: list[str] = []
        folder = smtrain.run(raw, say=said.append).download(tmp_path / "exported")
    finally:
        hub.close()
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "LICENSE",
        "NOTICE.txt",
        "USE_POLICY.md",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
    }
    assert not names & {"training_args.bin", "tf_model.h5", "onnx"}
    about = front_matter((folder / "README.md").read_text())
    assert about["base_model"] == "org/old"
    assert about["license"] == "apache-2.0", "the licence of the base model's card goes along"
    source = json.loads((folder / "source.json").read_text())
    assert source == {"endpoint": hub.url, "model": "org/old", "revision": "main", "commit": COMMIT}
    trained = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    began = AutoModelForCausalLM.from_pretrained(repository, local_files_only=True)
    assert sum(1 for _ in began.parameters()) == 2 + 2 * 12 + 2
    for mine, theirs in zip(trained.parameters(), began.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    ids = [
        AutoTokenizer.from_pretrained(at, local_files_only=True)("the red fox").input_ids
        for at in (folder, repository)
    ]
    assert ids[0] == ids[1]
