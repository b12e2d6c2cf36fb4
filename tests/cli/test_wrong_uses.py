"""Every wrong use gives one sentence for each fault and status 2; it writes nothing and shows no
Python.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain import SmtrainError
from smtrain.client.iam import policies
from smtrain.core.config.training import Train
from smtrain.worker.checkpoint.targets import make_target
from tests import tiers
from tests.cli.commands import COMMANDS, error_lines, in_the_package
from tests.cli.newcomers import GROUPED, Row, call_of, more_files
from tests.cli.odd_uses import ODD, odd_files
from tests.cli.wrong_uses import Use, uses, world
from tests.conftest import LLAMA
from tests.typed import typed

RAW: dict[str, Any] = {
    "name": "tiny",
    "model": {"path": "model"},
    "data": {"path": "text"},
    "parallel": {"tp": 2, "pp": 2},
    "train": {"steps": 4, "global_batch_size": 4, "seq_len": 32, "precision": "fp32"},
    "compute": {
        "instance_type": "ml.trn1.2xlarge",
        "instance_count": 2,
        "processes_per_instance": 2,
    },
}
TABLES = {**GROUPED, **ODD}
FINDINGS = "check"  # tells faults on stdout, as findings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, local_home: Path) -> Iterator[Path]:
    """The working directory of the wrong uses."""
    from smtrain.core.demo.inputs import save_tokenizer

    root = tmp_path_factory.mktemp("wrong")
    (root / "model").mkdir()
    (root / "model/config.json").write_text(json.dumps(LLAMA))
    (root / "model/tokenizer.json").write_text("{}")
    (root / "model/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (root / "text").mkdir()
    (root / "text/a.jsonl").write_text('{"text": "hello world"}\n')
    save_tokenizer(
        ["hello world, this is text"] * 20, root / "tokenizer", vocabulary=300, end="<end>"
    )
    world(root, RAW)
    more_files(root)
    odd_files(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("COLUMNS", "80")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield root


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Name, size and time of everything below."""
    states = {str(path): path.lstat() for path in folder.rglob("*")}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}


def wrong(use: Use, status: object, out: str, err: str) -> str:
    """The fault of an answer; empty if it is right."""
    lines = [line for line in err.splitlines() if not line.startswith("prepare: ")]
    sentences = lines if use.words[:1] != (FINDINGS,) or lines else out.splitlines()
    if status != 2:
        return f"status {status}"
    if not sentences or not all(line.startswith("smtrain") for line in lines):
        return "no sentence"
    if len(set(sentences)) != len(sentences):
        return "says it twice"
    if any(word in out + err for word in ("Traceback", 'File "', "<class", "Value error", "Errno")):
        return "shows Python"
    if out and use.words[:1] != (FINDINGS,):
        return "prints"
    return "" if use.said in err else f"does not say {use.said}"


def test_every_command_has_a_row() -> None:
    """`COMMANDS` drives the other tests, so it must be complete."""
    assert sorted(in_the_package()) == sorted(COMMANDS)


@pytest.mark.parametrize(
    "rest", [False, pytest.param(True, marks=pytest.mark.full)], ids=["some of each", "the rest"]
)
def test_every_wrong_use_is_a_sentence(rest: bool, folder: Path) -> None:
    some = uses(every=False)
    some = [some[n] for n in tiers.of_each([use.words[:1] for use in some], 300)]
    cases = [use for use in uses() if use not in some] if rest else some
    print(len(cases), "wrong uses")
    assert len(cases) >= 200
    before, failures = tree(folder), []
    for use in cases:
        done = typed(*use.words, COLUMNS="80")
        why = wrong(use, done.returncode, done.stdout, done.stderr)
        if (after := tree(folder)) != before:
            why, before = f"{why} writes {sorted(after.keys() ^ before.keys())}", after
        if why:
            failures.append(f"smtrain {use.label}: {why}\n{done.stdout[:300]}{done.stderr[-600:]}")
    assert not failures, f"{len(failures)} of {len(cases)}:\n" + "\n".join(failures)


def test_the_table_of_newcomers_has_every_use_once() -> None:
    calls = [row[0] for rows in TABLES.values() for row in rows]
    assert len(calls) == len(set(calls)) >= 240


