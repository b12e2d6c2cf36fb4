"""The backend of a call, or of a job's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smtrain.client.backends.choose import backend_by_name, backend_of_job, sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.slurm.backend import SlurmBackend
from smtrain.client.backends.slurm.registry import REGISTRY
from smtrain.core.config.cluster import Cluster
from smtrain.core.errors import ConfigError, JobError
from tests.typed import typed


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    for name in ("SMTRAIN_CLUSTER", "SMTRAIN_TARGET"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_that_was_submitted_from_here_is_found_by_its_name() -> None:
    REGISTRY.remember(Cluster(host="me@head", shared="/fsx/a"), "a-train-00000001")
    REGISTRY.remember(Cluster(shared="/fsx/b"), "b-train-00000002")
    assert backend_of_job("a-train-00000001") == (
        "a-train-00000001",
        SlurmBackend(Cluster(host="me@head", shared="/fsx/a")),
    )
    # Without a job's name, the cluster used last.
    assert backend_by_name("slurm") == SlurmBackend(Cluster(shared="/fsx/b"))
    assert isinstance(backend_of_job("a-train-00000001", "local")[1], SageMakerBackend)


def test_a_cluster_can_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_CLUSTER", "me@head:/fsx/smtrain")
    assert backend_by_name("slurm") == SlurmBackend(Cluster(host="me@head", shared="/fsx/smtrain"))
    monkeypatch.setenv("SMTRAIN_CLUSTER", "/fsx/smtrain")
    assert backend_by_name("slurm") == SlurmBackend(Cluster(shared="/fsx/smtrain"))
    monkeypatch.setenv("SMTRAIN_CLUSTER", "head")
    with pytest.raises(
        ConfigError, match=r"SMTRAIN_CLUSTER is 'head'; it must look like me@head:/fsx/smtrain"
    ):
        backend_by_name("slurm")


def test_without_a_cluster_one_is_told_how_to_name_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no Slurm cluster is known here; .* SMTRAIN_CLUSTER=me@head:/fsx/smtrain",
    ):
        backend_by_name("slurm")


def test_a_wrong_word_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_TARGET", "slrum")
    with pytest.raises(
        ConfigError,
        match=r"SMTRAIN_TARGET is 'slrum'; did you mean slurm\? known: local, aws, slurm",
    ):
        backend_of_job("a-train-00000001")
    with pytest.raises(ConfigError, match=r"^target: got 'moon'; known: local, aws, slurm"):
        backend_of_job("a-train-00000001", "moon")  # type: ignore[arg-type]


def test_without_a_word_or_credentials_a_job_is_here_if_it_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert backend_of_job("a-train-00000001")[1].name == "local"
    monkeypatch.setattr("smtrain.client.backends.choose.present", lambda package: package != "moto")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert backend_of_job("a-train-00000001")[1].name == "aws"


def test_what_is_sagemakers_alone_says_so() -> None:
    with pytest.raises(ConfigError, match="slurm has no SageMaker API"):
        sagemaker(SlurmBackend(Cluster(shared="/fsx/b")))
    target = SageMakerBackend("local")
    assert sagemaker(target) is target


@pytest.fixture
def nothing_to_ask(nothing_known: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without smtrain's extra local and without AWS credentials."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("smtrain.client.backends.choose.present", lambda module: module != "moto")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


BY_NAME = [
    "chat nope",
    "generate nope --prompt x",
    "serve nope",
    "evaluate nope --tasks mmlu",
    "report nope",
    "compare nope other",
    "tensorboard nope --out to",
    "status nope",
    "logs nope",
    "stop nope",
    "download nope to",
    "push nope me/x",
    "deploy nope --instance ml.g6e.xlarge",
    "register nope --instance ml.g6e.xlarge",
]


@pytest.mark.parametrize("call", BY_NAME)
def test_a_name_that_nothing_can_be_asked_about_is_told_what_is_needed(
    nothing_to_ask: None, call: str
) -> None:
    done = typed(*call.split())
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("smtrain: nope: no run or job of this name is known on this machine; ")
    assert "jobs here need smtrain's extra local (`pip install" in line
    assert "jobs on AWS need credentials and a region" in line
    assert "compute.region" not in line


def test_credentials_without_a_region_are_not_enough(
    nothing_to_ask: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    with pytest.raises(JobError, match="jobs on AWS need credentials and a region"):
        backend_of_job("nope")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert backend_of_job("nope")[1].name == "aws"
