"""Resolve the backend of a job that was only named."""

from __future__ import annotations

from pathlib import Path

import pytest

import smtrain
from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend

AWS = {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "B", "AWS_DEFAULT_REGION": "us-west-2"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SMTRAIN_TARGET", "AWS_PROFILE", *AWS):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    return tmp_path


def test_a_job_kept_here_is_local_any_other_is_on_aws(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        smtrain.Job("mine").target.name == "local"
    )  # there are no credentials to look elsewhere with
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    assert smtrain.Job("mine").target.name == "aws"
    (home / "local/jobs/mine").mkdir(parents=True)
    assert smtrain.Job("mine").target.name == "local"
    assert smtrain.Job("mine", "aws").target.name == "aws"
    monkeypatch.setenv("SMTRAIN_TARGET", "aws")
    assert smtrain.Job("mine").target.name == "aws"
    assert smtrain.Job("mine", SageMakerBackend("local")).target.name == "local"
    assert not (home / "local/endpoint.json").exists()
    monkeypatch.setenv("SMTRAIN_TARGET", "moon")
    with pytest.raises(smtrain.ConfigError, match="SMTRAIN_TARGET is 'moon'"):
        smtrain.Job("mine")


def test_an_arn_names_the_region_too(home: Path) -> None:
    job = smtrain.Job("arn:aws:sagemaker:eu-north-1:999988887777:training-job/llama-train-1a2b")
    assert (job.name, job.target.name, sagemaker(job.target).region) == (
        "llama-train-1a2b",
        "aws",
        "eu-north-1",
    )
    here = smtrain.Job("arn:aws:sagemaker:us-east-1:123456789012:training-job/x")
    assert here.target.name == "local"
