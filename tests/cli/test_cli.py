"""The command line: its surface is frozen here, it answers at once, and bad input is one sentence
and status 2.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from smtrain.cli import COMMANDS
from tests.typed import typed

SURFACE = {
    "help": set(),
    "init": {"--model", "--data", "--machines", "--force"},
    "plan": {
        "--set",
        "--model",
        "--machines",
        "--budget",
        "--deadline",
        "--rank",
        "--best",
        "--cheapest",
        "--prices",
        "--machine-file",
        "--measured",
        "--tokens",
        "--probe",
        "--target",
        "--json",
    },
    "iam": {"policy"},
    "check": {
        "--prices",
        "--stage",
        "--tune",
        "--endpoint",
        "--group",
        "--pipeline",
        "--target",
        "--set",
        "--json",
    },
    "run": {
        *(
            "--show-uploads",
            "--upload",
            "--no-check",
            "--yes",
            "-y",
            "--target",
            "--set",
            "--dry-run",
            "--again",
            "--from-step",
            "--docker",
            "--download",
            "--overwrite",
            "--plain",
            "--every",
            "--wait",
            "--detach",
        )
    },
    "launch": {
        "--show-uploads",
        "--upload",
        "--no-check",
        "--yes",
        "-y",
        "--stage",
        "--target",
        "--set",
        "--dry-run",
        "--wait",
        "--detach",
        "--again",
        "--from-step",
        "--docker",
        "--plain",
        "--every",
    },
    "list": {"--target", "--name", "--limit"},
    "status": {"--target"},
    "compare": {
        "--by",
        "--window",
        "--tolerance",
        "--tokens-per-step",
        "--out",
        "--json",
        "--target",
    },
    "tensorboard": {"--port", "--host", "--out", "--target"},
    "report": {"--out", "--overwrite", "--target"},
    "logs": {
        *(
            "--target",
            "--follow",
            "-f",
            "--host",
            "--grep",
            "--since",
            "--tail",
            "--resume",
            "--plain",
            "--every",
        ),
        *("--lines", "--no-lines"),
    },
    "stop": {"--target", "--wait", "--detach"},
    "download": {"--target", "--what", "--overwrite"},
    "chat": {
        "--chat-template-kwargs",
        *(
            "--compare",
            "--adapter",
            "--system",
            "--template",
            "--turns",
            "--max-new-tokens",
            "--temperature",
        ),
        *(
            "--top-k",
            "--top-p",
            "--stop",
            "--seed",
            "--endpoint",
            "--target",
            "--processes",
            "--config",
        ),
    },
    "generate": {
        "--chat-template-kwargs",
        *(
            "--prompt",
            "--out",
            "--overwrite",
            "--chat",
            "--system",
            "--adapter",
            "--template",
            "--batch",
            "--stream",
        ),
        *(
            "--json",
            "--max-new-tokens",
            "--temperature",
            "--top-k",
            "--top-p",
            "--beams",
            "--length-penalty",
        ),
        *("--stop", "--seed", "--target", "--processes", "--config"),
    },
    "deploy": {
        *(
            "--instance",
            "--name",
            "--for",
            "--instances",
            "--role",
            "--schedule-role",
            "--image",
            "--max-length",
        ),
        *("--detach", "--dry-run", "--target"),
    },
    "undeploy": {"--target"},
    "register": {
        "--instance",
        "--group",
        "--approve",
        "--role",
        "--image",
        "--dry-run",
        "--target",
    },
    "push": {"--public", "--update", "--revision", "--message", "--dry-run", "--target"},
    "tune": {
        *(
            "--over",
            "--max-jobs",
            "--parallel",
            "--budget",
            "--early-stop",
            "--to-the-end",
            "--out",
            "--target",
            "--set",
        ),
        *("--dry-run", "--no-check"),
    },
    "pipeline": {"--upsert", "--start", "--name", "--target", "--set", "--no-check"},
    "serve": {"--port", "--host", "--server", "--option", "--chat-template-kwargs", "--target"},
    "convert": {
        *(
            "--to",
            "--tp",
            "--pp",
            "--ep",
            "--cuts",
            "--format",
            "--form",
            "--qkv",
            "--kv-multiplier",
            "--kv-order",
        ),
        *("--spec", "--vpp", "--first-stage-layers", "--last-stage-layers", "--layers-per-stage"),
        *("--make-vocab-size-divisible-by", "--release", "--xser"),
        *(
            "--dtype",
            "--max-shard-size",
            "--config",
            "--masters",
            "--reordered-qkv",
            "--merge-adapter",
            "--merge-base",
            "--overwrite",
        ),
    },
    "checkpoint": {"inspect", "diff", "verify"},
    "data": {"prepare", "merge", "split", "inspect", "report", "export", "import"},
    "evaluate": {
        "--chat-template-kwargs",
        *(
            "--tasks",
            "--base",
            "--data",
            "--num-fewshot",
            "--limit",
            "--apply-chat-template",
            "--batch-size",
        ),
        *(
            "--run-generated-code",
            "--text",
            "--lengths",
            "--out",
            "--json",
            "--overwrite",
            "--target",
        ),
    },
    "image": {"build", "verify", "pull", "tiny"},
    "images": {"--region", "--engine", "--json"},
    "demo": {"--out", "--tiny", "--set", "--again", "--overwrite", "--docker"},
    "doctor": {"--train", "--minutes", "--model", "--page", "--json", "--overwrite"},
    "config": {"schema", "show"},
    "cluster": {"network", "template", "post-install", "clean"},
    "pool": {"extend", "list", "release"},
    "local": {"status", "stop"},
}


def smtrain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from smtrain.cli import main; main()", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


@pytest.fixture
def config(raw: dict[str, Any], tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_the_surface_is_what_it_was(command: str) -> None:
    done = typed(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for option in SURFACE[command]:
        assert option in done.stdout
    options = {
        word.strip(",")
        for word in done.stdout.partition("\nExamples:\n")[0].split()
        if word.startswith("--")
    }
    assert {o for o in options if o.isascii()} - {"--help"} <= {
        o for o in SURFACE[command] if o.startswith("--")
    }
    assert set(SURFACE) == set(COMMANDS)


def test_help_names_every_command_and_loads_no_library() -> None:
    code = (
        "import sys; from smtrain.cli import main; sys.argv = ['smtrain', '--help']; main()\n"
        "heavy = {'pydantic', 'typer', 'boto3', 'rich', 'yaml', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


def test_importing_the_package_loads_nothing_until_a_name_is_used() -> None:
    code = (
        "import sys, smtrain\nassert not {'pydantic', 'boto3', 'torch', 'transformers',"
        " 'sagemaker'} & set(sys.modules)\nsmtrain.JobConfig, smtrain.launch\nassert not {'boto3',"
        " 'torch', 'transformers', 'sagemaker', 'moto'} & set(sys.modules)\nlate ="
        " {'backends.slurm.place', 'preflight.check', 'follow.follower'}\nassert not"
        " {f'smtrain.client.{name}' for name in late} & set(sys.modules)\nassert"
        " set(smtrain.__all__) <= set(dir(smtrain))\nfor name in smtrain.__all__: getattr(smtrain,"
        " name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_the_request_and_starts_nothing(config: Path, tmp_path: Path) -> None:
    done = smtrain(
        "launch",
        str(config),
        "--dry-run",
        "--set",
        "train.lr=3e-4",
        SMTRAIN_HOME=str(tmp_path / "home"),
    )
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout)
    assert request["HyperParameters"]["lr"] == "0.0003"
    assert request["ResourceConfig"]["InstanceCount"] == 2
    assert not (tmp_path / "home").exists()
    chosen = typed("launch", str(config), "--dry-run", "--from-step", "20")
    assert chosen.returncode == 0, chosen.stderr
    assert json.loads(chosen.stdout)["TrainingJobName"] != request["TrainingJobName"], (
        "it is a separate lineage"
    )
    all_stages = json.loads(typed("run", str(config), "--dry-run").stdout)
    stages = [{tag["Key"]: tag["Value"] for tag in r["Tags"]}["smtrain:stage"] for r in all_stages]
    assert stages == ["prepare", "convert", "train", "export", "generate"]


def test_schema_knows_every_key_with_a_description() -> None:
    schema = json.loads(typed("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert {
        "model",
        "data",
        "parallel",
        "train",
        "compute",
        "checkpoint",
        "output",
        "tags",
        "network",
    } <= set(schema["properties"])
    for name, section in schema["$defs"].items():
        for key, value in section["properties"].items():
            assert value.get("description"), f"{name}.{key} has no description"


def test_an_editor_that_goes_by_the_schema_agrees_with_the_loader(raw: dict[str, Any]) -> None:
    schema = json.loads(typed("config", "schema").stdout)
    check = jsonschema.Draft202012Validator(schema)
    assert check.is_valid(raw)
    assert check.is_valid({**raw, "parallel": "auto"})
    assert check.is_valid({**raw, "compute": {"max_run": "2h30m"}})
    assert not check.is_valid({**raw, "parallel": "automatic"})
    assert not check.is_valid({**raw, "train": {"lrr": 1}})


def test_show_prints_a_config_that_reads_back_the_same(config: Path, tmp_path: Path) -> None:
    from smtrain import load_config

    done = typed("config", "show", str(config), "--set", "train.lr=2e-4")
    shown = tmp_path / "shown.yaml"
    shown.write_text(done.stdout)
    assert load_config(shown) == load_config(config, set_=["train.lr=2e-4"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lanch"], "smtrain: no command 'lanch'; did you mean `smtrain launch`?"),
        (["launch", "nowhere.yaml", "--dry-run"], "smtrain: nowhere.yaml: no such config file"),
        (["config", "show", "CONFIG", "--set", "train.lr=fast"], "smtrain: train.lr: got 'fast'"),
        (
            ["config", "show", "CONFIG", "--set", "train.seed"],
            "smtrain: --set train.seed: must look like",
        ),
        (
            ["launch", "CONFIG", "--dry-run", "--target", "aws"],
            "smtrain: compute.role: is needed on AWS",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    config: Path, arguments: list[str], sentence: str
) -> None:
    done = typed(*[str(config) if a == "CONFIG" else a for a in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith(sentence)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
