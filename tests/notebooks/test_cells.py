"""Cells of a real kernel: a panel is shown once, and interrupting the kernel ends with one
sentence.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import smtrain
from smtrain.core.demo.inputs import save_tokenizer
from smtrain.plane.client import ensure_running
from tests.conftest import LLAMA


@pytest.fixture
def kernel(local_home: Path, tmp_path: Path) -> Iterator[Any]:
    """Runs cells in one kernel; `kernel.pid` is its process."""
    client: Any = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=300,
        startup_timeout=300,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    with client.setup_kernel(env=environment):

        def run(source: str) -> list[Any]:
            cell = nbformat.v4.new_code_cell(source)
            client.nb.cells.append(cell)
            client.execute_cell(cell, len(client.nb.cells) - 1)
            return list(cell.outputs)

        run(f"import os, smtrain; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))")
        run.pid = int((tmp_path / "pid").read_text())  # type: ignore[attr-defined]
        yield run


def shown(outputs: list[Any]) -> list[str]:
    return [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def test_a_job_that_was_followed_in_a_cell_is_shown_once(kernel: Any) -> None:
    endpoint, name = ensure_running(), f"in-a-cell-{time.time_ns()}"
    endpoint.session().client("sagemaker").create_training_job(
        TrainingJobName=name,
        RoleArn=endpoint.role,
        AlgorithmSpecification={
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash"],
            "ContainerArguments": ["-c", "echo hello"],
        },
        OutputDataConfig={"S3OutputPath": f"s3://{endpoint.bucket}/out"},
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 600},
    )
    last = kernel(f"job = smtrain.Job({name!r}, 'local')\njob.follow()")
    assert [output.output_type for output in last if output.output_type != "stream"] == [
        "display_data"
    ]
    assert name in shown(last)[0]
    (again,) = kernel("job")
    assert again.output_type == "execute_result"
    assert name in again.data["text/html"]
    assert name in again.data["text/plain"]


def test_interrupting_the_kernel_in_a_run_ends_in_a_sentence(kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model/model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    save_tokenizer(
        ["hello world, this is text"] * 20, tmp_path / "model", vocabulary=300, end="<end>"
    )
    (tmp_path / "text.jsonl").write_text('{"text": "hello world, this is text"}\n' * 200_000)
    name = f"in-a-kernel-{time.time_ns()}"
    config = {
        "name": name,
        "target": "local",
        "model": {"path": str(tmp_path / "model")},
        "data": {"path": str(tmp_path / "text.jsonl"), "workers": 1},
        "train": {"steps": 4, "global_batch_size": 4, "seq_len": 16},
        "parallel": {"tp": 1, "pp": 1},
        "compute": {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": 1},
    }
    sagemaker, ended = ensure_running().session().client("sagemaker"), threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.1):
            for job in sagemaker.list_training_jobs(NameContains=name)["TrainingJobSummaries"]:
                description = sagemaker.describe_training_job(
                    TrainingJobName=job["TrainingJobName"]
                )
                if description["SecondaryStatus"] == "Training":
                    os.kill(kernel.pid, signal.SIGINT)  # as JupyterLab's button does
                    return

    thread = threading.Thread(target=interrupt)
    thread.start()
    outputs = kernel(f"smtrain.run({config!r})")
    ended.set()
    thread.join()
    for job in sagemaker.list_training_jobs(NameContains=name)["TrainingJobSummaries"]:
        smtrain.Job(job["TrainingJobName"], "local").stop()
    (error,) = [output for output in outputs if output.output_type == "error"]
    assert len(error.traceback) == 1, error.traceback
    assert len(error.traceback[0].splitlines()) == 1
    assert "keeps running; the same call joins it again" in error.traceback[0]
    assert not [output for output in outputs if "Traceback" in output.get("text", "")]
    assert kernel("1 + 1")[0].data["text/plain"] == "2"


def test_a_wrong_config_in_a_cell_is_its_sentences_and_no_traceback(kernel: Any) -> None:
    (error,) = kernel("smtrain.run({'train': {'lr': -1}})")
    assert error.ename == "ConfigError"
    (message,) = error.traceback
    assert "train.lr" in message
    assert "model.path" in message
    assert 'File "' not in message
    assert "Input" not in message
