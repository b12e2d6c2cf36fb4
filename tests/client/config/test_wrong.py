"""Wrong configs, of every field: each ends in sentences that begin with the key, at once, and never
in a traceback.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from smtrain import ConfigError, JobConfig, load_config
from smtrain.core.config.annotations import is_section
from smtrain.core.config.section import kinds

SECTIONS: dict[str, Any] = {
    name: field.annotation for name, field in JobConfig.model_fields.items()
}
FIELDS = [
    (section, field, kinds(model, field))
    for section, model in SECTIONS.items()
    if is_section(model)
    for field in model.model_fields
]


def wrong_values(types: frozenset[type]) -> list[Any]:
    """Values that no field of these types accepts."""
    if bool in types:
        return ["perhaps", 7, [True], {"a": True}]
    if types & {int, float}:
        return [math.inf, -math.inf, math.nan, -1, True, "soon", "1e999", 10**30, {"a": 1}, ["x"]]
    return [{"a": {"b": 1}}, [["x"]], 3.5, True]


CASES = [
    (section, field, value) for section, field, types in FIELDS for value in wrong_values(types)
]


def refused(raw: dict[str, Any], **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(raw, **more)
    for fault in caught.value.faults:
        assert "\n" not in fault
        assert "Traceback" not in fault
        assert len(fault) < 500
    return caught.value.faults


def test_every_field_refuses_what_it_cannot_take(raw: dict[str, Any]) -> None:
    """Hundreds of (field, value) pairs; those that a field may take are looked at one by one
    below.
    """
    silent: list[tuple[str, Any, Any]] = []
    for section, field, value in CASES:
        changed = copy.deepcopy(raw)
        changed.setdefault(section, {})[field] = value
        try:
            load_config(changed)
        except ConfigError as error:
            key = f"{section}.{field}"
            if not any(
                fault.startswith((key, f"{section}:", "parallel.")) for fault in error.faults
            ):
                silent.append((key, value, error.faults))
        else:
            silent.append((f"{section}.{field}", value, "taken"))
    print(len(CASES), "wrong values")
    assert len(CASES) >= 250
    assert silent == [], silent


@pytest.mark.parametrize(
    ("set_", "sentence"),
    [
        ("train.lr=.inf", "train.lr: got inf; a finite number is needed"),
        (
            "train.steps=100000000000000000000",
            "train.steps: got 100000000000000000000; the number is too large",
        ),
        ("train.steps=true", "train.steps: got True; a number is needed here"),
        ("train.betas=[0.9]", "train.betas: got [0.9]; it has too few numbers"),
        ("train.betas=[0.9, 0.95, 0.99]", "train.betas: got [0.9, 0.95, 0.99]"),
        ("train.seq_len=100000", "train.seq_len: 100000 is beyond the model's 256 positions"),
        (
            "data.path=[a, b]",
            "data.path: got ['a', 'b']; one text is needed, not a list; name several texts under",
        ),
        ("compute.max_run=0", "compute.max_run: got 0"),
        ("compute.max_run=29d", "compute.max_run: got 2505600; it must be at most 2,419,200"),
        ("compute.price_limit=.nan", "compute.price_limit: got nan"),
        ("compute.price_limit=-1", "compute.price_limit: got -1"),
        ("compute.instance_count=100000", "compute.instance_count: got 100000; it must be at most"),
        ("compute.role=not a role", "compute.role: 'not a role' is not a role's ARN"),
        ("output.s3_uri=s3://My_Bucket/x", "output.s3_uri: 'My_Bucket' cannot be a bucket's name"),
        ("checkpoint.s3_uri=s3://ab", "checkpoint.s3_uri: 'ab' cannot be a bucket's name"),
        ("data.prepared=./nowhere", "nowhere holds no manifest.json"),
        (
            "evaluate.data=./nowhere",
            "nowhere is not a folder or an s3:// URI; give one of task YAMLs",
        ),
        ("evaluate.data=hf://x/y", "evaluate.data: hf://x/y is not a folder or an s3:// URI"),
        ("data.prepared=gs://x/y", "data.prepared: gs://x/y is not a folder or an s3:// URI"),
        (
            "model.path=meta-llama/Llama-3.2-1B",
            "(a model of the hub is hf://meta-llama/Llama-3.2-1B)",
        ),
    ],
)
def test_what_was_silent_or_misleading(raw: dict[str, Any], set_: str, sentence: str) -> None:
    assert any(sentence in fault for fault in refused(raw, set_=[set_])), refused(raw, set_=[set_])


def test_a_text_that_looks_like_a_number_stays_one(raw: dict[str, Any]) -> None:
    config = load_config(raw, set_=["name=12e4567", "tags.a=x", "train.lr=2e-4", "train.steps=1e1"])
    assert (config.name, config.train.lr, config.train.steps) == ("12e4567", 2e-4, 10)
    assert load_config(raw, set_=["name=123"]).name == "123"
    assert load_config({**raw, "tags": {"a": "1e5"}}).tags == {"a": "1e5"}


def test_files_that_are_no_config(raw: dict[str, Any], tmp_path: Path) -> None:
    def faults_of(content: bytes) -> str:
        path = tmp_path / "run.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return caught.value.faults[0]

    assert "'train' is written twice" in faults_of(
        b"model: {path: x}\ntrain: {steps: 1}\ntrain: {lr: 1}\n"
    )
    assert "line 3" in faults_of(b"model: {path: x}\ntrain: {steps: 1}\ntrain: {lr: 1}\n")
    assert "alias to itself" in faults_of(b"a: &a [*a]\n")
    assert "is not a text file" in faults_of(b"\xff\xfe\x00\x80")
    assert "must hold keys" in faults_of(b"- 1\n")
    with pytest.raises(ConfigError, match=r"cannot be read \(it is a folder\)"):
        load_config(tmp_path)


def test_a_model_whose_config_json_is_a_list(raw: dict[str, Any]) -> None:
    Path(raw["model"]["path"], "config.json").write_text(json.dumps([1]))
    assert any("config.json is a list, not a mapping" in fault for fault in refused(raw))


def test_a_warm_up_is_whole_steps_or_a_share_of_them(raw: dict[str, Any]) -> None:
    for value, steps in ((0.1, 20), (0.25, 50), (1.0, 1), (30, 30), (0, 0)):
        assert load_config(raw, train={"steps": 200, "warmup_steps": value}).train.warmup == steps
    (fault,) = refused(raw, train={"warmup_steps": 1.5})
    assert (
        fault
        == "train.warmup_steps: got 1.5; whole steps, or below 1 the share of train.steps, are"
        " needed"
    )
