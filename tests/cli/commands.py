"""One row for each command: a call that works, its requirements, and calls that are wrong or
special in other ways.

Tests that walk all commands go by `COMMANDS`. `test_every_command_has_a_row` fails if one has no
row.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from smtrain import cli
from smtrain.core.work import WORK

JOB, FOLDER = "JOB", "FOLDER"
"""Placeholders in `of_job` for a job's name and an output folder."""


@dataclass(frozen=True)
class Command:
    """Test calls of one command, without its own name; words are separated as in a shell."""

    works: str = ""
    """The cheapest useful call, in the folder of `wrong_uses.world`."""
    needs: str = ""
    """The kind of name in `works`: config, job, run, model, endpoint, text, tokens, or empty."""
    any_number: bool = False
    """True if it takes any number of words."""
    wrong: tuple[str, ...] = ()
    """Wrong calls of this command only; missing, unknown and surplus words are tried of every
    command.
    """
    of_job: tuple[str, ...] = ()
    """Calls that show what a job wrote."""
    asks_aws: tuple[str, ...] = ()
    """Calls that ask AWS before they do anything; in the folder of test_unreachable.py, with
    `--target aws`.
    """


COMMANDS: dict[str, Command] = {
    "help": Command(wrong=("no-such-page",)),
    "init": Command(),
    "plan": Command(
        "run.yaml",
        "config",
        any_number=True,
        wrong=(
            "run.yaml --rank beauty",
            "run.yaml --budget much",
            "run.yaml --budget -1",
            "run.yaml --budget nan",
            "run.yaml --deadline -1",
            "run.yaml --deadline inf",
            "run.yaml --machines two",
            "run.yaml --machines ml.trn1.32xlarge:0",
            "run.yaml --machines ml.trn1.32xlarge:x",
            "run.yaml --machines ml.no.such:1",
            "run.yaml --machines ''",
            "run.yaml --prices nowhere.toml",
            "run.yaml --prices run.yaml",
            "run.yaml --prices text",
            "run.yaml --model nowhere",
            "run.yaml --model ''",
            "run.yaml --model list-model",
            "run.yaml nowhere.yaml",
            "run.yaml --machines box:1",
            "run.yaml --machine-file nowhere.yaml",
            "run.yaml --machine-file list.yaml",
            "run.yaml --machine-file binary.yaml",
            "run.yaml --machine-file text",
            "run.yaml --machine-file run.yaml",
            "run.yaml --measured -1",
            "run.yaml --measured nan",
            "run.yaml --measured nowhere.jsonl",
            "run.yaml --measured run.yaml",
            "run.yaml run.yaml --measured 5",
            "run.yaml --tokens 5",
            "run.yaml run.yaml --tokens 0",
            "run.yaml run.yaml --tokens inf",
            "run.yaml --probe box",
            "--probe ''",
            "--probe Ml.Box",
            "run.yaml --set machines=5",
            "run.yaml --set machines.box=5",
            "run.yaml --set machines.box.tflops=-1",
            "run.yaml --set 'machines.Box!.tflops=1'",
        ),
    ),
    "check": Command(
        "run.yaml",
        "config",
        wrong=(
            "run.yaml --stage nap",
            "run.yaml --target x",
            "run.yaml --endpoint 'a b'",
            "run.yaml --pipeline ''",
        ),
        asks_aws=("run.yaml", "named.yaml", "far.yaml"),
    ),
    "iam policy": Command(
        "run.yaml",
        "config",
        wrong=("run.yaml --endpoint ''", "run.yaml --group a_b"),
        asks_aws=("run.yaml",),
    ),
    "run": Command(
        "run.yaml --dry-run",
        "config",
        any_number=True,
        wrong=(
            "run.yaml --upload",
            "run.yaml --every soon",
            "run.yaml --target ''",
            "run.yaml --from-step -1 --dry-run",
            "run.yaml --download ''",
            "run.yaml --download run.yaml",
            "run.yaml run.yaml --dry-run",
            "run.yaml named.yaml --detach",
            "run.yaml nowhere.yaml --dry-run",
        ),
        asks_aws=("named.yaml -y", "role.yaml --dry-run"),
    ),
    "launch": Command(
        "run.yaml --dry-run",
        "config",
        wrong=(
            "run.yaml --stage nap",
            "run.yaml --target moon",
            "run.yaml --from-step -1 --dry-run",
            "run.yaml --from-step x",
            "run.yaml --upload",
            "run.yaml --every soon",
            "run.yaml --every -1s",
        ),
        asks_aws=(
            "named.yaml -y --stage prepare --no-check",
            "named.yaml -y --stage prepare",
            "far.yaml -y --stage convert --no-check",
        ),
    ),
    "tune": Command("run.yaml --over train.lr=1e-4,2e-4 --budget 0.01", "config"),
    "pipeline": Command("run.yaml", "config", asks_aws=("named.yaml --upsert",)),
    "list": Command(
        wrong=("--limit 0", "--limit x", "--target x"),
        of_job=("--target local --name hostile",),
        asks_aws=("",),
    ),
    "status": Command("job", "job", of_job=(JOB,), asks_aws=("job",)),
    "compare": Command("a.jsonl b.jsonl", "run", any_number=True, asks_aws=("job other",)),
    "report": Command("run", "run", asks_aws=("run",)),
    "tensorboard": Command("run", "run", asks_aws=("run --out tb",)),
    "logs": Command(
        "job",
        "job",
        wrong=(
            "no-such-job --grep '('",
            "no-such-job --since soon",
            "no-such-job --tail -1",
            "no-such-job --every 0x",
            "no-such-job --host algo-9",
        ),
        of_job=(JOB, f"{JOB} --follow --plain", f"{JOB} --grep hello"),
        asks_aws=("job", "job --follow --plain"),
    ),
    "stop": Command("job", "job", of_job=(JOB,), asks_aws=("job",)),
    "download": Command("job to", "job", of_job=(f"{JOB} {FOLDER}",), asks_aws=("job to",)),
    "chat": Command("model", "model", asks_aws=("some-run", "s3://a-bucket/x")),
    "generate": Command(
        "model",
        "model",
        any_number=True,
        asks_aws=("some-run --prompt x", "s3://a-bucket/x --prompt x"),
    ),
    "serve": Command("model", "model", asks_aws=("some-run",)),
    "push": Command("model me/llama", "model", asks_aws=("some-run me/x",)),
    "register": Command(
        "run --instance ml.g6e.xlarge", "run", asks_aws=("run --instance ml.g6e.xlarge",)
    ),
    "deploy": Command(
        "model --instance ml.g6e.xlarge",
        "model",
        asks_aws=("some-run --instance ml.g6e.xlarge", "s3://a-bucket/x --instance ml.g6e.xlarge"),
    ),
    "undeploy": Command("endpoint", "endpoint", asks_aws=("endpoint",)),
    "convert": Command("model to --to nxd", "model"),
    "checkpoint inspect": Command("model", "model"),
    "checkpoint diff": Command("model model", "model"),
    "checkpoint verify": Command("model", "model"),
    "image build": Command(wrong=("run.yaml --print --push x", "run.yaml --context run.yaml")),
    "image verify": Command(wrong=("x --set train.lr=1",)),
    "image pull": Command(wrong=("smtrain-no-such-image:1",)),
    "image tiny": Command(),
    "images": Command(wrong=("--engine cuda", "--region ''", "--region moon")),
    "evaluate": Command(
        "model --tasks mmlu",
        "model",
        asks_aws=("s3://a-bucket/x --tasks model", "some-run --tasks model"),
    ),
    "data prepare": Command("text to --model model", "text", any_number=True),
    "data merge": Command("a to", "tokens", any_number=True),
    "data split": Command("a to 1 1", "tokens", any_number=True),
    "data inspect": Command("a", "tokens"),
    "data report": Command("text", "text", any_number=True),
    "data export": Command("a to", "tokens"),
    "data import": Command("a to --model model", "tokens"),
    "demo": Command(
        wrong=(
            "--out ''",
            "--out run.yaml",
            "--set train",
            "--set train.lr=x",
            "--tiny --set train.lr=x",
            "--tiny --out ''",
            "--tiny tiny",
            "--set train.adapter.rank=0",
        ),
    ),
    "doctor": Command(
        wrong=(
            "--minutes 5",
            "--model model",
            "--train --minutes 0",
            "--train --minutes -1",
            "--train --minutes nan",
            "--train --minutes soon",
            "--train --minutes 1e9",
            "--json ''",
            "--json text",
            "--json run.yaml",
            "--page ''",
            "--page .",
            "--page no-such-folder/x.html",
            "--page run.yaml",
            "--train --model ''",
            "--train --model nowhere",
            "--train --model broken-model",
            "--train --model list-model",
            "--train --model s3://a/b",
        ),
    ),
    "config schema": Command(),
    "config show": Command("run.yaml", "config"),
    "config set": Command(
        "run.yaml name=other",
        "config",
        any_number=True,
        wrong=("run.yaml name", "run.yaml nme=x", "run.yaml name=''"),
    ),
    "cluster template": Command("run.yaml --set cluster.shared=/fsx/smtrain", "config"),
    "cluster network": Command(
        "run.yaml", "config", wrong=("run.yaml --region moon", "run.yaml --cidr 8.8.8.0/24")
    ),
    "cluster post-install": Command(),
    "cluster clean": Command(wrong=("--older-than soon", "--older-than -1d")),
    "pool extend": Command(
        wrong=("",), asks_aws=("arn:aws:sagemaker:us-east-1:1:training-plan/x",)
    ),
    "pool list": Command(of_job=("",), asks_aws=("",)),
    "pool release": Command(wrong=("", "job --all", "''"), asks_aws=("job",)),
    "local status": Command(),
    "local env": Command(),
    "local stop": Command(),
    "local clean": Command(wrong=("--older-than soon", "--older-than -1d")),
}
GROUPS = sorted({name.split()[0] for name in COMMANDS if " " in name})
"""Commands that have subcommands."""


def words(name: str, call: str, **for_: str) -> tuple[str, ...]:
    """The words of a call from the table after the command's name, some of them replaced."""
    return (*name.split(), *(for_.get(word, word) for word in shlex.split(call)))


def calls(kind: str) -> list[tuple[str, str]]:
    """(command, call) of every call of a kind in the table, e.g. `of_job`."""
    return [(name, call) for name, command in COMMANDS.items() for call in getattr(command, kind)]


def in_the_package() -> Iterator[str]:
    """Every command and subcommand of the command line."""
    for name, (module, _) in cli.COMMANDS.items():
        app = import_module(module).app
        subcommands = [one.name or one.callback.__name__ for one in app.registered_commands]
        yield from (
            [f"{name} {sub}" for sub in subcommands]
            if app.registered_callback or len(subcommands) > 1
            else [name]
        )


WORK_LINES = frozenset(WORK.values())
"""The lines with which slow commands begin in a pipe."""


def error_lines(stderr: str) -> list[str]:
    """Lines on stderr, without the one with which a slow command begins in a pipe."""
    lines = stderr.splitlines()
    return lines[1:] if lines and lines[0] in WORK_LINES else lines