@pytest.mark.parametrize("rows", TABLES.values(), ids=TABLES)
def test_what_newcomers_do_is_answered_with_the_nearest_right_thing(
    rows: list[Row], folder: Path
) -> None:
    before, failures = tree(folder), []
    for row in rows:
        environment, words = call_of(row)
        done = typed(*words, COLUMNS="80", **environment)
        output = done.stdout + done.stderr
        why = wrong(Use(tuple(words)), done.returncode, done.stdout, done.stderr)
        why = why or ", ".join(
            f"does not say {part}" for part in row[2].split(" | ") if part not in output
        )
        if (after := tree(folder)) != before:
            why, before = f"{why} writes {sorted(after.keys() ^ before.keys())}", after
        if why or done.returncode != row[1]:
            failures.append(f"{row[0]}: {why}\n{output[-600:]}")
    assert not failures, f"{len(failures)} of {len(rows)}:\n" + "\n".join(failures)


def test_a_secret_that_was_typed_for_an_option_is_not_repeated(folder: Path) -> None:
    token = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz" + "AbCdEfGh"
    for words in (
        ("run", "run.yaml", "--hf-token", token),
        ("run", "run.yaml", f"model.token={token}"),
    ):
        done = typed(*words)
        assert done.returncode == 2
        assert token not in done.stderr


NEAREST: dict[str, tuple[Callable[[], object], str]] = {
    "an argument": (lambda: smtrain.launch("run.yaml", targte="aws"), "did you mean target?"),  # type: ignore[arg-type]
    "a stage": (lambda: smtrain.launch("run.yaml", stage="trian"), "did you mean train?"),  # type: ignore[arg-type]
    "a target": (lambda: smtrain.run("run.yaml", target="lokal"), "did you mean local?"),  # type: ignore[call-overload]
    "a stage of request": (
        lambda: smtrain.request("run.yaml", stage="exprt"),
        "did you mean export?",
    ),  # type: ignore[arg-type]
    "a format": (lambda: make_target("nxdd"), "did you mean nxd?"),
    "a target of convert": (
        lambda: smtrain.convert("model", "to", to="nxd"),  # type: ignore[arg-type]
        "takes a HuggingFace, an Nxd,",
    ),
    "an option of convert": (lambda: smtrain.convert("model", "to", too="nxd"), "did you mean to?"),  # type: ignore[call-arg]
    "an option of a target": (lambda: smtrain.Nxd(tpp=2), "did you mean tp?"),  # type: ignore[call-arg]
    "a key": (
        lambda: smtrain.load_config("run.yaml", train={"learning_rate": 1}),
        "did you mean train.lr?",
    ),
    "a section": (lambda: smtrain.load_config("run.yaml", trian={"lr": 1}), "did you mean train?"),
    "a key of a section": (lambda: Train(leraning_rate=1), "did you mean lr?"),  # type: ignore[call-arg]
    "a file": (lambda: smtrain.load_config("run.yml"), "did you mean run.yaml?"),
    "a model": (lambda: smtrain.plan("run.yaml", model="lama-3-8b"), "did you mean llama-3-8b?"),
    "a machine": (
        lambda: smtrain.plan("run.yaml", machines=[("p5.48xlarge", 1)]),
        "did you mean ml.p5.48xlarge?",
    ),
    "an address": (
        lambda: smtrain.load_config("run.yaml", model={"path": "https://huggingface.co/org/name"}),
        "hf://org/name",
    ),
    "a model to talk to": (lambda: smtrain.chat("hf://org/name"), "hf download org/name"),
    "a run": (lambda: smtrain.report("nope"), "smtrain list"),
    "a job": (lambda: smtrain.Job("nope").describe(), "smtrain list"),
    "a training": (lambda: smtrain.compare("nope", "nope2"), "smtrain list"),
}


@pytest.mark.parametrize("what", NEAREST)
def test_the_python_api_names_the_nearest_right_thing(what: str, folder: Path) -> None:
    call, said = NEAREST[what]
    with pytest.raises(SmtrainError) as refused:
        call()
    assert said in str(refused.value)


