"""The installed package works from any folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from smtrain.client.launch.bundle import build_bundle
from tests.install.conftest import Installed


def test_what_is_installed_is_not_the_checkout_and_sends_the_same_bytes(
    installed: Installed,
) -> None:
    code = (
        "import smtrain, smtrain.client.launch.bundle as b; print(smtrain.__file__,"
        " b.build_bundle().sha256)"
    )
    file, sha256 = installed.run("python", "-c", code).stdout.split()
    assert Path(file).is_relative_to(installed.bin.parent)
    assert sha256 == build_bundle().sha256
    assert not (Path(file).parents[1] / "entrypoints").exists(), (
        "nothing but smtrain lands in site-packages"
    )


@pytest.mark.full
def test_dry_run_policy_and_python_m(installed: Installed) -> None:
    request = json.loads(
        installed.smtrain("launch", "config.yaml", "--stage", "convert", "--dry-run")
    )
    assert build_bundle().sha256[:8] in json.dumps(request)
    assert "s3:GetObject" in installed.smtrain("iam", "policy", "config.yaml", "--target", "local")
    as_module = installed.run("python", "-m", "smtrain", "--version")
    assert as_module.stdout == installed.smtrain("--version")
    words = (
        "--model",
        "demo://tiny-llama",
        "--data",
        "demo://python-stdlib",
        "--machines",
        "here",
        "--force",
    )
    installed.smtrain("init", "first.yaml", *words)
    assert str(installed.bin.parent) not in (installed.home / "first.yaml").read_text(), (
        "a colleague has no such folder"
    )
    assert installed.smtrain("help", "slurm").startswith("# A Slurm cluster\n")
    assert "  config " in installed.smtrain("help"), "also a page of a folder"
    assert json.loads(installed.smtrain("config", "schema"))["required"] == ["model"]
    refused = installed.run("python", "-m", "smtrain", "lanch")
    assert refused.returncode == 2
    assert "did you mean `smtrain launch`" in refused.stderr


def test_a_job_on_this_machine(installed: Installed) -> None:
    try:
        checked = installed.run(
            "smtrain", "check", "config.yaml", "--stage", "convert", "--target", "local"
        )
        assert re.search(r"\d+ faults?, \d+ warnings?, \d+ ok", checked.stdout), checked.stderr
        installed.smtrain("launch", "config.yaml", "--stage", "convert", "--target", "local")
        assert "Completed" in installed.smtrain("list", "--target", "local")
    finally:
        installed.smtrain("local", "stop")


@pytest.mark.parametrize(
    ("blocked", "command", "expected"),
    [
        (
            "numpy",
            ["convert", "model", "out", "--to", "nxd"],
            "package numpy, .* run `pip install 'numpy",
        ),
        (
            "moto",
            ["launch", "config.yaml", "--stage", "convert", "--target", "local"],
            "moto, .*'moto\\[server\\]",
        ),
        ("tokenizers", ["data", "prepare", "text", "out", "--model", "model"], "tokenizers, "),
    ],
)
def test_a_missing_extra_is_a_sentence_with_the_command(
    installed: Installed, blocked: str, command: list[str], expected: str
) -> None:
    done = installed.run("smtrain", *command, blocked=blocked)
    assert done.returncode == 2, done.stderr
    *work, sentence = done.stderr.splitlines()
    assert not any(line.startswith("smtrain:") for line in work)
    assert re.search(expected, sentence)
    assert "smtrain[" not in done.stderr, "no index has it under that name"


def test_a_missing_extra_is_our_error_in_python(installed: Installed) -> None:
    code = (
        "import smtrain\n"
        "try: smtrain.convert\n"
        "except smtrain.SmtrainError as error: print(error)\n"
        "from smtrain.client.follow.curve import frame\n"
        "try: frame([])\n"
        "except smtrain.JobError as error: print(error)\n"
    )
    lines = installed.run("python", "-c", code, blocked="numpy pandas").stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"this needs the package {name}" for name in ("numpy", "pandas")
    ]
