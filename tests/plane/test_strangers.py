"""Requests of other tools, in containers: they run unchanged, with the programs of their image.

    SMTRAIN_TOOLKIT_PACKAGES=FOLDER pytest tests/plane/test_strangers.py

runs the real toolkit too, from a folder that `pip install --no-deps --target FOLDER
sagemaker-training sagemaker-pytorch-training retrying inotify_simple gevent greenlet zope.event
zope.interface paramiko bcrypt pynacl invoke psutil scipy cryptography cffi werkzeug protobuf` has
filled.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smtrain.plane.docker import connect
from testing.plane import Plane
from tests import as_told, docker

from .conftest import Client, channel

pytestmark = pytest.mark.docker
PACKAGES = os.environ.get("SMTRAIN_TOOLKIT_PACKAGES", "")

TRAIN = """#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
config = Path("/opt/ml/input/config")
numbers = json.loads((config / "hyperparameters.json").read_text())
here = json.loads((config / "resourceconfig.json").read_text())["current_host"]
data = Path("/opt/ml/input/data/train/a").read_text()
Path("/opt/ml/model", here).write_text(data)
print("I am", *map(os.path.basename, sys.argv), "with", numbers["lr"], "loss=0.25;")
"""


@pytest.fixture
def image_with() -> Iterator[Callable[..., str]]:
    """Make test images with more files; they are removed after the test."""
    made: list[str] = []
    client = connect()

    def make(name: str, files: dict[str, str | Path], changes: list[str]) -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for path, content in files.items():
                if isinstance(content, Path):
                    tar.add(content, arcname=path)
                    continue
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(content), 0o755
                tar.addfile(entry, io.BytesIO(content.encode()))
        container = client.containers.create(docker.IMAGE, ["true"])
        try:
            container.put_archive("/", packed.getvalue())
            container.commit(name, "1", changes=changes)
        finally:
            container.remove(force=True)
        made.append(f"{name}:1")
        return made[-1]

    yield make
    for name in made:
        client.images.remove(name, force=True)


@pytest.fixture
def plane_of(start_server: Any) -> Callable[[str], Client]:
    """A control plane whose jobs all run in containers of an image."""

    def make(image: str) -> Client:
        endpoint = start_server()
        Plane(endpoint).hosts(run_in="docker", image=image)
        return Client(endpoint)

    return make


def path_with(folder: str) -> str:
    variables = connect().images.get(docker.IMAGE).attrs["Config"]["Env"]
    path = next(item.partition("=")[2] for item in variables if item.startswith("PATH="))
    return f"ENV PATH={folder}:{path}"


def without_entrypoint(client: Client, **changes: Any) -> dict[str, Any]:
    request = client.request("true", **changes)
    for key in ("ContainerEntrypoint", "ContainerArguments"):
        del request["AlgorithmSpecification"][key]
    return request


def test_an_image_of_ones_own_is_run_as_image_train(
    plane_of: Callable[[str], Client], image_with: Callable[..., str]
) -> None:
    """SDK v2's plain `Estimator(image_uri=...).fit()`: two hosts, a channel, a hyperparameter, a
    metric, a model.
    """
    # Below /opt/ml, as AWS's pages lay it; what the service mounts there hides what the image has.
    files = {
        "opt/ml/code/train": TRAIN,
        "opt/ml/model/hidden": "",
        "opt/ml/input/data/train/a": "the image's",
    }
    client = plane_of(image_with("smtrain-test-own", files, [path_with("/opt/ml/code")]))
    request = without_entrypoint(
        client,
        hosts=2,
        HyperParameters={"lr": "0.1"},
        InputDataConfig=[channel("train", client.put("own/a", "data"), "FastFile")],
        algorithm={"MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+);"}]},
    )
    client.sagemaker.create_training_job(**request)
    job = client.wait(request["TrainingJobName"])
    assert job["TrainingJobStatus"] == "Completed", client.lines(job)
    assert client.lines(job, "algo-2") == ["I am train with 0.1 loss=0.25;"]
    assert [(m["MetricName"], m["Value"]) for m in job["FinalMetricDataList"]] == [("loss", 0.25)]
    packed = client.get(f"out/{job['TrainingJobName']}/output/model.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert sorted(archive.getnames()) == ["algo-1", "algo-2"]


SCRIPT = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--lr")
options = parser.parse_args()
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
open(os.environ["SM_MODEL_DIR"] + f"/rank-{dist.get_rank()}", "w").write(str(total.item()))
data = open(os.environ["SM_CHANNEL_TRAIN"] + "/a").read()
env = os.environ
words = ["rank", env["RANK"], "of", env["WORLD_SIZE"], "on", env["SM_CURRENT_HOST"], options.lr, data]
os.write(1, (" ".join(words) + "\\n").encode())  # the toolkit's log splits what is written in pieces
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not PACKAGES, reason="SMTRAIN_TOOLKIT_PACKAGES names no folder with the real toolkit"
)
def test_the_real_toolkit_in_an_image_trains_on_two_hosts(
    plane_of: Callable[[str], Client], image_with: Callable[..., str]
) -> None:
    """The request of `PyTorch(..., distribution={"torch_distributed": {"enabled": True}}).fit()` of
    SDK v2.
    """
    changes = [
        path_with("/opt/toolkit/bin"),
        "ENV PYTHONPATH=/opt/toolkit",
        "ENV SAGEMAKER_TRAINING_MODULE=sagemaker_pytorch_container.training:main",
    ]
    client = plane_of(image_with("smtrain-test-toolkit", {"opt/toolkit": Path(PACKAGES)}, changes))
    source = client.put_source("toolkit", SCRIPT)
    request = without_entrypoint(
        client,
        hosts=2,
        InputDataConfig=[channel("train", client.put("toolkit/data/a", "data"), "FastFile")],
        HyperParameters={
            "lr": "0.1",
            "sagemaker_submit_directory": f'"{source}"',
            "sagemaker_program": '"train.py"',
            "sagemaker_container_log_level": "20",
            "sagemaker_region": '"us-east-1"',
            "sagemaker_job_name": '"job"',
            "sagemaker_torch_distributed_enabled": "true",
            "sagemaker_instance_type": '"ml.trn1.32xlarge"',
        },
    )
    request["ResourceConfig"]["InstanceType"] = "ml.trn1.32xlarge"
    client.sagemaker.create_training_job(**request)
    job = client.wait(request["TrainingJobName"])
    lines = [line for host in ("algo-1", "algo-2") for line in client.lines(job, host)]
    assert job["TrainingJobStatus"] == "Completed", "\n".join(lines)
    ranks = {line for line in lines if line.startswith("rank")}
    assert ranks == {"rank 0 of 2 on algo-1 0.1 data", "rank 1 of 2 on algo-2 0.1 data"}
    with tarfile.open(
        fileobj=io.BytesIO(client.get(f"out/{job['TrainingJobName']}/output/model.tar.gz"))
    ) as archive:
        assert sorted(archive.getnames()) == ["rank-0", "rank-1"]


V3_SCRIPT = """
import json, os
from pathlib import Path
words = [os.environ["SM_CURRENT_HOST"], os.environ["SM_HP_LR"], Path(os.environ["SM_CHANNEL_TRAIN"], "a").read_text()]
Path(os.environ["SM_MODEL_DIR"], words[0]).touch()
print("I am " + " ".join(words), flush=True)
"""


# The SDK leaves a temporary folder to the collector.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_model_trainer_of_sdk_v3_trains_on_two_hosts(
    plane_of: Callable[[str], Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ModelTrainer(source_code=..., compute=...).train()`: the SDK's own drivers, with the Python
    of the image.
    """
    pytest.importorskip("sagemaker.train")
    client = plane_of(docker.IMAGE)
    as_told.tell(monkeypatch, client.endpoint)
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.training.configs import Compute, InputData, OutputDataConfig, SourceCode
    from sagemaker.train import ModelTrainer

    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(V3_SCRIPT)
    uri = client.put("v3/a", "data")
    trainer = ModelTrainer(
        training_image="nobody-has:this",
        role=client.endpoint.role,
        sagemaker_session=Session(),
        base_job_name="v3",
        source_code=SourceCode(source_dir=str(folder), entry_script="train.py"),
        compute=Compute(instance_type="ml.m5.large", instance_count=2),
        hyperparameters={"lr": "0.1"},
        output_data_config=OutputDataConfig(s3_output_path=f"s3://{client.bucket}/out"),
    )
    trainer.train(
        input_data_config=[InputData(channel_name="train", data_source=uri)], wait=False, logs=False
    )
    name = trainer._latest_training_job.training_job_name
    job = client.wait(name)
    for host in ("algo-1", "algo-2"):
        lines = client.lines(name, host)
        assert job["TrainingJobStatus"] == "Completed", "\n".join(lines)
        assert f"I am {host} 0.1 data" in lines
