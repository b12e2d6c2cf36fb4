"""The README's config is valid for AWS without changes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

import smtrain
from smtrain.client.iam import policies
from smtrain.core.config import Stage
from smtrain.core.facts.images import gpu_row
from tests.docs.pages import ROOT
from tests.install.stranger import Stranger, Typed
from tests.typed import lacking_options, typed
from tests.worker.checkpoint.folders import LLAMA, hf_folder

STAGES: tuple[Stage, ...] = ("prepare", "convert", "train", "export", "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The README's config, with a model and a text at its paths."""
    folder = tmp_path_factory.mktemp("readme")
    config = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert config
    (folder / "config.yaml").write_text(config[1])
    hf_folder(folder / "Llama-3.2-1B", {**LLAMA, "vocab_size": 64})
    (folder / "Llama-3.2-1B" / "tokenizer.json").write_text("{}")
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.jsonl").write_text('{"text": "a"}\n')
    return folder


@pytest.mark.parametrize("stage", ["prepare", "convert", "train"])
def test_its_config_is_a_request_of_an_image_and_machines_that_its_engine_runs_on(
    folder: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.chdir(folder)
    done = typed("launch", "config.yaml", "--stage", stage, "--target", "aws", "--dry-run")
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout)
    assert gpu_row(request["AlgorithmSpecification"]["TrainingImage"])
    assert request["ResourceConfig"]["InstanceType"].startswith("ml.g6e") == (stage == "train")


def test_its_config_is_launched_in_an_account_up_to_the_last_request(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account is moto's, in this process; a job in it is complete as soon as it is created."""
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    keys = {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in {**keys, "SMTRAIN_HOME": str(tmp_path), "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        account = boto3.client("s3"), boto3.client("iam"), boto3.client("sagemaker")
        account[0].create_bucket(Bucket="my-bucket")
        made = policies("config.yaml", target="aws")
        account[1].create_role(RoleName="train", AssumeRolePolicyDocument=json.dumps(made["trust"]))
        for stage in STAGES:
            # moto itself simulates no policies and has no AWS images, so the checks are off.
            job = smtrain.launch(
                "config.yaml",
                stage=stage,
                target="aws",
                wait=False,
                check=False,
                say=lambda _: None,
            )
            sent: Any = account[2].describe_training_job(TrainingJobName=job.name)
            assert sent["RoleArn"].endswith(":role/train")
            assert gpu_row(sent["AlgorithmSpecification"]["TrainingImage"])
            assert sent["ResourceConfig"]["InstanceType"].startswith("ml.g6e") == (stage == "train")
            assert sent["OutputDataConfig"]["S3OutputPath"].startswith(
                "s3://my-bucket/smtrain/my-run/"
            )


def test_its_commands_and_their_options_are_there(tmp_path: Path) -> None:
    """Look at their help; tests/install/test_stranger.py runs them, but only in `scripts/test
    --full`.
    """

    class Reader(Stranger):
        def type(self, command: str) -> Typed:
            done = typed(*command.split()[1:])
            return Typed(command, 0.0, done.returncode, done.stdout, done.stderr)

    commands = list(
        dict.fromkeys(Reader(ROOT / "README.md", ROOT / "examples", tmp_path, {}).commands())
    )
    assert len(commands) > 20
    for command in commands:
        assert not lacking_options(command), command


def test_its_links_and_pictures_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    assert {"docs/how-it-fits.svg", "docs/verified.md", "docs/first-run-aws.md"} <= set(links)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_an_example_can_be_copied_alone() -> None:
    examples = [path for path in (ROOT / "examples").rglob("*") if not path.is_dir()]
    assert len(examples) > 5
    assert [path for path in examples if path.is_symlink()] == []
