"""Which place a call or a job's name means."""

from __future__ import annotations

from pathlib import Path

import pytest

from smtrain.aws.target import Target
from smtrain.config.cluster import Cluster
from smtrain.errors import ConfigError
from smtrain.place.choose import named, place_of, sagemaker
from smtrain.slurm.known import remember
from smtrain.slurm.place import SlurmPlace


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path / "home"))
    for name in ("SMTRAIN_CLUSTER", "SMTRAIN_TARGET"):
        monkeypatch.delenv(name, raising=False)


def test_a_job_that_was_submitted_from_here_is_found_by_its_name() -> None:
    remember(Cluster(host="me@head", shared="/fsx/a"), "a-train-00000001")
    remember(Cluster(shared="/fsx/b"), "b-train-00000002")
    assert place_of("a-train-00000001") == ("a-train-00000001", SlurmPlace(Cluster(host="me@head", shared="/fsx/a")))
    # Of clusters the one used last, where no job says which.
    assert named("slurm") == SlurmPlace(Cluster(shared="/fsx/b"))
    assert isinstance(place_of("a-train-00000001", "local")[1], Target)


def test_a_cluster_can_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_CLUSTER", "me@head:/fsx/smtrain")
    assert named("slurm") == SlurmPlace(Cluster(host="me@head", shared="/fsx/smtrain"))
    monkeypatch.setenv("SMTRAIN_CLUSTER", "/fsx/smtrain")
    assert named("slurm") == SlurmPlace(Cluster(shared="/fsx/smtrain"))
    monkeypatch.setenv("SMTRAIN_CLUSTER", "head")
    with pytest.raises(ConfigError, match=r"SMTRAIN_CLUSTER is 'head'; it must look like me@head:/fsx/smtrain"):
        named("slurm")


def test_without_a_cluster_one_is_told_how_to_name_it() -> None:
    with pytest.raises(ConfigError, match=r"no Slurm cluster is known here; .* SMTRAIN_CLUSTER=me@head:/fsx/smtrain"):
        named("slurm")


def test_a_wrong_word_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMTRAIN_TARGET", "slrum")
    with pytest.raises(ConfigError, match=r"SMTRAIN_TARGET is 'slrum'; it must be local, aws or slurm"):
        place_of("a-train-00000001")


def test_without_a_word_or_credentials_a_job_is_here_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert place_of("a-train-00000001")[1].name == "local"
    monkeypatch.setattr("smtrain.aws.attach.present", lambda package: package != "moto")
    assert place_of("a-train-00000001")[1].name == "aws", "who has installed no control plane has jobs on AWS alone"


def test_what_is_sagemakers_alone_says_so() -> None:
    with pytest.raises(ConfigError, match="slurm has no SageMaker API"):
        sagemaker(SlurmPlace(Cluster(shared="/fsx/b")))
    target = Target("local")
    assert sagemaker(target) is target
