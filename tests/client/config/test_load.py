"""Every way to say a config gives the same object, and every fault is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from smtrain import ConfigError, JobConfig, check, load_config
from smtrain.core.config.units import seconds, spell
from smtrain.stages import STAGES, keys_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def test_yaml_keywords_and_set_give_the_same_object(raw: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**raw, "train": {**raw["train"], "lr": 2e-4}}))
    from_file = load_config(file)
    from_keywords = load_config(**{**raw, "train": {**raw["train"], "lr": 2e-4}})
    from_set = load_config(raw, set_=["train.lr=2e-4"])
    assert from_file == from_keywords == from_set == load_config(from_file)
    assert from_file.train.lr == 2e-4


def test_a_yaml_text_is_a_config_and_its_faults_name_it(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = yaml.safe_dump({**raw, "data": {"path": "text"}})
    assert load_config(text).data.path == str(tmp_path / "text")
    for wrong, sentence in (
        ("name: [\nx", "the YAML text: "),
        ("no\nkeys", "the YAML text: must hold keys and values"),
        ("#\n#", "the YAML text: is empty"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load_config(wrong)
    assert "nonsense: unknown key" in str(check(f"{text}nonsense: 1\n{'# long' * 900}\n"))


def test_the_keyword_set_names_the_parameter(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"set: the parameter is set_, .* set_=\['train.lr=3e-4'"):
        load_config(raw, set=["train.lr=1e-3"])
    with pytest.raises(ConfigError, match="wait: is a parameter of another call"):
        load_config(raw, wait=True)


def test_set_reaches_keys_that_a_user_names(raw: dict[str, Any]) -> None:
    """A table of the user's own keys is no section. A number is no text: with quotes it is."""
    with pytest.raises(ConfigError, match=r"tags\.team"):
        load_config(raw, set_=["tags.team=5"])
    assert load_config(raw, set_=["tags.team='5'"]).tags == {"team": "5"}


def test_later_sources_win_and_merge_by_key(raw: dict[str, Any]) -> None:
    config = load_config(raw, train={"lr": 1e-3}, set_=["train.steps=7"])
    assert (config.train.lr, config.train.steps, config.train.seq_len) == (1e-3, 7, 32)


