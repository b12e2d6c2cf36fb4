"""An unknown key is answered with the one that was meant."""

from __future__ import annotations

import pytest

import smtrain
from smtrain.core.config.error_messages import every_key
from smtrain.core.config.schema import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts import table

ALIASES = [(name, known) for known, names in table("key_names").items() for name in names]


def sentence(key: str) -> str:
    with pytest.raises(ConfigError) as caught:
        smtrain.load_config({"model": {"path": "demo://tiny"}}, set_=[f"{key}=1"])
    return next(line for line in str(caught.value).splitlines() if f"{key}: " in line)


def test_every_name_of_another_tool_stands_for_one_key_that_exists() -> None:
    keys = set(every_key(JobConfig))
    assert {known for _, known in ALIASES} <= keys
    names = [name for name, _ in ALIASES]
    assert len(names) == len(set(names)) > 200
    assert not [name for name, known in ALIASES if name in keys or name == known.rpartition(".")[2]]


@pytest.mark.parametrize(
    ("name", "known"), [(name, known) for name, known in ALIASES if "." in name]
)
def test_a_name_with_its_section_is_answered_with_ours(name: str, known: str) -> None:
    assert f"unknown key; did you mean {known}?" in sentence(name)


@pytest.mark.parametrize(
    ("name", "known"), [(name, known) for name, known in ALIASES if "." not in name][::17]
)
@pytest.mark.parametrize("section", ["", "train.", "parallel."])
def test_another_tool_s_name_is_answered_with_ours(section: str, name: str, known: str) -> None:
    assert f"unknown key; did you mean {known}?" in sentence(f"{section}{name}")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lr", "train.lr"),
        ("train.tp", "parallel.tp"),
        ("train.learningRate", "train.lr"),
        ("train.max-steps", "train.steps"),
        ("recompute", "parallel.activation_checkpointing"),
        ("train.stpes", "train.steps"),
        ("data.micro_batch_sizes", "parallel.micro_batch_size"),
        ("trian", "train"),
    ],
)
def test_a_key_in_another_section_or_with_a_slip_is_answered_with_the_right_one(
    key: str, meant: str
) -> None:
    assert f"unknown key; did you mean {meant}?" in sentence(key)


def test_a_key_that_resembles_none_is_answered_with_those_there_are() -> None:
    assert "known: path, sources" in sentence("data.train")