API: dict[str, Callable[[], object]] = {
    "load a missing file": lambda: smtrain.load_config("nowhere.yaml"),
    "load a folder": lambda: smtrain.load_config(Path("text")),
    "load an empty name": lambda: smtrain.load_config(""),
    "load an unknown section": lambda: smtrain.load_config("run.yaml", trian={"steps": 1}),
    "load a section of another kind": lambda: smtrain.load_config("run.yaml", train=3),
    "load an infinity": lambda: smtrain.load_config("run.yaml", train={"lr": math.inf}),
    "load below a file": lambda: smtrain.load_config("run.yaml/x"),
    "load a name with a zero": lambda: smtrain.load_config("a\0b"),
    "load a long name": lambda: smtrain.load_config("x" * 5000),
    "plan nothing": lambda: smtrain.plan(),
    "plan a negative budget": lambda: smtrain.plan("run.yaml", budget=-1),
    "plan no number": lambda: smtrain.plan("run.yaml", deadline_hours=math.nan),
    "plan no such machine": lambda: smtrain.plan("run.yaml", machines=[("ml.no.such", 1)]),
    "plan prices that are none": lambda: smtrain.plan("run.yaml", prices="run.yaml"),
    "plan prices that are not there": lambda: smtrain.plan("run.yaml", prices="nowhere.toml"),
    "plan prices in a folder": lambda: smtrain.plan("run.yaml", prices="text"),
    "request no such stage": lambda: smtrain.request("run.yaml", stage="nap"),  # type: ignore[arg-type]
    "request no such target": lambda: smtrain.request("run.yaml", target="moon"),  # type: ignore[arg-type]
    "launch no such stage": lambda: smtrain.launch("run.yaml", stage="nap"),  # type: ignore[arg-type]
    "launch no such target": lambda: smtrain.launch("run.yaml", target="moon"),  # type: ignore[arg-type]
    "launch binary text": lambda: smtrain.launch(
        "run.yaml", stage="prepare", data={"path": "pictures"}
    ),
    "run no such target": lambda: smtrain.run("run.yaml", target="moon"),  # type: ignore[call-overload]
    "run empty text": lambda: smtrain.run("run.yaml", data={"path": "empty.jsonl"}),
    "run text that nothing reads": lambda: smtrain.run("run.yaml", data={"path": "mixed"}),
    "run without credentials": lambda: smtrain.run(
        "run.yaml", target="aws", compute={"region": "us-east-1"}
    ),
    "request without a region": lambda: smtrain.request("run.yaml", target="aws"),
    "policies of a missing file": lambda: policies("nowhere.yaml"),
    "policies without credentials": lambda: policies(
        "run.yaml", target="aws", compute={"region": "us-east-1"}
    ),
    "a job without a name": lambda: smtrain.Job(""),
    "a job of another target": lambda: smtrain.Job("job", "moon"),  # type: ignore[arg-type]
    "a missing job": lambda: smtrain.Job("no-such-job").describe(),
    "its lines": lambda: smtrain.Job("no-such-job").lines(),
    "its checkpoints": lambda: smtrain.Job("no-such-job").checkpoints,
    "its output": lambda: smtrain.Job("no-such-job").output,
    "its events": lambda: list(smtrain.Job("no-such-job").events()),
    "its events by a wrong pattern": lambda: list(smtrain.Job("no-such-job").events(grep="(")),
    "its download": lambda: smtrain.Job("no-such-job").download("to"),
    "its stop": lambda: smtrain.Job("no-such-job").stop(),
    "its cost": lambda: smtrain.Job("no-such-job").cost(),
    "its explanation": lambda: smtrain.Job("no-such-job").explain(),
    "a job on AWS without credentials": lambda: smtrain.Job("job", "aws").describe(),
    "convert nothing": lambda: smtrain.convert("nowhere", "to", to=smtrain.Nxd()),
    "convert to nothing": lambda: smtrain.convert("model", "", to=smtrain.Nxd()),
    "convert to another kind": lambda: smtrain.convert("model", "to", to="gguf"),  # type: ignore[arg-type]
    "convert below a file": lambda: smtrain.convert("model", "run.yaml/to", to=smtrain.Nxd()),
    "make no config": lambda: smtrain.JobConfig(),  # type: ignore[call-arg]
    "make a config of a file": lambda: smtrain.JobConfig("run.yaml"),  # type: ignore[misc, call-arg]
    "make a config with an unknown section": lambda: smtrain.JobConfig(
        model={"path": "m"}, trian={}
    ),  # type: ignore[arg-type, call-arg]
    "make a config with an unknown key": lambda: smtrain.JobConfig(
        model={"path": "m"}, train={"stpes": 1}
    ),  # type: ignore[arg-type]
    "make a config with a section of another kind": lambda: smtrain.JobConfig(model="m"),  # type: ignore[arg-type]
    "make a config of numbers that are text": lambda: smtrain.JobConfig(
        model={"path": 3}, train={"lr": "x"}
    ),  # type: ignore[arg-type]
    "make a section with an unknown key": lambda: Train(stpes=1),  # type: ignore[call-arg]
    "make a section of too few numbers": lambda: Train(betas=[0.9]),  # type: ignore[arg-type]
    "change a config in place": lambda: setattr(smtrain.load_config("run.yaml"), "name", "x"),
    "change a section in place": lambda: setattr(smtrain.load_config("run.yaml").train, "steps", 2),
    "load a number": lambda: smtrain.load_config(3),  # type: ignore[arg-type]
    "load a list": lambda: smtrain.load_config([1]),  # type: ignore[arg-type]
    "load bytes": lambda: smtrain.load_config(b"run.yaml"),  # type: ignore[arg-type]
    "load with one text for set_": lambda: smtrain.load_config("run.yaml", set_="train.lr=1e-4"),
    "load with a number for set_": lambda: smtrain.load_config("run.yaml", set_=3),  # type: ignore[arg-type]
    "load with a mapping for set_": lambda: smtrain.load_config("run.yaml", set_={"train.lr": 1}),  # type: ignore[arg-type]
    "load with numbers in set_": lambda: smtrain.load_config("run.yaml", set_=[3]),  # type: ignore[list-item]
    "load for a number": lambda: smtrain.load_config("run.yaml", target=3),  # type: ignore[arg-type]
    "load an object": lambda: smtrain.load_config("run.yaml", train=object()),
    "plan one machine as text": lambda: smtrain.plan("run.yaml", machines="ml.trn1.32xlarge:1"),  # type: ignore[arg-type]
    "plan a machine without a count": lambda: smtrain.plan(
        "run.yaml",
        machines=["ml.trn1.32xlarge"],  # type: ignore[list-item]
    ),
    "plan a text as a count": lambda: smtrain.plan(
        "run.yaml",
        machines=[("ml.trn1.32xlarge", "x")],  # type: ignore[list-item]
    ),
    "plan a text budget": lambda: smtrain.plan("run.yaml", budget="much"),  # type: ignore[arg-type]
    "check a number": lambda: smtrain.check(3),  # type: ignore[arg-type]
    "launch a number": lambda: smtrain.launch(3),  # type: ignore[arg-type]
    "launch with a word for no": lambda: smtrain.launch("run.yaml", wait="no"),  # type: ignore[arg-type]
    "run a number": lambda: smtrain.run(3),  # type: ignore[call-overload]
    "None as a job": lambda: smtrain.Job(None),  # type: ignore[arg-type]
    "a number as a job": lambda: smtrain.Job(3),  # type: ignore[arg-type]
    "its download to nothing": lambda: smtrain.Job("no-such-job").download(None),  # type: ignore[arg-type]
    "its events since": lambda: list(smtrain.Job("no-such-job").events(since="soon")),  # type: ignore[call-arg]
    "convert None": lambda: smtrain.convert(None, None, to=smtrain.Nxd()),  # type: ignore[arg-type]
    "convert by an argument that there is not": lambda: smtrain.convert("model", "to", too="nxd"),  # type: ignore[call-arg]
    "convert to a number in words": lambda: smtrain.convert(
        "model",
        "to",
        to=smtrain.Nxd(tp="two"),  # type: ignore[arg-type]
    ),
    "compare one text": lambda: smtrain.compare("a.jsonl"),  # type: ignore[arg-type]
    "chat with None": lambda: smtrain.chat(None),  # type: ignore[arg-type]
    "generate from nothing": lambda: smtrain.generate(),  # type: ignore[call-arg]
    "report on a number": lambda: smtrain.report(3),  # type: ignore[arg-type]
    "deploy for a number": lambda: smtrain.deploy("run", instance_type=3),  # type: ignore[arg-type]
    "undeploy None": lambda: smtrain.undeploy(None),  # type: ignore[arg-type]
}