def test_paths_in_a_file_are_relative_to_it(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    raw["model"]["path"], raw["data"]["path"] = "model", "text"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    monkeypatch.chdir("/")
    config = load_config(tmp_path / "run.yaml")
    assert config.model.path == str(tmp_path / "model")
    assert config.data.path == str(tmp_path / "text")
    raw["data"] = {
        "sources": [{"path": "text", "weight": 1}, {"path": "s3://bucket/more", "weight": 2}]
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    sources = load_config(tmp_path / "run.yaml").data.sources
    assert [source.path for source in sources] == [str(tmp_path / "text"), "s3://bucket/more"]


def test_every_fault_is_told_at_once_with_key_value_and_remedy(raw: dict[str, Any]) -> None:
    raw["train"] |= {"lrr": 1, "steps": "many", "global_batch_size": 3}
    raw["modle"] = {}
    raw["compute"]["max_run"] = "10 parsecs"
    raw["network"] = {"subnets": ["subnet-1"]}
    with pytest.raises(ConfigError) as caught:
        load_config(raw, parallel={"micro_batch_size": 2})
    faults = caught.value.faults
    assert len(faults) == 6
    sentences = "\n".join(faults)
    for expected in (
        "train.lrr: unknown key; did you mean train.lr?",
        "modle: unknown key; did you mean model?",
        "train.steps: got 'many'",
        "compute.max_run: got '10 parsecs'; a duration looks like 90, '10m', '2h30m' or '3d'",
        (
            "train.global_batch_size: 3 is not a multiple of dp x micro_batch_size = 1 x 2; 2 or 4"
            " would do"
        ),
        "network.subnets, network.security_group_ids: only one is set; a VPC needs both",
    ):
        assert expected in sentences


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parallel": {"tp": 3, "pp": 1}, "compute": {"processes_per_instance": 3}}, "8"),
        ({"parallel": {"tp": 1, "pp": 8}, "compute": {"processes_per_instance": 4}}, "layers"),
        ({"parallel": {"tp": 2, "pp": 4}}, "processes, 2 machines x 2 processes = 4 in all"),
        (
            {"parallel": {"tp": 2, "pp": 1, "dp": 1}},
            "but the processes are 2 machines x 2 processes = 4",
        ),
        (
            {"parallel": {"sequence_parallel": True}, "train": {"seq_len": 33}},
            "train.seq_len: 33 cannot be cut",
        ),
        ({"compute": {"spot": True, "max_wait": 60}}, "compute.max_wait: 60 s is shorter"),
        ({"train": {"warmup_steps": 9}}, "train.warmup_steps: 9 is more than train.steps = 4"),
        ({"train": {"min_lr": 1.0}}, "train.min_lr: 1.0 is above"),
        ({"model": {"path": "/nowhere"}}, "model.path: /nowhere is not a folder"),
        ({"data": {"path": "/nowhere"}}, "data.path: /nowhere does not exist"),
        ({"model": {"weights": "/nowhere"}}, "model.weights: /nowhere is not a folder"),
        (
            {"model": {"weights": "hf://x/y"}},
            "model.weights: hf://x/y is not a folder or an s3:// URI",
        ),
        ({"model": {"weights": "s3://a_b/y"}}, "model.weights: 'a_b' cannot be a bucket's name"),
        (
            {"model": {"weights": "s3://abc/y", "init": "scratch"}},
            "model.weights: has no effect with model.init",
        ),
        (
            {"model": {"weights": "s3://abc/y"}, "train": {"adapter": {"rank": 4}}},
            "model.weights: an adapter alone needs a base that peft can load",
        ),
        (
            {"model": {"weights": "s3://abc/y"}, "evaluate": {"tasks": ["mmlu"]}},
            "model.weights: the base model is evaluated from a Hugging Face folder",
        ),
        (
            {"export": {"megatron": True}, "train": {"adapter": {"rank": 4}}},
            "export.megatron: Megatron has no form for",
        ),
        (
            {"model": {"path": "http://x/y"}},
            (
                "model.path: http://x/y is not a folder, s3://, hf://, modelscope://, jumpstart://,"
                " demo:// or run://"
            ),
        ),
    ],
)
def test_impossible_combinations_are_refused(
    raw: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, **change)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "sentence", "cure"),
    [
        ("tokenizer.json", "holds no tokenizer.json", {"data": {"prepared": "s3://bucket/data"}}),
        ("model.safetensors", "holds no model.safetensors", {"model": {"init": "scratch"}}),
        (
            "model.safetensors",
            "holds no model.safetensors",
            {"model": {"weights": "s3://bucket/iter_0000100"}},
        ),
    ],
)
def test_a_model_folder_that_lacks_what_a_stage_needs_is_refused(
    raw: dict[str, Any], model_folder: Path, missing: str, sentence: str, cure: dict[str, Any]
) -> None:
    (model_folder / missing).unlink()
    with pytest.raises(ConfigError, match=sentence):
        load_config(raw)
    load_config(raw, **cure)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "name=my run",
            "name: got 'my run'; use letters, digits and single hyphens, at most 36 in all",
        ),
        ("output.s3_uri=bucket/x", "output.s3_uri: got 'bucket/x'; did you mean s3://bucket/x?"),
        ("compute.instance_type=Trn1", "compute.instance_type: got 'Trn1'; did you mean ml.trn1"),
    ],
)
def test_a_value_of_the_wrong_form_is_told_what_would_do(
    raw: dict[str, Any], text: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, set_=[text])
    assert caught.value.faults[0].startswith(sentence)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compute.environment.HF_TOKEN", "anything"),
        ("compute.environment.NOTE", "hf_" + "a1B2" * 8),
        ("tags.owner", "AKIA" + "ABCD1234" * 2),
        ("generate.prompts", "ghp_" + "a1B2" * 9),
    ],
)
def test_a_secret_written_out_is_refused_and_never_repeated(
    raw: dict[str, Any], key: str, value: str
) -> None:
    section, _, rest = key.partition(".")
    content: Any = [value] if rest == "prompts" else value
    for part in reversed(rest.split(".")):
        content = {part: content}
    with pytest.raises(ConfigError) as caught:
        load_config(raw, **{section: content})
    assert caught.value.faults[0].startswith(f"{key}: looks like a secret")
    assert value not in str(caught.value)
    load_config(
        raw, compute={"environment": {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "9"}}
    )


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (
            {"seq_len": 64},
            (
                "train.seq_len: 64 is beyond the model's 32 positions; use at most that, which it"
                " has learned"
            ),
        ),
        (
            {"seq_len": 32, "adapter": {"rank": 4}},
            "train.adapter: the linears of a gpt2 model are stored with their",
        ),
        ({"seq_len": 32, "engine": "nxd"}, "model.path: engine nxd trains no gpt2 models"),
    ],
)
def test_what_gpt2_cannot_is_said(
    raw: dict[str, Any], model_folder: Path, train: dict[str, Any], sentence: str
) -> None:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 128}
    (model_folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    with pytest.raises(ConfigError) as caught:
        load_config(raw, train=train)
    assert sentence in str(caught.value)
    load_config(raw, train={"seq_len": 32})


@pytest.mark.parametrize("engine", ["native", "nxd"])
def test_a_vocabulary_that_tp_does_not_divide_is_no_fault(
    raw: dict[str, Any], model_folder: Path, engine: str
) -> None:
    text = (model_folder / "config.json").read_text()
    (model_folder / "config.json").write_text(
        text.replace('"vocab_size": 512', '"vocab_size": 509')
    )
    assert load_config(raw, train={"engine": engine}).parallel.tp == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "is empty"),
        ("- a\n- b\n", "must hold keys and values at the top, such as `name: my-run`, not a list"),
        ("a: [1\n", "not YAML at line"),
        ("a: b: c\n", "not YAML at line 1"),
    ],
)
def test_a_file_that_is_no_config_is_one_sentence(
    tmp_path: Path, content: str, sentence: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        load_config(file)
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "other.yaml")


