"""Requests without an entrypoint, as of SDK v2: the toolkit's `train` runs as in the images, or
they are refused.

    SMTRAIN_TOOLKIT=VENV pytest tests/plane/test_toolkit.py

runs the real toolkits of an environment that has sagemaker-training, sagemaker-pytorch-training and
torch.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from .conftest import Client

TOOLKIT = os.environ.get("SMTRAIN_TOOLKIT", "")


def sdk_request(
    client: Client, folder: Path, hosts: int = 1, **hyperparameters: str
) -> dict[str, Any]:
    """A request without an entrypoint, with a folder on its PATH."""
    path = f"{folder}:/usr/local/bin:/usr/bin:/bin"
    request = client.request(
        "true", hosts=hosts, Environment={"PATH": path}, HyperParameters=hyperparameters
    )
    for key in ("ContainerEntrypoint", "ContainerArguments"):
        del request["AlgorithmSpecification"][key]
    return request


def run(client: Client, request: dict[str, Any]) -> dict[str, Any]:
    client.sagemaker.create_training_job(**request)
    return client.wait(request["TrainingJobName"])


def installed(folder: Path, *modules: str) -> Path:
    """A `train` like the toolkit's console script, in a Python that has these modules; it prints
    its input.
    """
    for module in modules:
        (folder / "modules" / module).mkdir(parents=True)
        (folder / "modules" / module / "__init__.py").touch()
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/modules exec {sys.executable} "$@"\n')
    train = folder / "train"
    train.write_text(
        f"#!{python}\nimport os; print('module', os.environ.get('SAGEMAKER_TRAINING_MODULE'))\n"
    )
    for script in (python, train):
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def test_no_entrypoint_and_no_toolkit(client: Client, tmp_path: Path) -> None:
    job = run(client, sdk_request(client, tmp_path))
    assert job["TrainingJobStatus"] == "Failed"
    assert "ContainerEntrypoint" in job["FailureReason"]
    assert f"on the job's PATH ({tmp_path}:" in job["FailureReason"]


def test_the_toolkit_is_found_on_the_jobs_path(client: Client, tmp_path: Path) -> None:
    """Its framework is that of the images."""
    job = run(client, sdk_request(client, installed(tmp_path, "sagemaker_pytorch_container")))
    assert job["TrainingJobStatus"] == "Completed"
    assert client.lines(job) == ["module sagemaker_pytorch_container.training:main"]
    request = sdk_request(client, tmp_path)
    request["Environment"]["SAGEMAKER_TRAINING_MODULE"] = "mine:main"
    assert client.lines(run(client, request)) == ["module mine:main"]


def test_a_script_that_would_run_without_ranks_is_refused(client: Client, tmp_path: Path) -> None:
    """The toolkit without torch would train on each host separately and end as Completed."""
    folder = installed(tmp_path)
    job = run(
        client, sdk_request(client, folder, hosts=2, sagemaker_torch_distributed_enabled="true")
    )
    assert job["TrainingJobStatus"] == "Failed"
    assert job["FailureReason"].startswith(
        "ClientError: the request asks for sagemaker_torch_distributed_enabled"
    )
    assert "install sagemaker-pytorch-training next to it" in job["FailureReason"]
    assert (
        run(client, sdk_request(client, folder, sagemaker_program="a"))["TrainingJobStatus"]
        == "Completed"
    )


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
open(os.environ["SM_MODEL_DIR"] + f"/rank-{dist.get_rank()}", "w").write(str(total.item()))
# In one write: two ranks share the pipe, and Python is unbuffered here.
rank, size, host = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "SM_CURRENT_HOST"))
print(f"rank {rank} of {size} on {host}\\n", end="", flush=True)
"""


@pytest.mark.skipif(
    not TOOLKIT, reason="SMTRAIN_TOOLKIT names no environment with the real toolkits"
)
def test_the_real_toolkits_run_a_notebooks_job_distributed(client: Client) -> None:
    """The request of `PyTorch(..., distribution={"torch_distributed": {"enabled": True}}).fit()` of
    SDK v2.
    """
    source = client.put_source("toolkit", SCRIPT)
    request = sdk_request(
        client,
        Path(TOOLKIT) / "bin",
        hosts=2,
        sagemaker_submit_directory=f'"{source}"',
        sagemaker_program='"train.py"',
        sagemaker_container_log_level="20",
        sagemaker_region='"us-east-1"',
        sagemaker_job_name='"job"',
        sagemaker_torch_distributed_enabled="true",
        sagemaker_instance_type='"ml.trn1.32xlarge"',
    )
    request["ResourceConfig"]["InstanceType"] = "ml.trn1.32xlarge"
    request["Environment"]["GLOO_SOCKET_IFNAME"] = "lo"
    job = run(client, request)
    lines = [line for host in ("algo-1", "algo-2") for line in client.lines(job, host)]
    assert job["TrainingJobStatus"] == "Completed", "\n".join(lines)
    assert {line for line in lines if line.startswith("rank")} == {
        "rank 0 of 2 on algo-1",
        "rank 1 of 2 on algo-2",
    }
    with tarfile.open(
        fileobj=io.BytesIO(client.get(f"out/{job['TrainingJobName']}/output/model.tar.gz"))
    ) as archive:
        assert sorted(archive.getnames()) == ["rank-0", "rank-1"]
