"""Rank 0's view of its checkpoint prefix: the owner, and the checkpoints that have arrived."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from smtrain.core.protocol import owner as ownership
from smtrain.core.protocol.checkpoints import sizes_in
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.lineage import Lineage
from smtrain.core.protocol.owner import Fence, Owner, OwnerError, owner_uri
from smtrain.worker.checkpoint import manifest
from smtrain.worker.train.destination import VARIABLE, Destination
from tests import as_told
from tests.worker.checkpoint.folders import LLAMA
from tests.worker.checkpoint.test_open import native

JOB = "run-train-aaaaaaaa"


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    monkeypatch.setenv("TRAINING_JOB_NAME", JOB)
    monkeypatch.setenv(
        "TRAINING_JOB_ARN", f"arn:aws:sagemaker:us-east-1:000000000000:training-job/{JOB}"
    )
    return Container(tmp_path, ("algo-1",), "algo-1")


@pytest.fixture
def uri(local_home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix on the local control plane, with a container's way to it."""
    as_told.tell(monkeypatch)
    uri = f"s3://smtrain-local/destination/{time.time_ns()}/checkpoints/"
    monkeypatch.setenv(VARIABLE, uri)
    return uri


def line_of(container: Container, *steps: int) -> Lineage:
    line = Lineage.of(container.checkpoint_dir, JOB).after_resume(None)
    line.record()
    for step in steps:
        native(line.job_folder, LLAMA, step)
    return line


def upload(uri: str, line: Lineage, name: str) -> None:
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    SageMakerBackend("local").s3.upload_file(str(line.root / name), bucket, prefix + name)


def test_a_checkpoint_has_arrived_when_its_manifest_and_all_files_have(
    container: Container, uri: str
) -> None:
    line = line_of(container, 2, 4)
    destination, newest = Destination(container, line, print), line.checkpoints()[-1][1]
    name = line.name(newest)
    files = sorted(sizes_in(newest))
    for file in ["manifest.json", *(file for file in files if file != "manifest.json")]:
        assert not destination.has_arrived(newest), f"before {file}"
        upload(uri, line, f"{name}/{file}")
    assert destination.has_arrived(newest)
    assert not destination.has_arrived(line.checkpoints()[0][1])
    destination.wait(0)
    destination.close()


def test_an_older_save_of_the_same_step_has_not_arrived_for_the_new_one(
    container: Container, uri: str
) -> None:
    line = line_of(container, 2)
    path = line.checkpoints()[0][1]
    for file in sizes_in(path):
        upload(uri, line, f"{line.name(path)}/{file}")
    text = (path / manifest.NAME).read_text()
    (path / manifest.NAME).write_text(text.replace('"optimizer_steps": 2', '"optimizer_steps": 3'))
    destination = Destination(container, line, print)
    assert not destination.has_arrived(path)
    destination.close()


def test_a_job_that_has_lost_the_checkpoints_ends_before_its_next_manifest(
    container: Container, uri: str
) -> None:
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend

    destination = Destination(container, line_of(container), print)
    destination.require_owner()
    mine = Owner(JOB, "us-east-1", "000000000000")
    other = Owner("run-train-bbbbbbbb", "us-east-1", "000000000000")
    with pytest.raises(OwnerError, match=f"^{JOB} took"):
        Fence(SageMakerBackend("local").s3, uri, other, lambda *_: None).claim()
    Fence(SageMakerBackend("local").s3, uri, mine, lambda *_: None).claim()
    Fence(SageMakerBackend("local").s3, uri, other, lambda *_: "Failed").claim()
    with pytest.raises(OwnerError, match=r"^run-train-bbbbbbbb is writing checkpoints of this run"):
        destination.require_owner()
    destination.close()
    with pytest.raises(OwnerError, match=r"^run-train-bbbbbbbb took the run's checkpoints"):
        Destination(container, line_of(container), print)


def test_without_access_to_s3_training_continues_and_keeps_one_more_checkpoint(
    container: Container, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said: list[str] = []
    line = line_of(container, 2, 4)
    destination = Destination(container, line, said.append)
    assert len(said) == 1
    assert "cannot be asked for from here" in said[0]
    assert "a folder of its name" in said[0]
    destination.require_owner()
    assert [destination.has_arrived(path) for _, path in line.checkpoints()] == [True, False]
    destination.wait(60)


def test_an_isolated_job_asks_no_one_and_a_shell_keeps_what_its_disk_holds(
    container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = line_of(container, 2, 4)
    isolated = Destination(container, line, print)
    assert [isolated.has_arrived(path) for _, path in line.checkpoints()] == [True, False]
    monkeypatch.delenv("TRAINING_JOB_NAME")
    monkeypatch.setenv(VARIABLE, "s3://not/asked/")
    shell = Destination(container, line, print)
    assert all(shell.has_arrived(path) for _, path in line.checkpoints())


def test_unfinished_checkpoints_of_another_job_are_spared_without_an_owner_to_ask(
    container: Container, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Lineage.of(container.checkpoint_dir, "run-train-bbbbbbbb").after_resume(None)
    other.record()
    for step in (2, 4, 6):
        native(other.job_folder, LLAMA, step)
    (other.job_folder / "step_00000006" / manifest.NAME).unlink()  # it came before its manifest did
    line = Lineage.of(container.checkpoint_dir, JOB).after_resume(4)
    line.record()
    native(line.job_folder, LLAMA, 8)
    (line.job_folder / "step_00000008" / manifest.NAME).unlink()
    destination = Destination(container, line, print)
    assert destination.unfinished_checkpoints == set(), (
        "the other does not write: this job owns the checkpoints"
    )
    destination.close()
    monkeypatch.delenv(VARIABLE)
    assert Destination(container, line, print).unfinished_checkpoints == {
        "run-train-bbbbbbbb/step_00000006"
    }


def test_the_record_is_next_to_the_prefix(uri: str) -> None:
    assert owner_uri(uri) == uri.rstrip("/") + ".owner.json"
    assert ownership.RENEWAL_SECONDS * 3 < ownership.LEASE