@pytest.mark.parametrize("text", ["train.lr", "=3", "train..lr=1", "name.x=1"])
def test_set_that_is_no_assignment_is_refused(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(raw, set_=[text])


def test_a_config_is_frozen_and_its_round_trip_is_itself(raw: dict[str, Any]) -> None:
    config = load_config(raw)
    assert JobConfig.model_validate(config.model_dump(mode="json")) == config
    with pytest.raises(ConfigError, match="lr: a config is not changed in place"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_weights_elsewhere_change_what_reads_them_alone(raw: dict[str, Any]) -> None:
    plain, named = load_config(raw), load_config(raw, model={"weights": "s3://bucket/iter_0000100"})
    same = [stage for stage in STAGES if keys_of(plain, stage) == keys_of(named, stage)]
    assert set(STAGES) - {*same} == {"fetch", "convert", "train"}


def test_an_unchanged_stage_keeps_its_identity(raw: dict[str, Any]) -> None:
    one, other = load_config(raw), load_config(raw, train={"lr": 9e-4}, parallel={"tp": 1})
    assert keys_of(one, "prepare") == keys_of(other, "prepare")
    assert keys_of(one, "convert") != keys_of(other, "convert")
    assert keys_of(one, "train") != keys_of(other, "train")


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_durations_read_as_written(days: int, hours: int, minutes: int, rest: int) -> None:
    assert (
        seconds(f"{days}d{hours}h {minutes}m{rest}s")
        == ((days * 24 + hours) * 60 + minutes) * 60 + rest
    )


@pytest.mark.parametrize("text", ["", "h", "1.5h", "-3m", "2 weeks", "1h x"])
def test_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        seconds(text)


def test_durations_are_spelled_for_people() -> None:
    assert [spell(s) for s in (0.44, 42, 185, 7800)] == [
        "0.4 s",
        "42 s",
        "3 min 05 s",
        "2 h 10 min",
    ]


def faults_of(raw: dict[str, Any]) -> list[str]:
    try:
        load_config(raw)
    except ConfigError as error:
        return error.faults
    return []


def test_sources_are_instead_of_a_path_and_all_have_weights_or_none(
    raw: dict[str, Any], text_folder: Path
) -> None:
    one, two = {"path": str(text_folder), "weight": 2}, {"path": str(text_folder / "*.jsonl")}
    faults = faults_of({**raw, "data": {"path": str(text_folder), "sources": [one, two]}})
    assert [fault.split(":")[0] for fault in faults] == ["data.path, data.sources", "data.sources"]
    assert faults_of({**raw, "data": {"sources": [one, {**two, "weight": 0.5}]}}) == []
    assert (
        "/nowhere does not exist"
        in faults_of({**raw, "data": {"sources": [{"path": "nowhere"}]}})[0]
    )


def test_a_weight_changes_training_and_not_what_is_prepared(
    raw: dict[str, Any], text_folder: Path
) -> None:
    path = str(text_folder)
    made = [
        load_config(
            {**raw, "data": {"sources": [{"path": path, "weight": 1}, {"path": path, "weight": w}]}}
        )
        for w in (1, 2)
    ]
    assert keys_of(made[0], "prepare") == keys_of(made[1], "prepare")
    assert keys_of(made[0], "train") != keys_of(made[1], "train")
    assert made[1].data.weights == [1, 2]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"train": {"objective": "sft"}, "data": {"format": "text"}},
            "data.format: text has no answers to learn",
        ),
        ({"data": {"path": "s3://b/x/*.jsonl"}}, "data.path: s3://b/x/*.jsonl has a wildcard"),
        (
            {"data": {"path": "gs://b/x"}},
            "data.path: gs://b/x is not a path, s3://, hf://, fsx://, efs:// or demo://",
        ),
        ({"data": {"overlong": "drop"}}, "data.overlong: is for train.objective: sft"),
        (
            {"data": {"format": "alpaca"}},
            "data.format: alpaca is instruction data; set train.objective: sft",
        ),
        (
            {"train": {"objective": "sft"}, "data": {"document_mask": True}},
            "data.document_mask: is for train.objective: pretrain; leave it out for sft",
        ),
    ],
)
def test_each_objective_has_its_own_settings(
    raw: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, **changes)
    assert any(sentence.startswith(fault) for sentence in caught.value.faults)


def test_instruction_data_needs_a_chat_template(raw: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"has no chat template, .*; put a chat_template\.jinja there"
    ):
        load_config(raw, train={"objective": "sft"})
    (Path(raw["model"]["path"]) / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ messages }}"}'
    )
    load_config(raw, train={"objective": "sft"})


def test_the_document_mask_is_training_s_and_the_objective_is_both_stages_(
    raw: dict[str, Any],
) -> None:
    (Path(raw["model"]["path"]) / "chat_template.jinja").write_text("")
    plain, masked, sft = (
        load_config(raw, **more)
        for more in ({}, {"data": {"document_mask": True}}, {"train": {"objective": "sft"}})
    )
    assert keys_of(masked, "prepare") == keys_of(plain, "prepare")
    assert keys_of(masked, "train") != keys_of(plain, "train")
    assert keys_of(sft, "prepare") != keys_of(plain, "prepare")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_a_config_without_a_fault(path: Path) -> None:
    load_config(path)


def test_a_letter_without_utf_8_in_a_path_is_a_fault(raw: dict[str, Any]) -> None:
    raw["data"] = {"path": "te\ud800xt"}
    with pytest.raises(ConfigError, match=r"data\.path: holds a byte outside UTF-8"):
        load_config(raw)
