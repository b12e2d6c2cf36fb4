"""`smtrain init`: three questions or options write a config that loads and explains its keys."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from smtrain import ConfigError, load_config, plan
from smtrain.cli.init import app
from smtrain.core.config.schema import FILE

pytestmark = pytest.mark.usefixtures("measured")
DEMO = ("--model", "demo://tiny-llama", "--data", "demo://python-stdlib")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str) -> None:
    app(args=list(arguments), standalone_mode=False)


@pytest.mark.parametrize(
    "machines",
    ["here", "ml.trn1n.32xlarge", "ml.trn1.32xlarge:2", "ml.trn2.48xlarge", "ml.trn1.32xlarge:3"],
)
@pytest.mark.parametrize(
    "model", ["demo://tiny-llama", "hf://someone/unknown", "s3://bucket/llama-3.2-1b"]
)
def test_what_it_writes_loads_and_is_what_editors_are_told(machines: str, model: str) -> None:
    data = "demo://python-stdlib" if machines == "here" else "s3://bucket/text/"
    init("--model", model, "--data", data, "--machines", machines)
    config = load_config("smtrain.yaml")
    assert config.model.path == model
    assert config.target == ("local" if machines == "here" else "aws")
    assert config.compute.instance_count == int([*machines.split(":"), "1"][1])
    text = Path("smtrain.yaml").read_text()
    assert "engine:" not in text, "it follows the machines, also when they change"
    assert "docs/" not in text, "a wheel has no such folder"
    assert str(FILE.parent) not in text, "a colleague has no such folder"
    jsonschema.Draft202012Validator(json.loads(FILE.read_text())).validate(yaml.safe_load(text))
    keys = [
        line
        for line in text.splitlines()
        if line.startswith("  ") and not line.lstrip().startswith("#")
    ]
    assert all(
        text.splitlines()[text.splitlines().index(key) - 1].startswith("  # ") for key in keys
    ), "each explained"


def test_it_saves_as_often_as_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    init(
        "--model", "hf://Qwen/Qwen3-8B-Base", "--data", "s3://bucket/text/",
        "--machines", "ml.p5.48xlarge",
    )  # fmt: skip
    config = load_config("smtrain.yaml")
    planned = plan(config)
    assert config.train.save_interval == min(planned.save_interval_steps or 0, config.train.steps)
    assert config.train.save_interval != 100, "the default"
    assert not [text for text in planned.warnings if text.startswith("train.save_interval")]


def test_paths_are_those_of_the_config_wherever_it_lies(
    model_folder: Path, text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("configs").mkdir()
    (text_folder / "a.jsonl").write_text('{"text": "x"}\n' * 2**12)
    init("configs/run.yaml", "--model", "model", "--data", "text", "--machines", "here")
    config = load_config("configs/run.yaml")
    assert (Path(config.model.path).resolve(), Path(config.data.path or "").resolve()) == (
        model_folder,
        text_folder,
    )
    assert config.train.seq_len == 256, "the model has no more positions"
    steps = round(14 * 2**12 / 4 / (config.train.global_batch_size * 256))
    out = capsys.readouterr().out
    assert f"about {steps} steps read all of it once" in out
    assert (
        f"! 100 steps read it {100 / steps:.0f} times, and after about 4 a text teaches little"
        in out
    )
    assert "100 steps take about " in out


@pytest.mark.parametrize(
    ("model", "machines", "sentence"),
    [
        ("hf://org/Llama-3.1-8B", "ml.trn2.48xlarge", "! compute.image: no image is known"),
        (
            "hf://org/Llama-3.1-8B",
            "ml.trn1.32xlarge",
            "! neuronx-distributed is at its end of life",
        ),
        ("hf://meta-llama/Llama-3.1-8B", "ml.trn1.32xlarge", "! model.token: is missing"),
        (
            "hf://org/unheard-of",
            "ml.trn1.32xlarge",
            "! model.path: the shape of hf://org/unheard-of is not known here",
        ),
        (
            "hf://org/Llama-3.1-8B",
            "ml.g5.12xlarge",
            "does not fit on 1 x ml.g5.12xlarge; train.adapter, with LoRA, does",
        ),
    ],
)
def test_what_is_known_to_fail_later_is_said_at_once(
    model: str, machines: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    init("--model", model, "--data", "s3://bucket/text/", "--machines", machines)
    assert sentence in " ".join(capsys.readouterr().out.split())
    config = load_config("smtrain.yaml")
    assert (config.train.adapter is not None) == ("LoRA" in sentence)


def test_what_this_machine_lacks_for_the_run_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "smtrain.core.extras.present", lambda module: module not in ("moto", "gguf")
    )
    init("--model", "demo://smollm2", "--data", "demo://python-stdlib", "--machines", "here")
    out = capsys.readouterr().out
    assert all(extra in out for extra in ("extra local", "extra gguf"))


def test_the_trial_in_the_comment_is_a_run_of_its_own() -> None:
    init(*DEMO, "--machines", "here")
    trial = next(
        line for line in Path("smtrain.yaml").read_text().splitlines() if "A trial first" in line
    )
    settings = re.findall(r"--set (\S+)", trial)
    config = load_config("smtrain.yaml", set_=settings)
    assert (config.name, config.train.steps, config.train.warmup) == ("tiny-llama-trial", 20, 2)


def test_a_file_is_replaced_only_if_asked_to() -> None:
    Path("smtrain.yaml").write_text("mine")
    with pytest.raises(
        ConfigError,
        match=r"smtrain\.yaml is there already; name another file, or --force replaces it",
    ):
        init(*DEMO, "--machines", "here")
    assert Path("smtrain.yaml").read_text() == "mine"
    init(*DEMO, "--machines", "here", "--force")
    assert load_config("smtrain.yaml").name == "tiny-llama"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((*DEMO, "--machines", "two"), "machines: got 'two'; say here, or an instance type"),
        ((*DEMO, "--machines", "ml.trn1.2xlarge:0"), "machines: got 'ml.trn1.2xlarge:0'"),
        (("--model", "nowhere", *DEMO[2:], "--machines", "here"), "model.path: .*nowhere"),
        (("no/folder.yaml", *DEMO, "--machines", "here"), "no: no such folder"),
        (
            (
                "--model",
                "s3://bucket/llama-3-70b",
                "--data",
                "s3://bucket/text/",
                "--machines",
                "ml.trn1.2xlarge",
            ),
            "compute.instance_count: no mesh of 1 x ml.trn1.2xlarge fits the model",
        ),
        ((*DEMO[:3], "demo://python", "--machines", "here"), "data.path: demo://python is not a"),
        (DEMO, "--machines: is missing, and there is no terminal to ask on"),
    ],
)
def test_what_cannot_run_is_said_and_nothing_is_written(
    arguments: tuple[str, ...], sentence: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match=sentence):
        init(*arguments)
    assert list(here.iterdir()) == []


def test_only_a_yaml_file_is_written(here: Path) -> None:
    (here / "texts").mkdir()
    for name, sentence in (
        ("texts", "texts is a folder; name a file, such as texts/smtrain.yaml"),
        ("", ". is a folder; name a file, such as smtrain.yaml"),
        ("run.toml", "run.toml: a config is YAML with comments; name it run.yaml"),
        ("run", "run: a config is YAML with comments; name it run.yaml"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
            init(name, *DEMO, "--machines", "here", "--force")


NOISE = bytes(range(256)) * 9
NO_TEXT = "is not text in UTF-8; it looks like no text at all, so leave this file out"
UNREADABLE = {
    "noise.bin": (NOISE, NO_TEXT),
    "noise": (NOISE, NO_TEXT),
    "noise.txt": (NOISE, NO_TEXT),
    "noise.jsonl": (NOISE, NO_TEXT),
    "picture.png": (b"\x89PNG\r\n\x1a\n" + NOISE, NO_TEXT),
    "archive.txt": (b"PK\x03\x04" + NOISE, NO_TEXT),
    "empty.txt": (b"", "is empty; give a file with text"),
    "words.txt": ("w1 w2 ".encode("utf-16le") * 9, "set data.encoding to utf-16le, or convert it"),
    "noise.csv": (NOISE, "noise.csv is not UTF-8"),
    "noise.parquet": (NOISE, "noise.parquet cannot be read as parquet"),
    "noise.tar": (NOISE, "noise.tar is not a whole tar archive"),
    "pictures/a.png": (NOISE, "holds no file of text that can be read .*; give a folder of text"),
    "nothing/.x": (b"x", "holds no file of text that can be read"),
}


def test_data_that_are_no_text_are_refused(here: Path) -> None:
    for name, (content, sentence) in UNREADABLE.items():
        (file := here / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        path = f"data/{name.partition('/')[0]}"
        with pytest.raises(ConfigError, match=f"^data.path: .*{sentence}"):
            init(*DEMO[:3], path, "--machines", "here")
        assert not Path("smtrain.yaml").exists(), name


TALK = {"instruction": "x", "output": "y"}
FORMS: dict[str, tuple[Any, str, str]] = {
    "talk.jsonl": (TALK, "sft", ""),
    "pairs.jsonl": ({"prompt": "x", "chosen": "y", "rejected": "z"}, "dpo", ""),
    "alpaca.jsonl": ({**TALK, "text": "x y"}, "pretrain", ""),
    "other.jsonl": (
        {"body": "x"},
        "pretrain",
        "! data.path: other.jsonl, line 1: no column 'text'",
    ),
    "README.md": (None, "pretrain", ""),
}


def test_the_objective_is_that_of_the_first_record(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (record, objective, note) in FORMS.items():
        Path(name).write_text(f"{json.dumps(record)}\n" * 9 if record else "# Title\n")
        init(*DEMO[:3], name, "--machines", "here", "--force")
        config, said = load_config("smtrain.yaml"), capsys.readouterr().out
        assert config.train.objective == objective, name
        assert (f"train.objective: {objective}" in said) == (objective != "pretrain")
        assert ("! data.path" in said) == bool(note)
        assert note in said
        assert config.train.lr == (1e-6 if objective == "dpo" else 1e-4)
        assert config.data.format == ("text" if name == "README.md" else "auto")


def test_on_a_terminal_it_asks_three_questions_and_the_wrong_ones_again(here: Path) -> None:
    ours, theirs = pty.openpty()
    command: list[Any] = [sys.executable, "-m", "smtrain", "init"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=here) as process:
        os.close(theirs)
        said = ""
        wrong = ("no/such/folder", "", "ml.trn1.32xlarge 2")  # only these two are asked again
        for answer in (*wrong, "ml.trn1.32xlarge:2", "demo://tiny-llama"):
            while not said.endswith("]: "):
                said += os.read(ours, 4096).decode()
            os.write(ours, f"{answer}\n".encode())
            said += " "
        while process.poll() is None and "wrote" not in said:
            said += os.read(ours, 4096).decode()
    os.close(ours)
    assert process.returncode == 0, said
    assert "! machines: got 'ml.trn1.32xlarge 2'" in said
    assert "[no/such/folder]: " in said, "a wrong answer is the default of the next"
    assert said.count("The text: a file or folder") == 1, "a right answer is not asked for again"
    config = load_config(here / "smtrain.yaml")
    assert (config.model.path, config.compute.instance_type, config.compute.instance_count) == (
        "demo://tiny-llama",
        "ml.trn1.32xlarge",
        2,
    )
