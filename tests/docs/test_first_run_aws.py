"""The config that "Your first run on AWS" makes goes through its page, with the local control plane in AWS's place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

import smtrain
import smtrain.aws.calls
from smtrain.aws.local_plane import ensure_running
from smtrain.cli import main
from smtrain.config import Stage
from smtrain.edge import sentence
from smtrain.facts.images import serves
from smtrain.iam import policies
from tests.docs.pages import ROOT, blocks
from tests.docs.test_pages import as_aws

PAGE = ROOT / "docs/first-run-aws.md"
STAGES: tuple[Stage, ...] = ("fetch", "prepare", "convert", "train", "export", "generate")


def typed(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", line.split())
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def test_the_pages_config_is_checked_and_every_stage_of_it_is_a_request(
    local_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    for key, value in {**as_aws(), "SMTRAIN_TARGET": "aws"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    (init,) = re.findall(r"^\$ (smtrain init .*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert typed(init, monkeypatch) == 0
    told = yaml.safe_load(Path("run.yaml").read_text("utf-8"))
    (written,) = [yaml.safe_load(block.text) for block in blocks(PAGE) if block.tag == "yaml"]
    for section, values in written.items():
        told[section] = {**told.get(section, {}), **values}
    s3, iam = boto3.client("s3"), boto3.client("iam")
    s3.create_bucket(Bucket="my-bucket")
    s3.put_object(Bucket="my-bucket", Key="text/a.jsonl", Body=b'{"text": "a"}\n')
    made = policies(told, target="aws")
    iam.create_role(RoleName="smtrain-training", AssumeRolePolicyDocument=json.dumps(made["trust"]))
    iam.put_role_policy(RoleName="smtrain-training", PolicyName="smtrain", PolicyDocument=json.dumps(made["role"]))
    told["compute"]["role"] = "smtrain-training"

    report = smtrain.check(told, target="aws")
    # AWS's registry of images and its simulator of policies are not here; that is said, and nothing else is wrong.
    assert [f.text.partition(" in ")[0] for f in report.faults] == ["there is no repository pytorch-training-neuronx"]
    unknown = {f.check: f.text for f in report.warnings if "could not be checked" in f.text}
    assert unknown == {
        "permissions": "could not be checked: iam:SimulatePrincipalPolicy was answered with NotImplemented"
    }
    for stage in STAGES:
        sent = smtrain.request(told, stage=stage, target="aws")
        machine = sent["ResourceConfig"]["InstanceType"]
        assert (machine == "ml.trn1.32xlarge") == (stage == "train"), (stage, machine)
        assert serves(sent["AlgorithmSpecification"]["TrainingImage"], "nxd")
        assert sent["RoleArn"].endswith(":role/smtrain-training")


def test_what_the_control_plane_lacks_is_answered_as_aws_answers(local_home: Path) -> None:
    session = ensure_running().session()
    with pytest.raises(ClientError) as in_xml:
        session.client("iam").get_service_last_accessed_details(JobId="a" * 36)
    with pytest.raises(ClientError) as in_json:
        session.client("logs").list_anomalies()
    for caught in (in_xml, in_json):
        assert caught.value.response["Error"]["Code"] == "NotImplemented"
        assert "smtrain's local control plane does not have it" in str(caught.value)


def test_a_page_in_place_of_aws_is_one_sentence() -> None:
    told = sentence(ResponseParserError("Unable to parse response (syntax error: line 1, column 0)"))
    assert told == "what answered is not AWS, but a page; check the proxy, and AWS_ENDPOINT_URL if it is set"
