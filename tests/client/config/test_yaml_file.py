"""YAML faults as one sentence with line, key and remedy, the same in a file and behind `--set`, and
at once.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from smtrain import ConfigError, load_config, plan
from smtrain.client.config.checks.data import tasks_in
from smtrain.client.config.yaml_file import read_settings
from smtrain.core.model.card import front_matter
from smtrain.core.yaml_text import YamlError, parse

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
FAULTS = [
    (
        "train: {lr: {{ rate }}}",
        "line 1, train.lr: {{ rate }} is a placeholder that no template has filled in; put",
    ),
    ("train:\n  lr: {{ rate }}\n", "line 2, train.lr: {{ rate }} is a placeholder"),
    ("train:\n  lr: {{ rate }}e-5\n", "line 2, train.lr: {{ rate }} is a placeholder"),
    ("{% if x %}\ntrain: {}\n", "line 1: {% if x %} is a placeholder"),
    ("tags:\n  [a]: b\n", "line 2, tags: a list cannot be a key; write text before the colon"),
    ("tags:\n  {a: b}: c\n", "line 2, tags: a mapping cannot be a key"),
    ("? [a]\n: b\n", "line 1: a list cannot be a key"),
    (
        "x: &x [1]\ntags:\n  *x : 1\n",
        "line 3, tags: the alias *x is no text, so it cannot be a key",
    ),
    ("tags:\n  '': b\n", "line 2, tags: a key is empty; write its name"),
    (
        "train:\n  steps: 1\n  steps: 2\n",
        "line 3, train: 'steps' is written twice (first at line 2); put both into",
    ),
    (
        "tags: {a: 2026-02-30}",
        "line 1, tags.a: 2026-02-30 is not a date of the calendar; correct it, or put it in quotes",
    ),
    ("tags: {a: 2026-02-28T25:00:00Z}", "is not a date of the calendar"),
    (
        f"train: {{steps: {'9' * 5000}}}",
        "line 1, train.steps: a number has 5,000 characters, at most 100 are taken",
    ),
    (f"train: {{steps: 0x{'f' * 5000}}}", "line 1, train.steps: a number has 5,002 characters"),
    (
        "train: {steps: 0b_}",
        "line 1, train.steps: 0b_ is not a whole number; correct it, or put it in quotes",
    ),
    (
        LAUGHS,
        "line 5, e[0]: with the alias *d there are more than 10,000 values; settings need fewer",
    ),
    (
        "train: &t {lr: *t}",
        "line 1, train.lr: *t stands within its own value: an anchor holds an alias to itself",
    ),
    (
        "train: {lr: *rate}",
        "line 1, train.lr: *rate is an alias of nothing; write &rate before the value",
    ),
    ("train: {<<: 3}", "line 1, train: `<<` takes the keys of an anchored section"),
    (
        "train: {lr: !!python/object/apply:os.system [ls]}",
        "line 1, train.lr: the tag !!python/object/apply:os.system is",
    ),
    (
        "train: {lr: !!binary '???'}",
        "line 1, train.lr: the tag !!binary is not for settings; leave it out",
    ),
    ("train: {betas: !!set {a}}", "line 1, train.betas: the tag !!set is not for settings"),
    ("train: {betas: !!omap [a: 1]}", "line 1, train.betas: the tag !!omap is not for settings"),
    ("train: {lr: !own 3}", "line 1, train.lr: the tag !own is not for settings"),
    ("train: {steps: !!int many}", "line 1, train.steps: many is not a whole number"),
    ("train: {lr: !!timestamp soon}", "line 1, train.lr: soon is not a date of the calendar"),
    ("train: " + "[" * 60 + "]" * 60, "its values are nested too deeply"),
    ("train: " + "[" * 3000, "its values are nested too deeply"),
    ("- " * 3000 + "a", "its values are nested too deeply"),
    ("name: \ud800", "line 1: it holds a byte outside UTF-8; save the text as UTF-8"),
]
SYNTAX = [
    (
        "name: a\n---\nname: b\n",
        "line 2: a second document begins (`---`); keep one document in each file",
    ),
    ("train:\n\tsteps: 1\n", r"not YAML at line 2 \(.*\); indent with spaces"),
    (
        "name: a: b\n",
        (
            r"not YAML at line 1 \(mapping values are not allowed.*\); put a value that holds `: `"
            r" in quotes"
        ),
    ),
    ("tags: [a\n", r"not YAML at line 2 \(.*\); close the bracket or the quote"),
    ("name: 'a\n", r"not YAML at line 2 \(.*\); close the bracket or the quote"),
    ('name: "\\q"\n', r"not YAML at line 1 \(.*\); in double quotes write \\\\ for a backslash"),
    ('name: "\\ud800"\n', r"not YAML at line 1 \(.*\); in double quotes write"),
    (
        "name: @x\n",
        (
            r"not YAML at line 1 \(.*\); indent with spaces; put text that begins with a special"
            r" character"
        ),
    ),
    (
        "name: a\0b\n",
        r"line 1: it holds the character U\+0000, which YAML does not allow; take it out",
    ),
]


def sentence_of(source: Any, **more: Any) -> str:
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(source, **more)
    assert time.process_time() - begun < 1
    assert len(caught.value.faults) == 1
    return caught.value.faults[0]


@pytest.fixture(autouse=True)
def imported() -> None:
    load_config(model={"path": "demo://tiny-llama"})


@pytest.mark.parametrize(("text", "sentence"), FAULTS)
def test_what_yaml_allows_and_settings_do_not(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    if "\ud800" in text:
        sentence = (
            "is not a text file; line 1 holds the byte 0xed, which is not UTF-8; save it as UTF-8"
        )
    assert sentence in sentence_of(path)


@pytest.mark.parametrize(("text", "sentence"), FAULTS)
def test_the_same_behind_set(raw: dict[str, Any], text: str, sentence: str) -> None:
    """`--set train=...`: the sentence, without its line, behind what was given."""
    one_line = text if "\n" not in text.strip() else "{" + ", ".join(text.strip().split("\n")) + "}"
    value = one_line.partition(": ")[2] if one_line.startswith("train: ") else one_line
    try:
        parse(value)
    except YamlError as error:
        if error.syntax:
            return  # behind --set, anything but YAML is text
    fault = sentence_of(raw, set_=[f"train={value}"])
    assert fault.startswith("--set train=")
    assert fault.endswith(str(_fault(value)))


def _fault(value: str) -> str:
    with pytest.raises(YamlError) as caught:
        parse(value)
    return caught.value.message


@pytest.mark.parametrize(("text", "sentence"), SYNTAX)
def test_a_text_that_is_no_yaml(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    fault = sentence_of(path)
    assert re.search(sentence, fault) or sentence in fault, fault


def test_a_text_key_takes_the_characters_that_were_typed(raw: dict[str, Any]) -> None:
    for text in ("2026-02-30", "2026-02-28", "007", "1-30"):
        assert load_config(raw, set_=[f"name={text}"]).name == text
    assert sentence_of(raw, set_=["model.path={{ model }}"]).endswith(
        "{{ model }} is a placeholder that no template has filled in; put its value there"
    )
    assert "is a placeholder" in sentence_of(raw, set_=["model.path={{model}}/x"])


def test_dates_and_keys_are_text_and_aliases_are_copies(
    tmp_path: Path, raw: dict[str, Any]
) -> None:
    text = yaml.safe_dump(raw) + "tags: &t {on: x, 2026: y, day: 2026-02-28, at: '2026-02-30'}\n"
    (tmp_path / "run.yaml").write_text(text, "utf-8-sig")
    tags = {"on": "x", "2026": "y", "day": "2026-02-28", "at": "2026-02-30"}
    assert load_config(tmp_path / "run.yaml").tags == tags
    both = parse("a: &x {b: 1}\nc: *x\n")
    both["a"]["b"] = 2
    assert both["c"] == {"b": 1}


def test_merged_sections_are_overridden_by_their_own_keys() -> None:
    text = "b: &b {a: 1}\nd: {e: {x: &x {<<: *b, a: 2}}}\ny: {<<: *x}\nz: {<<: [*x, *b], c: 3}\n"
    assert parse(text) == {
        "b": {"a": 1},
        "d": {"e": {"x": {"a": 2}}},
        "y": {"a": 2},
        "z": {"a": 2, "c": 3},
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "name: ä\n".encode("latin-1"),
            "line 1 holds the byte 0xe4, which is not UTF-8; save it as UTF-8",
        ),
        ("name: a\n".encode("utf-16"), "it begins as UTF-16 does; save it as UTF-8"),
        (b"PK\x03\x04\x00\xff", "is not a text file; name the YAML file"),
        (
            b"# " + b"x" * (1 << 20),
            "is larger than 1 MiB, too large for settings; name the YAML file",
        ),
        (
            b"model: {path: x}\nbad:\n" + b"".join(b"  k%d: 1\n" % i for i in range(6000)),
            "more than 10,000 values",
        ),
    ],
)
def test_files_of_another_encoding_or_size(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert sentence in sentence_of(path)


def test_values_that_only_python_can_give(raw: dict[str, Any]) -> None:
    circle: dict[str, Any] = {}
    circle["model"] = circle
    assert "or it holds itself" in sentence_of(circle)
    assert "is a tuple; a key is text" in sentence_of({**raw, "tags": {("a", "b"): "c"}})
    assert sentence_of({**raw, "train": {"steps": 10**5000}}).startswith(
        "train.steps: a number has over 100 digits"
    )
    assert sentence_of({**raw, "name": "a\0b"}) == "name: holds the character U+0000; take it out"
    assert (
        sentence_of({**raw, "name": "a\udc80"})
        == "name: holds a byte outside UTF-8; write the text in UTF-8"
    )
    assert sentence_of({**raw, "data": {"path": "x" * 256}}).startswith("data.path: /")
    assert "is too long for a path" in sentence_of({**raw, "data": {"path": "x/" * 3000}})
    assert sentence_of({**raw, "data": {"path": "~nobody-of-this-name/x"}}).startswith(
        "data.path: "
    )


def test_the_faults_of_thousands_of_keys_are_told_at_once(raw: dict[str, Any]) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config({**raw, **{f"key{number}": 1 for number in range(5000)}})
    assert len(caught.value.faults) <= 51
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "text", [LAUGHS, "a: {{ x }}", "a: 2026-02-30", "a: !!python/name:x y", "[" * 3000]
)
def test_machine_files_say_the_same(raw: dict[str, Any], tmp_path: Path, text: str) -> None:
    path = tmp_path / "machines.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan(raw, machine_file=path)
    assert caught.value.faults == [f"{path}: {_said(text)}"]


def _said(text: str) -> str:
    with pytest.raises(YamlError) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rows = " + "[" * 3000, "its values are nested too deeply"),
        ("rows = 5", "rows: must be a list, `[[rows]]`"),
        ("rows = [5]", "it is no table; write `[[rows]]`"),
        ("assumptions = 5", "assumptions: must be a table, `[assumptions]`"),
        (
            "[assumptions]\nstartup_minute = 5",
            "assumptions.startup_minute: unknown key; did you mean startup_minutes?",
        ),
        (
            "[assumptions]\ndisk_gb_per_s = 0",
            "assumptions.disk_gb_per_s: got 0; a number above 0 is needed",
        ),
        ("[row]\na = 1", "row: unknown key; did you mean rows?"),
        ("a = b", "prices cannot be read"),
    ],
)
def test_price_files_say_what_is_wrong(
    raw: dict[str, Any], tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        plan(raw, prices=path)
    assert sentence in str(caught.value)


def test_readers_that_take_what_they_can_skip_what_is_no_yaml(tmp_path: Path) -> None:
    for number, text in enumerate(
        (LAUGHS, "a: {{ x }}", "task: 2026-02-30", "task: mine\nf: !function a.b\n")
    ):
        (tmp_path / f"{number}.yaml").write_text(text)
        front_matter(f"---\n{text}\n---\n")
    assert set(tasks_in(tmp_path)) == {"mine"}


def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(
        ConfigError, match=r"run\.yaml: config cannot be read \(not a regular file\)"
    ):
        read_settings(tmp_path / "run.yaml", "config", "name a file")
    with pytest.raises(ConfigError, match="it is a folder"):
        read_settings(tmp_path, "config", "name a file")
