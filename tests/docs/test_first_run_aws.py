"""Run the page "Your first run on AWS" with its config and the local control plane in place of
AWS.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

import smtrain
import smtrain.client.backends.sagemaker.calls
from smtrain.client.iam import policies
from smtrain.core.config import Stage
from smtrain.core.facts.image_fit import image_fault
from smtrain.core.public_api import sentence
from smtrain.plane.client import ensure_running
from smtrain.worker.checkpoint.summary import verify
from tests import tiers
from tests.docs.pages import ROOT, blocks
from tests.docs.test_pages import as_aws
from tests.shared_run import SharedRun
from tests.typed import typed

PAGE = ROOT / "docs/first-run-aws.md"
STAGES: tuple[Stage, ...] = ("fetch", "prepare", "convert", "train", "export", "generate")


def make_role(iam: Any, made: dict[str, Any]) -> None:
    """Create the page's role, unless another test of this process has created it."""
    with contextlib.suppress(iam.exceptions.EntityAlreadyExistsException):
        iam.create_role(
            RoleName="smtrain-training", AssumeRolePolicyDocument=json.dumps(made["trust"])
        )
    iam.put_role_policy(
        RoleName="smtrain-training", PolicyName="smtrain", PolicyDocument=json.dumps(made["role"])
    )