def test_the_python_api_raises_its_own_errors(folder: Path) -> None:
    before, failures = tree(folder), []
    for name, call in API.items():
        try:
            call()
        except SmtrainError as error:
            if not str(error) or any(
                word in str(error) for word in ("Errno", "pydantic", "<class")
            ):
                failures.append(f"{name}: {error}")
        except BaseException:
            failures.append(f"{name}: {traceback.format_exc()[-700:]}")
        else:
            failures.append(f"{name}: nothing raised")
        if (after := tree(folder)) != before:
            before = after
            failures.append(f"{name}: writes")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: smtrain.Job(), "Job"),  # type: ignore[call-arg]
        (lambda: smtrain.Job("job", "local").describe(1), "Job.describe"),  # type: ignore[call-arg]
        (lambda: smtrain.Job("job", "local").download(), "Job.download"),  # type: ignore[call-arg]
    ],
)
def test_a_wrong_call_names_what_was_called(
    folder: Path, call: Callable[[], object], name: str
) -> None:
    with pytest.raises(SmtrainError, match=rf"^{re.escape(name)}\(\): "):
        call()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", ""], "cannot be a job's name"),
        (["plan", "deep.yaml"], "nested too deeply"),
        (["download", "no-such-job", ""], "FOLDER is an empty name"),
        (["convert", "nowhere", "to", "--to", "nxd"], "nowhere does not exist"),
    ],
)
def test_as_a_process(folder: Path, words: list[str], said: str) -> None:
    command = [sys.executable, "-c", "from smtrain.cli import main; main()", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = error_lines(done.stderr)
    assert said in sentence
