"""A whole run on the local control plane: through the same calls, requests and containers as on
AWS.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import smtrain
from smtrain.cli.demo_show import show
from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.s3 import list_objects
from smtrain.client.jobs.listing import list_jobs
from smtrain.core.protocol.uris import split_uri
from smtrain.plane.client import running_endpoint
from smtrain.plane.server.processes import children_of
from smtrain.worker.checkpoint.summary import verify
from testing.plane import plane as local_plane
from tests import shared_imports, tiers
from tests.processes import commands, processes_of, read
from tests.typed import typed

pytestmark = pytest.mark.slow

STEPS = 20
RANKS = 2 if tiers.full() else 1
"""Seconds of each of two hosts."""


@pytest.fixture(scope="module")
def base(local_home: Path, trained_inputs: dict[str, Path]) -> dict[str, Any]:
    return {
        "name": "whole",
        "target": "local",
        "model": {"path": trained_inputs["model"]},
        "data": {"path": trained_inputs["text"]},
        "parallel": {"tp": RANKS, "pp": 2, "micro_batch_size": 2},
        "train": {
            "steps": STEPS,
            "global_batch_size": 16,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 3e-3,
            "warmup_steps": 2,
            "save_interval": 4,
        },
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": RANKS,
        },
        "generate": {"prompts": ["the red fox"], "max_new_tokens": 8},
    }


@pytest.fixture(scope="module")
def whole(base: dict[str, Any]) -> smtrain.Run:
    """Two hosts, all five stages."""
    return smtrain.run(base, say=lambda _: None)


def exact_records(job: smtrain.Job) -> dict[int, dict[str, Any]]:
    """The numbers of every step as the job's metrics.jsonl has them: unrounded."""
    bucket, prefix = split_uri(job.output.removesuffix("model/") + "data/metrics.jsonl")
    body = sagemaker(job.target).s3.get_object(Bucket=bucket, Key=prefix)["Body"].read().decode()
    return {record["step"]: record for record in map(json.loads, body.splitlines())}


def losses(job: smtrain.Job) -> dict[int, tuple[float, float]]:
    return {
        step: (record["loss"], record["grad_norm"]) for step, record in exact_records(job).items()
    }


def wait_for_step(job: smtrain.Job, step: int) -> None:
    for event in job.events(poll=0.05):
        if not isinstance(event, str) and event.text.startswith(f"step={step} "):
            return
    raise AssertionError(f"{job.name} ended before step {step}: {job.failure}")


def kill_all_of(job: smtrain.Job) -> int:
    """kill -9 every process that runs for the job, as a power cut would; gives how many there were.

    All are found before the first is killed: with a host's process 1 the kernel ends every other
    process of it.
    """
    found = processes_of(job)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def test_a_run_goes_from_text_to_text(whole: smtrain.Run) -> None:
    assert [result.stage for result in whole.results] == [
        "prepare",
        "convert",
        "train",
        "export",
        "generate",
    ]
    assert not any(result.skipped for result in whole.results)
    assert len(whole.loss) == STEPS
    assert whole.loss[-1] < whole.loss[0] - 0.5
    assert set(whole.records[0]) >= {"step", "loss", "grad_norm", "lr", "tokens_per_s"}
    assert whole.metrics()["loss"].to_list() == whole.loss
    assert [text["prompt"] for text in whole.texts] == ["the red fox"]
    assert whole.job("train").describe()["FinalMetricDataList"]


def test_a_run_s_summary_says_what_came_of_it_and_how_to_go_on(whole: smtrain.Run) -> None:
    told = whole.summary().splitlines()
    assert (
        told[0] == f"loss:       {whole.loss[0]:.4f} -> {whole.loss[-1]:.4f} (steps 1 to {STEPS})"
    )
    assert re.fullmatch(r"time:       [\d.]+ (s|min.*)", told[1])
    assert told[2] == f"model:      {whole.model}"
    name = whole.config.name
    assert [line[12:] for line in told[3:]] == [
        f"smtrain chat {name}",
        f"smtrain report {name}",
        f"smtrain download {name} FOLDER",
    ]
    assert whole.summary("mine").splitlines()[-1].endswith(f"smtrain push mine YOU/{name}")


def test_its_stages_began_with_their_imports_made(whole: smtrain.Run) -> None:
    """On Linux without a device; nothing that every job of ours has keeps it from a copy."""
    plane = running_endpoint()
    assert plane is not None
    keeper = f"{shared_imports.KEEPER}={plane.pid}".encode()
    started = [pid for pid in children_of(plane.pid) if b"warm.py" in read(pid, "cmdline")]
    copied = [pid for pid in commands() if keeper in read(pid, "environ").split(b"\0")]
    assert len([*started, *copied]) == 1
    told = (plane.home / "local/server.log").read_text().splitlines()
    refused = {
        word for line in told if "no warm start" in line for word in re.findall(r"\w+", line)
    }
    assert not refused & {*plane.environment(), *whole.job("train").describe()["Environment"]}