def test_the_pages_config_is_checked_and_every_stage_of_it_is_a_request(
    local_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for key, value in {**as_aws(), "SMTRAIN_TARGET": "aws"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    (init,) = re.findall(r"^\$ (smtrain init .*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert typed(*init.split()[1:]).returncode == 0
    config = yaml.safe_load(Path("run.yaml").read_text("utf-8"))
    (written,) = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.tag == "yaml"]
    for section, values in written.items():
        config[section] = {**config.get(section, {}), **values}
    s3, iam = boto3.client("s3"), boto3.client("iam")
    s3.create_bucket(Bucket="my-bucket")
    s3.put_object(Bucket="my-bucket", Key="text/a.jsonl", Body=b'{"text": "a"}\n')
    generated = policies(config, target="aws")
    make_role(iam, generated)
    config["compute"]["role"] = "smtrain-training"

    report = smtrain.check(config, target="aws")
    # AWS's image registry does not exist here: it is the only fault, and the role has all
    # permissions.
    assert [f.text.partition(" in ")[0] for f in report.faults] == [
        "there is no repository huggingface-pytorch-training"
    ]
    assert [f.text for f in report.warnings if "could not be checked" in f.text] == []
    assert [f.text for f in report if f.check == "permissions"] == [
        "the role may do all that its jobs need"
    ]
    for stage in STAGES:
        sent = smtrain.request(config, stage=stage, target="aws")
        machine = sent["ResourceConfig"]["InstanceType"]
        assert (machine == "ml.g5.12xlarge") == (stage == "train"), (stage, machine)
        image = sent["AlgorithmSpecification"]["TrainingImage"]
        assert image_fault(image, "native", "ml.g5.12xlarge") is None
        assert sent["RoleArn"].endswith(":role/smtrain-training")


def on_page(command: str, section: str) -> str:
    """The page's command with this beginning, in the section with this number."""
    page = PAGE.read_text("utf-8")
    text = page.split(f"\n## {section}. ")[1].partition("\n## ")[0]
    return next(
        line for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE) if line.startswith(command)
    )


@pytest.mark.slow
# the gate has the page's requests above, and a whole run in tests/client/launch/test_local_run.py
@pytest.mark.full
def test_the_run_is_stopped_resumed_exported_and_downloaded(
    shared_run: SharedRun,
    trained_inputs: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Run sections 10 to 15 with a tiny model on a CPU machine, which this machine can be.

    The text was prepared by the shared run. The gate ends after the stop; tests/client/launch tests
    resuming.
    """
    import boto3

    for key, value in {**as_aws(), "SMTRAIN_TARGET": "aws"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    session = boto3.Session()  # not the default session, which has the keys of another home
    s3, iam, ecr = (session.client(name) for name in ("s3", "iam", "ecr"))
    s3.create_bucket(Bucket="walked")
    for file in trained_inputs["model"].iterdir():
        s3.upload_file(str(file), "walked", f"model/{file.name}")
    prepared = shared_run.run.job("prepare").describe()["ModelArtifacts"]["S3ModelArtifacts"]
    registry = ecr.create_repository(repositoryName="own")["repository"]["repositoryUri"]
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    layers = {
        "schemaVersion": 2,
        "mediaType": kind,
        "config": {"digest": "sha256:" + "0" * 64},
        "layers": [],
    }
    ecr.put_image(repositoryName="own", imageManifest=json.dumps(layers), imageTag="1")
    config: dict[str, Any] = {
        "name": "walk",
        "target": "aws",
        "model": {"path": "s3://walked/model/"},
        "data": {"prepared": prepared},
        "train": {
            "steps": 9999,
            "seq_len": 32,
            "global_batch_size": 8,
            "precision": "fp32",
            "warmup_steps": 2,
            "save_interval": 4,
        },
        "compute": {
            "instance_type": "ml.m5.xlarge",
            "processes_per_instance": 1,
            "max_run": "2h",
            "image": f"{registry}:1",
            "role": "smtrain-training",
        },
        "output": {"s3_uri": "s3://walked/smtrain"},
        "generate": {"prompts": ["the red fox"], "max_new_tokens": 4},
    }
    Path("run.yaml").write_text(yaml.safe_dump(config), "utf-8")
    made = policies(config, target="aws")
    make_role(iam, made)

    def type_(line: str, job: str = "") -> str:
        done = typed(*re.sub(r"\bJOB\b", job, line).split()[1:])
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    train = type_(on_page("smtrain launch run.yaml --stage train", "10") + " -y")
    (name,) = re.findall(r"^job: (\S+)$", train, re.MULTILINE)
    job = smtrain.Job(name, "aws")
    while len(job.checkpoints) < 2:
        assert job.status == "InProgress", job.explain()
        time.sleep(0.1)
    assert name in type_(on_page("smtrain list", "11"))
    type_(on_page("smtrain stop", "12"), name)
    while job.status == "Stopping":
        time.sleep(0.1)
    assert job.status == "Stopped"
    assert "step=1 " in type_(on_page("smtrain logs", "11"), name)
    status = type_(on_page("smtrain status", "11"), name)
    saved = int(max(record["step"] for record in job.records))
    assert re.search(rf"^checkpoint: +step {saved},", status, re.MULTILINE), status
    # Before the run resumes there is a complete checkpoint, and a model of it.
    type_(f"smtrain download {name} kept --what checkpoints")
    assert verify(tmp_path / "kept") > 0
    if tiers.examples(8) < 8:
        return
    export = type_(on_page("smtrain launch run.yaml --stage export", "13"))
    (early,) = re.findall(r"^job: (\S+)$", export, re.MULTILINE)
    type_(f"smtrain download {early} early")
    assert (tmp_path / "early/model.safetensors").is_file()

    # The same command resumes; two more steps are enough to see it.
    config["train"]["steps"] = saved + 2
    Path("run.yaml").write_text(yaml.safe_dump(config), "utf-8")
    type_(f"{on_page('smtrain run', '10')} --download my-new-model")
    (again,) = [
        one
        for one in type_("smtrain list").split()
        if one.startswith("walk-train-") and one != name
    ]
    assert min(record["step"] for record in smtrain.Job(again, "aws").records) == saved + 1
    assert (tmp_path / "my-new-model/model.safetensors").is_file()
    weights = [
        (tmp_path / f"{folder}/model.safetensors").read_bytes()
        for folder in ("early", "my-new-model")
    ]
    assert weights[0] != weights[1]
    status = type_(on_page("smtrain status", "13"), again)
    assert f"step:        {saved + 2}  loss " in status
    (download,) = re.findall(r"(smtrain download walk-export-\S+ FOLDER)", status)
    type_(download.replace("FOLDER", "exported"))
    assert (tmp_path / "exported/model.safetensors").read_bytes() == weights[1]
    type_(on_page("smtrain download", "13"), again)
    assert (tmp_path / "measured/metrics.jsonl").is_file()
    type_(on_page("smtrain pool release", "15"))


def test_what_the_control_plane_lacks_is_answered_as_aws_answers(local_home: Path) -> None:
    session = ensure_running().session()
    with pytest.raises(ClientError) as in_xml:
        session.client("iam").get_service_last_accessed_details(JobId="a" * 36)
    with pytest.raises(ClientError) as in_json:
        session.client("logs").list_anomalies()
    for caught in (in_xml, in_json):
        assert caught.value.response["Error"]["Code"] == "NotImplemented"
        assert "smtrain's local control plane does not have it" in str(caught.value)
    assert "iam:GetServiceLastAccessedDetails" in str(in_xml.value)
    assert "logs:ListAnomalies" in str(in_json.value)


def test_a_page_in_place_of_aws_is_one_sentence() -> None:
    message = sentence(
        ResponseParserError("Unable to parse response (syntax error: line 1, column 0)")
    )
    assert (
        message
        == "the answer is a web page and not from AWS; check the proxy, and AWS_ENDPOINT_URL if it"
        " is set"
    )
