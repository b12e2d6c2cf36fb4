"""SageMaker's defaults file fills in what the config leaves open, for every way to send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.defaults import with_defaults
from tests.client.sdk.wire import SDK, Stopped, Wire, canonical, sent, start, target_with

ROLE = "arn:aws:iam::999999999999:role/from-the-file"
ADMIN: dict[str, Any] = {
    "TrainingJob": {
        "RoleArn": "arn:aws:iam::999999999999:role/administrators",
        "VpcConfig": {"Subnets": ["subnet-file"], "SecurityGroupIds": ["sg-file"]},
        "EnableNetworkIsolation": True,
        "EnableInterContainerTrafficEncryption": True,
        "OutputDataConfig": {"KmsKeyId": "key-of-results"},
        "ResourceConfig": {"VolumeKmsKeyId": "key-of-volumes"},
        "Environment": {"FROM_FILE": "1", "BOTH": "file"},
        "Tags": [{"Key": "team", "Value": "file"}, {"Key": "cost", "Value": "42"}],
    },
    "PythonSDK": {
        "Modules": {
            "Session": {"DefaultS3Bucket": "files-bucket", "DefaultS3ObjectKeyPrefix": "some/where"}
        }
    },
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator's file, and a user's that replaces the role."""
    for name, content in (("admin", ADMIN), ("user", {"TrainingJob": {"RoleArn": ROLE}})):
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"SchemaVersion": "1.0", "SageMaker": content}))
        monkeypatch.setenv(f"SAGEMAKER_{name.upper()}_CONFIG_OVERRIDE", str(file))


@pytest.fixture
def open_(plain: dict[str, Any]) -> dict[str, Any]:
    """A config that leaves everything to the file."""
    compute = {key: value for key, value in plain["compute"].items() if key != "role"}
    return {**{key: value for key, value in plain.items() if key != "output"}, "compute": compute}


@pytest.mark.usefixtures("files")
def test_what_the_config_leaves_open_comes_from_the_file(open_: dict[str, Any]) -> None:
    made = smtrain.request(open_)
    assert made["RoleArn"] == ROLE
    assert made["VpcConfig"] == ADMIN["TrainingJob"]["VpcConfig"]
    assert made["EnableNetworkIsolation"] is made["EnableInterContainerTrafficEncryption"] is True
    assert made["OutputDataConfig"]["KmsKeyId"] == "key-of-results"
    assert made["OutputDataConfig"]["S3OutputPath"].startswith(
        "s3://files-bucket/some/where/smtrain/"
    )
    assert made["Environment"]["FROM_FILE"] == "1"
    assert {"Key": "cost", "Value": "42"} in made["Tags"]
    assert "VolumeKmsKeyId" not in made["ResourceConfig"], "trn1 hosts have their own disks"
    assert (
        smtrain.request(open_, stage="prepare")["ResourceConfig"]["VolumeKmsKeyId"]
        == "key-of-volumes"
    )


@pytest.mark.parametrize(
    "section",
    [
        {"Environment": {"HF_TOKEN": "correct horse"}},
        {"Tags": [{"Key": "note", "Value": "hf_" + "aBcDeF" * 6}]},
    ],
)
def test_a_secret_in_the_file_is_refused_and_not_repeated(
    plain: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: dict[str, Any]
) -> None:
    (tmp_path / "user.yaml").write_text(yaml.safe_dump({"SageMaker": {"TrainingJob": section}}))
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "user.yaml"))
    with pytest.raises(
        smtrain.ConfigError, match=r"SageMaker's defaults file, .*looks like a secret"
    ) as caught:
        smtrain.request(plain)
    assert "correct horse" not in str(caught.value)
    assert "aBcDeF" not in str(caught.value)


@pytest.mark.usefixtures("files")
def test_what_the_config_says_wins(full: dict[str, Any]) -> None:
    raw = {
        **full,
        "network": {
            **full["network"],
            "isolation": False,
            "encrypt_inter_container_traffic": False,
        },
        "compute": {**full["compute"], "environment": {"BOTH": "config"}},
    }
    made = smtrain.request(raw)
    assert made["RoleArn"] == full["compute"]["role"]
    assert made["VpcConfig"]["Subnets"] == ["subnet-1", "subnet-2"]
    assert "EnableNetworkIsolation" not in made
    assert "EnableInterContainerTrafficEncryption" not in made
    assert made["Environment"]["BOTH"] == "config"
    assert {"Key": "team", "Value": "llm"} in made["Tags"]
    assert {"Key": "team", "Value": "file"} not in made["Tags"]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("stage", ["train", "prepare"])
def test_the_sdk_adds_nothing_of_the_file_on_its_own(
    open_: dict[str, Any], full: dict[str, Any], stage: Any
) -> None:
    for raw in (open_, full, {**full, "network": {"isolation": False}}):
        wanted = smtrain.request(raw, stage=stage)
        assert canonical(sent(wanted).bodies[0]) == canonical(wanted)


@pytest.mark.usefixtures("files")
def test_a_local_job_takes_nothing_from_the_file(open_: dict[str, Any]) -> None:
    from smtrain.client.sdk import build

    wanted = smtrain.request(open_, target="local")
    assert "VpcConfig" not in wanted
    assert wanted["RoleArn"] != ROLE
    wire = Wire()
    assert SDK
    with pytest.raises(Stopped):
        start(build(SDK, target_with(wire), wanted))
    assert canonical(wire.bodies[0]) == canonical(wanted)


def test_files_that_cannot_be_used_are_named(
    open_: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(
        smtrain.ConfigError, match=r"nowhere.yaml: SageMaker's defaults file cannot be read"
    ):
        smtrain.request(open_)
    (tmp_path / "text.yaml").write_text("just text")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(tmp_path / "text.yaml"))
    with pytest.raises(smtrain.ConfigError, match=r"is not a SageMaker defaults file"):
        smtrain.request(open_)


def test_no_files_change_nothing(plain: dict[str, Any]) -> None:
    config = smtrain.load_config(plain)
    assert with_defaults(config, {}) == config
    assert SageMakerBackend("aws").name == "aws"
