"""Texts of a model: what sampling, beams, stop strings, batches and streams make of it, against
transformers itself.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.worker.generation.conversation import encode_conversation, set_template
from smtrain.worker.generation.generating import complete, encode_prompt, generation_config, stream
from smtrain.worker.generation.load import LoadedModel, load
from smtrain.worker.generation.memory_fit import need_of, refuse_too_large, weights_in
from smtrain.worker.generation.sampling import Sampling, cut_at, held_back
from tests.core.model.test_generate import make

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<a>{% endif %}"
)
GREEDY = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    made = load(folder)
    (folder / "chat.jinja").write_text(TEMPLATE)
    set_template(made, folder / "chat.jinja")
    return made


def test_padding_is_an_id_that_the_model_has(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = loaded.model.get_input_embeddings().num_embeddings
    paddings: dict[Any, int] = {50256: 0, rows: 0, rows - 1: rows - 1}
    for end, padding in paddings.items():
        monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", end)
        assert generation_config(loaded, GREEDY).pad_token_id == padding
        assert (
            len(complete(loaded, [ids(loaded, "a"), ids(loaded, "a longer prompt")], GREEDY)) == 2
        )
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [50256, 3])
    assert loaded.padding == 3


def test_only_a_text_with_a_token_that_the_model_lacks_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<more {i}>" for i in range(vocabulary)])
    tokenizer.pad_token = f"<more {vocabulary - 1}>"
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert len(complete(loaded, [ids(loaded, "a"), ids(loaded, "a longer prompt")], GREEDY)) == 2
    words = (
        rf"bad: the token '<more {vocabulary - 1}>' has the id \d+, and the model has .* take the"
        r" token out of it"
    )
    with pytest.raises(CheckpointError, match=words):
        ids(loaded, f"a <more {vocabulary - 1}>")


def ids(loaded: LoadedModel, text: str) -> torch.Tensor:
    return encode_prompt(loaded, text, special=True)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(12, 1.5, seed=3),
        Sampling(12, 2.0, 5, 0.8, seed=4),
        Sampling(8, beams=3, length_penalty=0.5),
    ],
    ids=["greedy", "temperature", "top-k and top-p", "beams"],
)
def test_a_stream_is_what_transformers_generates(
    folder: Path, loaded: LoadedModel, sampling: Sampling
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("def f(x):", return_tensors="pt")["input_ids"]
    torch.manual_seed(sampling.seed)
    options: dict[str, Any] = {"do_sample": sampling.is_random, "num_beams": sampling.beams}
    if sampling.is_random:
        options |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    if sampling.beams > 1:
        options["length_penalty"] = sampling.length_penalty
    out = model.generate(
        prompt, max_new_tokens=sampling.max_new_tokens, pad_token_id=256, **options
    )
    expected = tokenizer.decode(out[0], skip_special_tokens=True).removeprefix("def f(x):")
    assert "".join(stream(loaded, ids(loaded, "def f(x):"), sampling)) == expected
    assert complete(loaded, [ids(loaded, "def f(x):")], sampling) == [expected]


def test_a_stream_comes_piece_by_piece_and_never_in_half_characters(loaded: LoadedModel) -> None:
    pieces = list(
        stream(loaded, ids(loaded, "abc"), replace(GREEDY, max_new_tokens=40, temperature=1.0))
    )
    assert len(pieces) > 10
    whole = complete(
        loaded, [ids(loaded, "abc")], replace(GREEDY, max_new_tokens=40, temperature=1.0)
    )[0]
    assert "".join(pieces) == whole


def test_leaving_a_stream_early_stops_the_model(loaded: LoadedModel) -> None:
    steps = []
    hook = loaded.model.register_forward_hook(lambda *_: steps.append(1))
    pieces = stream(loaded, ids(loaded, "abc"), replace(GREEDY, max_new_tokens=50))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    hook.remove()
    assert 0 < len(steps) < 50


def test_a_batch_is_its_prompts_one_by_one(loaded: LoadedModel) -> None:
    prompts = [ids(loaded, text) for text in ("def f(x):", "a", "import os\nimport ")]
    assert complete(loaded, prompts, GREEDY) == [
        complete(loaded, [one], GREEDY)[0] for one in prompts
    ]


def test_a_stop_string_ends_the_text_and_is_no_part_of_it(loaded: LoadedModel) -> None:
    whole = complete(loaded, [ids(loaded, "abc")], replace(GREEDY, max_new_tokens=30))[0]
    stop = whole[5:7]
    cut = whole[: whole.index(stop)]
    sampling = replace(GREEDY, max_new_tokens=30, stop=(stop, "never there"))
    assert complete(loaded, [ids(loaded, "abc")], sampling) == [cut]
    assert "".join(stream(loaded, ids(loaded, "abc"), sampling)) == cut


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    assert cut_at("one\nUser: two", ("User:", "\n")) == ("one", True)
    assert held_back("text\nUs", ("\nUser:",)) == 3
    assert held_back("text", ("\nUser:",)) == 0
    assert held_back("aab", ("aabaac",)) == 3


def test_a_conversation_is_cut_to_the_positions_oldest_first(loaded: LoadedModel) -> None:
    earlier = [{"role": "system", "content": "s"}]
    for word in ("one", "two", "three"):
        earlier += [{"role": "user", "content": word * 3}, {"role": "assistant", "content": "yes"}]
    messages = [*earlier, {"role": "user", "content": "four"}]
    prompt, left_out = encode_conversation(loaded, messages, 6)
    text = loaded.tokenizer.decode(prompt[0])
    assert left_out == 4
    assert text == "<system>s<user>threethreethree<assistant>yes<user>four<a>"
    assert encode_conversation(loaded, messages, 60)[1] > 0, (
        "an answer may be shorter than the longest one asked for"
    )
    with pytest.raises(
        CheckpointError, match=r"with 32 for the answer it exceeds the model.s 64 positions"
    ):
        encode_conversation(loaded, [*earlier, {"role": "user", "content": "four" * 10}], 60)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers 5 by an older name
def test_an_adapter_answers_as_peft_does_and_can_be_switched_off(
    folder: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(base, config)
    adapted.save_pretrained(tmp_path / "adapter")
    with_adapter = load(folder, adapter=tmp_path / "adapter")
    prompt = ids(with_adapter, "def f(x):")
    merged = adapted.merge_and_unload()
    expected = merged.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=256)[
        0, prompt.shape[1] :
    ]
    with_it = complete(with_adapter, [prompt], GREEDY)
    assert with_it == [with_adapter.tokenizer.decode(expected)]
    assert (
        complete(with_adapter, [prompt], GREEDY, plain=True)
        == complete(loaded, [prompt], GREEDY)
        != with_it
    )
    assert (
        "".join(stream(with_adapter, prompt, GREEDY, plain=True))
        == complete(loaded, [prompt], GREEDY)[0]
    )


def test_no_template_is_one_sentence_with_the_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="has no chat template to ask in; name one with --template"
    ):
        set_template(load(folder), None)
    with pytest.raises(CheckpointError, match="cannot be read as a chat template"):
        set_template(load(folder), tmp_path / "nowhere.jinja")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: got 0.0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k: got -1"),
        ({"top_k": 5}, "top_k: has no effect at temperature 0"),
        ({"beams": 0}, "beams: got 0"),
        ({"length_penalty": 2.0}, "only with beams"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"stop": ("",)}, "stop: got an empty string"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Sampling(**settings)


def test_a_model_beyond_the_memory_is_refused_with_the_sum(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(138 * 10**9)  # of no size on disk
    shape = {
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
    }
    need = need_of("llama-70b", weights_in(tmp_path), shape)
    assert need.cache == 2 * 80 * 8 * 128 * 2 * 4096
    with pytest.raises(
        CheckpointError,
        match=r"takes 130\.4 GiB of memory \(llama-70b 128\.5 GiB of weights and 1\.2",
    ):
        refuse_too_large([need], free=64 * 2**30)
    refuse_too_large([need], free=131 * 2**30)


ODD_SETTINGS = {
    "repetition_penalty": 5.0,
    "forced_eos_token_id": 5,
    "forced_bos_token_id": 6,
    "num_return_sequences": 3,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [9],
    "min_new_tokens": 11,
    "exponential_decay_length_penalty": [1, 2.0],
    "epsilon_cutoff": 0.3,
    "typical_p": 0.2,
    "min_p": 0.5,
    "top_k": 1,
    "top_p": 0.1,
    "temperature": 9.0,
    "guidance_scale": 2.0,
    "early_stopping": True,
    "length_penalty": -9.0,
    "num_beams": 2,
    "do_sample": True,
    "return_dict_in_generate": True,
    "use_cache": False,
    "max_time": 1e-9,
    "bad_words_ids": [[10], [11]],
    "max_new_tokens": 1,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 2,
}


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, Sampling(12, 1.5, seed=3), Sampling(8, beams=3)],
    ids=["greedy", "temperature", "beams"],
)
def test_of_generation_config_only_the_ids_count(
    folder: Path, tmp_path: Path, sampling: Sampling
) -> None:
    prompts = ["def f(x):", "import"]
    texts = []
    for name, settings in (("plain", {}), ("odd", ODD_SETTINGS)):
        shutil.copytree(folder, tmp_path / name)
        ends = {"eos_token_id": 3, "bos_token_id": 1, **settings}
        (tmp_path / name / "generation_config.json").write_text(json.dumps(ends))
        made = load(tmp_path / name)
        assert made.ends == [3]
        one = "".join(stream(made, ids(made, prompts[0]), sampling))
        texts.append([one, *complete(made, [ids(made, prompt) for prompt in prompts], sampling)])
    assert texts[0] == texts[1]