def test_run_again_does_nothing_again(whole: smtrain.Run, base: dict[str, Any]) -> None:
    before = {job.name for job in list_jobs(SageMakerBackend("local"), limit=100)}
    again = smtrain.run(base, say=lambda _: None)
    assert all(result.skipped for result in again.results)
    assert {job.name for job in list_jobs(SageMakerBackend("local"), limit=100)} == before
    assert again.loss == whole.loss
    assert "5 of 5 stages were done before" in again.summary()
    said: list[str] = []
    assert smtrain.launch(base, stage="train", say=said.append).name == whole.job("train").name
    assert "has done this already" in said[0]


def test_the_export_is_an_ordinary_model(whole: smtrain.Run, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = whole.download(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("the red fox", return_tensors="pt")
    written = model.generate(
        input_ids=inputs["input_ids"], max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    text = tokenizer.decode(written[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.strip() == whole.texts[0]["completion"].strip()
    assert model.dtype == torch.float32


def test_the_demo_shows_all_but_the_curve_without_matplotlib(
    whole: smtrain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(record=True, width=200, file=io.StringIO())
    show(whole, tmp_path, console)
    said = console.export_text()
    assert f"over {STEPS} steps" in said
    assert "> the red fox" in said
    assert "generate" in said
    assert re.search(
        "curve: not drawn: .*matplotlib, which is not installed; run `pip install .*'matplotlib",
        said,
    )
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_job_in_hand_tells_its_state(whole: smtrain.Run) -> None:
    job = smtrain.Job(whole.job("train").name, "local")
    assert job.status == "Completed"
    assert [uri.rstrip("/")[-4:] for uri in job.checkpoints] == ["0016", "0020"]
    assert job.loss == pytest.approx(
        [record["loss"] for record in exact_records(job).values()], abs=1e-6
    )
    assert {line.host for line in job.lines()} >= {"algo-1"}
    assert not list_objects(sagemaker(job.target), job.checkpoints[0] + "nothing")
    job.stop()
    assert job.status == "Completed"
    with pytest.raises(smtrain.JobError, match="no such job on target local"):
        smtrain.Job("nobody", "local").describe()


@pytest.mark.full
def test_killed_between_steps_the_same_command_goes_on_bit_for_bit(
    whole: smtrain.Run, base: dict[str, Any]
) -> None:
    other = {**base, "name": "killed", "data": {"prepared": whole.job("prepare").output}}
    expected = losses(whole.job("train"))
    job = smtrain.launch(other, wait=False, say=lambda _: None)
    wait_for_step(job, 9)
    assert kill_all_of(job) >= 8  # two hosts: a launcher, torchrun and two ranks each
    with pytest.raises(smtrain.JobError, match="ended as Failed"):
        job.wait()
    before = losses(job)
    assert {step: expected[step] for step in before} == before
    again = smtrain.launch(other, say=lambda _: None)
    assert again.name == f"{job.name}-2"
    after = losses(again)
    assert min(after) > 4, "it started again instead of resuming"
    assert min(after) <= max(before) + 1
    assert max(after) == STEPS
    assert {step: expected[step] for step in after} == after


@pytest.mark.full
def test_spot_machines_taken_back_twice_it_ends_bit_for_bit(
    whole: smtrain.Run, base: dict[str, Any]
) -> None:
    plane = local_plane()
    plane.calm()
    spot = {**base["compute"], "spot": True, "max_run": 600, "max_wait": 1200}
    other = {
        **base,
        "name": "spot",
        "data": {"prepared": whole.job("prepare").output},
        "compute": spot,
    }
    job = smtrain.launch(other, wait=False, say=lambda _: None)
    asked, saved = 0, [0]
    for event in job.events(poll=0.05):
        text = "" if isinstance(event, str) else event.text
        if found := re.match(r"asked to stop: saved step (\d+)", text):
            saved.append(int(found[1]))
        # The first reported step in each of the first two attempts.
        elif (
            (found := re.match(r"step=(\d+) ", text))
            and asked < 2
            and asked < len(saved)
            and int(found[1]) > saved[-1]
        ):
            asked += 1
            plane.interrupt(job.name)
    told = job.check().describe()
    statuses = [transition["Status"] for transition in told["SecondaryStatusTransitions"]]
    assert statuses.count("Interrupted") == statuses.count("Restarting") == 2
    assert statuses.count("Downloading") == statuses.count("Training") == 3
    assert told["BillableTimeInSeconds"] < told["TrainingTimeInSeconds"]
    assert {record["step"] for record in job.records} == set(range(1, STEPS + 1))
    expected, last = losses(whole.job("train")), losses(job)
    assert 0 < saved[1] < saved[2] < STEPS
    assert min(last) == saved[2] + 1, "the last attempt resumes from what the one before saved"
    assert {step: expected[step] for step in last} == last


@pytest.mark.full
def test_stopped_it_saves_and_the_same_command_goes_on(
    whole: smtrain.Run, base: dict[str, Any]
) -> None:
    other = {
        **base,
        "name": "stopped",
        "data": {"prepared": whole.job("prepare").output},
        "train": {**base["train"], "save_interval": 1000},
    }
    job = smtrain.launch(other, wait=False, say=lambda _: None)
    wait_for_step(job, 2)
    joined = smtrain.launch(other, wait=False, say=lambda _: None)
    assert joined.name == job.name
    with pytest.raises(smtrain.JobError, match="is writing checkpoints of run 'stopped'"):
        smtrain.launch(other, train={"lr": 1e-3}, wait=False, say=lambda _: None)
    job.stop()
    while job.status != "Stopped":
        time.sleep(0.1)
    done = max(losses(job))
    assert done < STEPS
    own = f"/checkpoints/{job.name}/step_{done:08d}/"
    assert [uri.endswith(own) for uri in job.checkpoints] == [True]
    again = smtrain.launch(other, say=lambda _: None)
    expected, after = losses(whole.job("train")), losses(again)
    assert min(after) == done + 1
    assert {step: expected[step] for step in after} == after
    assert [uri.split("/")[-3] for uri in again.checkpoints] == [
        job.name,
        again.name,
    ], "each in a separate folder"


def test_a_failing_stage_is_one_sentence_with_its_cause(
    base: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(smtrain.JobError) as caught:
        smtrain.run(
            base, name="broken", data={"path": str(tmp_path)}, check=False, say=lambda _: None
        )
    message = str(caught.value)
    assert "broken-prepare-" in message
    assert "a.jsonl" in message
    assert "Traceback" not in message
    with pytest.raises(smtrain.JobError, match="train reads what prepare writes"):
        smtrain.launch(base, name="broken", data={"path": str(tmp_path)}, say=lambda _: None)


def saved_steps(job: smtrain.Job) -> list[str]:
    return [f"{int(uri.rstrip('/').rpartition('_')[2])}," for uri in job.checkpoints]


def test_all_that_a_train_job_left_is_downloaded(whole: smtrain.Run, tmp_path: Path) -> None:
    job = whole.job("train")
    metrics = job.download(tmp_path / "metrics", "metrics")
    logged = [json.loads(line) for line in (metrics / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in logged] == [record["step"] for record in job.records]
    assert list((metrics / "tensorboard").glob("events.*"))
    checkpoints = job.download(tmp_path / "checkpoints", "checkpoints")
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        uri.split("/")[-2] for uri in job.checkpoints
    ]
    assert verify(checkpoints) > 0
    everything = whole.download(tmp_path / "all", "all")
    assert sorted(path.name for path in everything.iterdir()) == ["checkpoints", "metrics", "model"]
    assert (everything / "model/model.safetensors").is_file()
    with pytest.raises(
        smtrain.JobError, match=f"smtrain download {whole.job('export').name} FOLDER"
    ):
        job.download(tmp_path / "model")
    with pytest.raises(
        smtrain.JobError, match="has not left a whole checkpoint; it has left model: "
    ):
        whole.job("export").download(tmp_path / "none", "checkpoints")
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "none").exists()


def test_the_command_line_sees_the_same_jobs(whole: smtrain.Run, tmp_path: Path) -> None:
    def smtrain_cli(*arguments: str) -> str:
        done = typed(*arguments)
        assert not done.returncode, done.stderr
        return done.stdout

    job = whole.job("train")
    listed = smtrain_cli("list", "--name", "whole-train").splitlines()[1].split()
    assert [*listed[:3], listed[-1]] == ["whole", "train", "Completed", job.name]
    status = smtrain_cli("status", job.name)
    assert "status:      Completed (Completed)" in status
    assert f"step:        {STEPS}  loss " in status
    assert [
        line.split()[2] for line in status.splitlines() if line.startswith("checkpoint:")
    ] == saved_steps(job)
    assert f"smtrain download {job.name} FOLDER --what checkpoints" in status
    assert f"metrics:     {job.output.removesuffix('model/')}data/" in status
    assert f"model:       {whole.model}" in status
    assert f"smtrain download {whole.job('export').name} FOLDER" in status
    assert "output:" not in status, "a train job leaves nothing there"
    lines = smtrain_cli("logs", job.name, "--grep", "^step=", "--host", "algo-1").splitlines()
    assert [line.split()[2] for line in lines] == [f"step={n}" for n in range(1, STEPS + 1)]
    assert smtrain_cli("logs", job.name, "--follow", "--grep", "^step=1 ").count("step=") == 1
    assert "Completed already" in smtrain_cli("stop", job.name)
    smtrain_cli("download", whole.job("generate").name, str(tmp_path))
    assert (tmp_path / "generation.json").is_file()
    assert "export AWS_ENDPOINT_URL=http://127.0.0.1:" in smtrain_cli("local", "status")
